"""Documents from files or the hub: loading, the row formats of the paper's data, tokens and loss masks.

A row is recognised by its fields and becomes a list of :class:`Turn`; plain text is one turn without a
role. The formats are a table, so that another data set is one more line.
"""

import glob
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.config import DataConfig
from train.data import Row


@dataclass(frozen=True)
class Turn:
    """A piece of a document."""

    content: str
    role: str = ""
    """``system``, ``user`` or ``assistant``; empty for plain text, which no template wraps."""


Fields = Mapping[str, Any]
SYSTEM = Turn("You are a helpful assistant", "system")


def _task(question: str, answer: str) -> Callable[[Fields], list[Turn]]:
    """A format that asks a question about some fields and answers with others."""
    return lambda row: [
        SYSTEM,
        Turn(question.format_map(row), "user"),
        Turn(answer.format_map(row), "assistant"),
    ]


def _article(row: Fields) -> list[Turn]:
    """Articles and abstracts come as strings or as parallel lists of strings."""
    articles, abstracts = (
        [row[name]] if isinstance(row[name], str) else row[name] for name in ("article", "abstract")
    )
    turns = [SYSTEM]
    for article, abstract in zip(articles, abstracts, strict=True):
        turns.append(Turn(f"Please summarize the following article: {article}", "user"))
        turns.append(Turn(abstract, "assistant"))
    return turns


def _conversation(row: Fields) -> list[Turn]:
    return [Turn(turn["content"], turn["role"]) for turn in row["conversation"]]


FORMATS: dict[frozenset[str], Callable[[Fields], list[Turn]]] = {
    frozenset({"conversation"}): _conversation,
    frozenset({"article", "abstract"}): _article,
    frozenset({"problem", "qwq"}): _task("{problem}", "{qwq}"),
    frozenset({"report", "summary"}): _task(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{report}\n\nNow, write a one-page summary of the report.",
        "Summary: {summary}",
    ),
    frozenset({"document", "summary"}): _task(
        "You are given several news passages. Write a one-page summary of all news.\n\n"
        "News:\n{document}\n\nNow, write a one-page summary of all the news.",
        "Summary: {summary}",
    ),
    frozenset({"transcript", "summary"}): _task(
        "You are given a meeting transcript. Write a summary of the transcript.\n\n{transcript}",
        "{summary}",
    ),
    frozenset({"prefix", "suffix"}): _task(
        "Please complete the code given below.\n{prefix}\nNow, complete the code given.", "{suffix}"
    ),
    frozenset({"target"}): lambda row: [Turn(row["target"])],
    frozenset({"text"}): lambda row: [Turn(row["text"])],
}
"""Row formats by the fields that identify them, the more telling first."""


def to_turns(row: Fields) -> list[Turn]:
    """The turns of a row, by the first format all of whose fields it fills."""
    present = {name for name, value in row.items() if value is not None}
    for fields, turns in FORMATS.items():
        if fields <= present:
            return turns(row)
    known = "; ".join(" + ".join(sorted(fields)) for fields in FORMATS)
    raise ValueError(f"a data row has the fields {sorted(row)}; known formats: {known}")


@dataclass(frozen=True)
class DocumentRows:
    """One document a row, truncated and padded to a length."""

    documents: Sequence[Any]
    tokenizer: Any
    data: DataConfig
    seq_len: int

    def __len__(self) -> int:
        """Documents there are."""
        return len(self.documents)

    def __getitem__(self, index: int) -> Row:
        """The row of a document."""
        tokens, weights = encode_turns(
            to_turns(parse(self.documents[index])), self.tokenizer, self.data, self.seq_len
        )
        fill = self.seq_len - len(tokens)
        pad = self.tokenizer.pad_token_id or 0
        return np.pad(tokens, (0, fill), constant_values=pad), np.pad(weights, (0, fill))


def encode_turns(turns: list[Turn], tokenizer: Any, data: DataConfig, seq_len: int) -> Row:
    """Tokens and weights of a document, at most ``seq_len`` of them.

    Turns are tokenised one by one with the tokenizer's own special tokens, as the published trainer
    does. System prompts are not learned, questions only where prompts are not masked. A masked
    question is shortened so that an answer of ``answer_room`` tokens fits behind it.
    """
    tokens, weights = [], []
    for turn in turns:
        text = data.turn.format(role=turn.role, content=turn.content) if turn.role else turn.content
        ids = tokenizer(text)["input_ids"]
        if not turn.role and tokenizer.eos_token_id is not None:
            ids = [*ids, tokenizer.eos_token_id]
        asked = turn.role == "user" and data.mask_prompts
        if asked:
            ids = ids[: max(0, seq_len - data.answer_room - sum(map(len, tokens)))]
        learned = turn.role != "system" and not asked
        tokens.append(np.asarray(ids, np.int32))
        weights.append(np.full(len(ids), learned, np.float32))
    return np.concatenate(tokens)[:seq_len], np.concatenate(weights)[:seq_len]


def parse(row: Fields | str) -> Fields:
    """A row as it was loaded, its JSON line parsed where it is one."""
    return json.loads(row["json"]) if "json" in row else row


def load_documents(data: DataConfig) -> Sequence[Any]:
    """A random-access sequence of rows, memory-mapped by the ``datasets`` library."""
    import datasets

    datasets.disable_progress_bars()
    if data.hub:
        return datasets.load_dataset(data.hub, split=data.split)
    parts = [_load_file(path, data) for path in _expand(data.files)]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _load_file(path: str, data: DataConfig) -> Any:
    """One file as a dataset."""
    from datasets import load_dataset

    def load(builder: str, **options: Any) -> Any:
        return load_dataset(builder, data_files=path, split="train", **options)

    match Path(path).suffix:
        case ".jsonl":
            # Rows of different shapes do not fit one Arrow schema, and lines do.
            return load("text").rename_column("text", "json")
        case ".json":
            return load("json")
        case ".parquet":
            return load("parquet")
        case ".txt" | ".md" | ".text":
            # Packed, a file is one document; else blank lines separate documents.
            return load("text", sample_by="document" if data.pack else "paragraph")
    raise ValueError(f"{path} is of no known kind; use .jsonl, .json, .parquet or .txt")


def _expand(files: str) -> list[str]:
    """Existing files of comma-separated paths and patterns, in order."""
    found = []
    for pattern in filter(None, (part.strip() for part in files.split(","))):
        matches = sorted(glob.glob(str(Path(pattern).expanduser())))
        if not matches:
            raise ValueError(f"no file matches {pattern!r} of config.data.files")
        found += matches
    return found
