"""The work of :mod:`train.regenerate`: the target answers the questions of a data set.

System and user turns are kept. Assistant turns are dropped: the target answers every user turn.
Of plain text, which has no turns, a prefix is kept, and the target continues it.

The next question of a row is asked as soon as the one before it is answered. Tokens of an answer
depend on its prompt, the options and its seed, and in float32 on nothing else.

The output has whole lines, in order, none of them twice. Every line names the row it was made of,
so that the last line says where to continue. What the rows depend on lies in a small file next to
it, and a run that differs in any of it is refused.
"""

import argparse
import fcntl
import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from longspec_jax import LongSpec, files, make_mesh
from longspec_jax.checks import require_tokenizer
from longspec_jax.embedded import DEMO_NAME, demo_drafts, demo_target
from longspec_jax.generation.inputs import to_prompt
from longspec_jax.generation.requests import RequestEngine
from longspec_jax.generation.text import loops
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.hub import local_model
from longspec_jax.weights.model_files import read_config

from .config import DataConfig
from .data.documents import ASKING, BadRows, Fields, Turn, to_turns
from .data.loading import Documents, check_no_input, data_digest
from .data.tokens import load_tokenizer
from .fingerprint import differences, fingerprint, model_digest, tokenizer_digest

COUNTED = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "prefix_tokens", "dtype")
"""Options that the rows depend on as they are typed."""
MOST_TOKENS = 16384
"""Tokens of a row if none are named and the target has as many positions."""
IN_HAND = 16
"""Rows between reading and writing, for each slot."""
BETWEEN = 5.0
"""Seconds between two lines of progress."""


def regenerate(arguments: argparse.Namespace) -> str:
    """Answer the rows of a data set; what came of it, in a sentence.

    Raises:
      ValueError, OSError: for a mistake, or data or a target that cannot be read.
    """
    data = DataConfig.whole(arguments)
    out = files.writable(files.expanded(arguments.out), arguments.out, of_results=False)
    check_no_input(out, data.files)
    is_demo, template = arguments.target == DEMO_NAME, _template(arguments)
    source = demo_target() if is_demo else local_model(arguments.target, arguments.revision)
    most = _row_tokens(arguments, source)
    bad = BadRows(arguments.max_bad_rows, "--max_bad_rows")
    questions = partial(kept_turns, prefix_tokens=arguments.prefix_tokens)
    documents = Documents(data, bad, questions)
    used = template or load_tokenizer(source).chat_template
    rows = _checked(documents, source, used)
    output = Output(out, _settings(arguments, most, data, source, used))
    try:
        if output.next_row >= rows:
            return f"{out} has {output.rows} rows and is complete"
        spec = LongSpec.from_pretrained(
            source,
            draft=demo_drafts(arguments.draft or None),
            dtype=arguments.dtype,
            mesh=make_mesh(**arguments.mesh) if arguments.mesh else None,
        )
        slots, tree = arguments.max_num_seqs, arguments.tree
        chooses = bool(spec.drafts) and tree is None and spec.mesh is None
        with spec.engine(
            max_num_seqs=slots, max_model_len=most, tree=tree, adaptive=chooses
        ) as engine:
            work = Answering(spec, engine, arguments, most, bad, template)
            # Bad rows have been counted.
            left = enumerate(replace(documents, bad=BadRows(sys.maxsize)))
            return _run(work, islice(left, output.next_row, None), rows, output)
    finally:
        output.close()


def _template(arguments: argparse.Namespace) -> str | None:
    """The text of the chat template that is named."""
    if (given := arguments.chat_template) is None:
        return None
    try:
        return files.expanded(given).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat_template={given} is not UTF-8 text; convert it first") from error


def _row_tokens(arguments: argparse.Namespace, source: Path) -> int:
    """Most tokens of a row; the target sets the maximum."""
    positions = target_config(read_config(source), "float32").max_positions
    most = arguments.max_row_tokens or min(positions, MOST_TOKENS)
    if most > positions:
        raise ValueError(
            f"--max_row_tokens={most} is more than the target was made for; give at most "
            f"{positions}"
        )
    if most - arguments.max_new_tokens < max(1, arguments.prefix_tokens):
        raise ValueError(
            f"--max_row_tokens={most} has no room for prompts next to "
            f"--max_new_tokens={arguments.max_new_tokens}"
            + f" and --prefix_tokens={arguments.prefix_tokens}" * bool(arguments.prefix_tokens)
            + "; give fewer new tokens"
        )
    return most


def _checked(documents: Documents, source: Path, template: str | None) -> int:
    """The number of rows. All are checked before the target is loaded."""
    row = 0
    for row, turns in enumerate(documents, 1):
        if not template and not is_text(turns):
            raise ValueError(
                f"row {row} is a conversation, and the tokenizer of {source} has no chat template; "
                "give --chat_template=FILE, the Jinja template the target was trained with "
                "(Vicuna's is longspec_jax.generation.chat.VICUNA_TEMPLATE)"
            )
    return row


def _settings(
    arguments: argparse.Namespace, most: int, data: DataConfig, source: Path, template: str | None
) -> dict[str, Any]:
    """What the rows depend on, by the names of options where it has one."""
    return {
        **{f"--{name}": getattr(arguments, name) for name in COUNTED},
        "--max_row_tokens": most,
        "the chat template": fingerprint({"template": template}),
        "the data": data_digest(data),
        "the target": model_digest(source),
        "the tokenizer": tokenizer_digest(source),
    }


def _run(
    work: "Answering", rows: Iterable[tuple[int, list[Turn]]], total: int, output: "Output"
) -> str:
    """Answer the rows that are left of all, print the progress; what came of them."""
    conversations = (Conversation(row, deque(turns)) for row, turns in rows)
    started, counts, told = time.monotonic(), work.counts, -BETWEEN
    for done in work.run(conversations):
        output.append([row.record() for row in done])
        seconds = time.monotonic() - started
        if counts.answers and (seconds > told + BETWEEN or not work.is_busy):
            told = seconds
            print(
                f"{output.rows} rows of {total}, {counts.answers} answers of {counts.tokens} "
                f"tokens in {seconds:.0f} s, {counts.tokens / max(seconds, 1e-9):.1f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    room = f"--max_row_tokens={work.most}"
    notes = {
        f"left out {counts.too_long} without room for an answer within {room}": counts.too_long,
        f"ended {counts.shortened} before a question without room within {room}": counts.shortened,
        f"left out {counts.looping} answers that repeat themselves": counts.looping,
        f"cut {counts.cut} at --max_new_tokens={work.arguments.max_new_tokens}": counts.cut,
        work.bad.summary(): work.bad.count,
    }
    return "; ".join([f"{output.path} has {output.rows} rows", *filter(notes.get, notes)])


# The rows.


def kept_turns(row: Fields, prefix_tokens: int = 0) -> list[Turn]:
    """The turns of a row that are kept; plain text only if a prefix of it is.

    Raises:
      ValueError: for a row with nothing to answer.
    """
    kept = [turn for turn in to_turns(row, ASKING) if turn.role != "assistant"]
    if is_text(kept):
        if not prefix_tokens:
            raise ValueError(
                "the row is plain text, which asks nothing; give --prefix_tokens=NUMBER, and the "
                "target continues that many of its tokens"
            )
    elif not any(turn.role == "user" for turn in kept):
        raise ValueError("no turn of the row is a user's, so there is nothing to answer")
    return kept


def is_text(turns: Iterable[Turn]) -> bool:
    """Whether a row is plain text."""
    return any(not turn.role for turn in turns)


@dataclass
class Conversation:
    """A row, as far as it has been answered."""

    row: int
    """Its number among the sound rows of the data."""
    waiting: deque[Turn]
    """Turns that are still to come."""
    turns: list[Turn] = field(default_factory=list)
    """Turns in order, answers among them; of plain text the text with what was added."""
    complete: bool = True
    """Whether the last answer came to its own end."""
    is_asked: bool = False
    """Whether the engine has its question."""

    @property
    def answers(self) -> int:
        """How many there are."""
        return sum(turn.role in ("assistant", "") for turn in self.turns)

    def ask(self) -> bool:
        """Advance to the next question; whether there is one."""
        while self.waiting:
            turn = self.waiting.popleft()
            self.turns.append(turn)
            if turn.role in ("user", ""):
                return True
        self.unask()
        return False

    def unask(self) -> None:
        """End after the last answer."""
        while self.turns and self.turns[-1].role != "assistant":
            self.turns.pop()
        self.waiting.clear()

    def answer(self, text: str, *, complete: bool) -> None:
        """Take the answer to the last question; one that was cut off ends the conversation."""
        if is_text(self.turns):
            self.turns[-1] = Turn(text)
        else:
            self.turns.append(Turn(text.strip(), "assistant"))
        self.complete = complete
        if not complete:
            self.waiting.clear()

    def messages(self) -> list[dict[str, str]]:
        """The turns so far, as chat templates take them."""
        return [{"role": turn.role, "content": turn.content} for turn in self.turns]

    def record(self) -> dict[str, Any]:
        """The row that is written; training reads ``messages`` or ``text``."""
        text = is_text(self.turns)
        content = {"text": self.turns[0].content} if text else {"messages": self.messages()}
        return {"row": self.row, "complete": self.complete, **content}


def seed_of(seed: int, row: int, answer: int) -> int:
    """The seed of an answer, the same whatever is answered alongside it; 32 bits."""
    digest = hashlib.sha256(f"{seed}/{row}/{answer}".encode()).digest()
    return int.from_bytes(digest[:4])


# The answers.


@dataclass
class Counts:
    """What came of the rows so far."""

    answers: int = 0
    tokens: int = 0
    """Of the answers."""
    too_long: int = 0
    """Rows left out, their first question being too long."""
    shortened: int = 0
    """Rows that end before a question for which there was no room."""
    looping: int = 0
    """Answers left out because they repeat themselves; each ends its row."""
    cut: int = 0
    """Rows whose last answer was cut off."""


@dataclass
class Answering:
    """Answers conversations in their order, through the slots of an engine."""

    spec: LongSpec
    engine: RequestEngine
    arguments: argparse.Namespace
    """Of the command: how answers are drawn, and how long they may be."""
    most: int
    """Tokens of a row."""
    bad: BadRows
    """Takes note of rows that the chat template cannot write."""
    template: str | None = None
    """Instead of the tokenizer's own."""
    counts: Counts = field(default_factory=Counts)
    _asked: dict[int, tuple[Conversation, np.ndarray, list[int], list[str]]] = field(
        default_factory=dict
    )
    """By the number of the request: prompt, and the tokens and texts of the answer so far."""

    @property
    def is_busy(self) -> bool:
        """Whether a question waits for its answer."""
        return bool(self._asked)

    def run(self, rows: Iterator[Conversation]) -> Iterator[list[Conversation]]:
        """Lists of answered rows, in the order they come in; a list may be empty.

        Rows that are left out are not among them.

        Raises:
          FloatingPointError: if the target's logits are not finite.
          ValueError: if more rows cannot be written by the template than the budget allows.
        """
        in_hand = deque[Conversation]()  # Those that are done wait for the ones before.
        while True:
            fresh = list(islice(rows, IN_HAND * self.arguments.max_num_seqs - len(in_hand)))
            for row in fresh:
                self._ask(row)
            in_hand += fresh
            if not in_hand:
                return
            done = []
            while in_hand and not in_hand[0].is_asked:
                done.append(in_hand.popleft())
            done = [row for row in done if row.turns]
            self.counts.cut += sum(not row.complete for row in done)
            yield done
            if self.is_busy:
                self._step()

    def _ask(self, row: Conversation) -> None:
        """Ask the next question of a row, if there is one, and room for it."""
        row.is_asked = False
        if not (row.waiting and row.ask()):
            return
        try:
            prompt = self._prompt(row)
        except ValueError as error:
            row.unask()
            self.bad.add(f"row {row.row + 1} of the rows that can be read", error)
            return
        given = self.arguments
        if len(prompt) + given.max_new_tokens <= self.most:
            number = self.engine.submit(
                prompt,
                max_new_tokens=given.max_new_tokens,
                temperature=given.temperature,
                top_k=given.top_k,
                top_p=given.top_p,
                seed=seed_of(given.seed, row.row, row.answers),
            )
            self._asked[number] = row, prompt, [], []
            row.is_asked = True
            return
        row.unask()
        if row.turns:
            self.counts.shortened += 1
        else:
            self.counts.too_long += 1

    def _prompt(self, row: Conversation) -> np.ndarray:
        """Token ids of the turns so far."""
        tokenizer, vocab_size = self.spec.tokenizer, self.spec.target_config.vocab_size
        if is_text(row.turns):
            whole = to_prompt(row.turns[0].content, tokenizer, vocab_size)
            return whole[: self.arguments.prefix_tokens]
        return to_prompt(row.messages(), tokenizer, vocab_size, self.template)

    def _step(self) -> None:
        """One step of the engine; an answer that has ended brings the next question of its row."""
        for output in self.engine.step():
            row, _, tokens, texts = self._asked[output.id]
            tokens += output.tokens
            texts.append(output.text)
            if output.finish == "error":
                raise FloatingPointError(
                    f"row {row.row + 1} cannot be answered: "
                    f"{output.reason or 'the target has no finite logits'}"
                )
            if output.finish is not None:
                self._take(output.id)
                self._ask(row)

    def _take(self, number: int) -> None:
        """Add an answer to its row, or leave it out."""
        row, prompt, tokens, texts = self._asked.pop(number)
        text = "".join(texts)
        if is_text(row.turns):
            text = require_tokenizer(self.spec.tokenizer).decode(
                [*prompt.tolist(), *tokens],
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
        self.counts.answers += 1
        self.counts.tokens += len(tokens)
        if loops(tokens):
            self.counts.looping += 1
            row.unask()
        else:
            row.answer(text, complete=tokens[-1] in self.spec.stop_tokens)


# The file.


class Output:
    """An output file, open for more rows; no other process may write it meanwhile."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        """Open a new file, or continue one; a line that was cut off is removed.

        Args:
          path: the file.
          settings: what its rows depend on, as JSON values by the names of their options.

        Raises:
          ValueError: if the file is there and of other settings, or not of this command.
          OSError: if it cannot be written.
        """
        self.path = path
        settings_file = path.with_name(f"{path.name}.settings")
        if path.exists() and path.stat().st_size:
            _check_same(path, settings_file, settings)
        else:
            files.replace(settings_file, f"{json.dumps(settings, indent=1)}\n".encode())
        self._file = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"another process is writing {path}; wait for it to end") from error
        self.rows, self.next_row = self._mend()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, which are on the disk when this returns."""
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        if not lines:
            return
        data = memoryview("".join(lines).encode())
        while data:  # The system may take less than it is given.
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())
        self.rows += len(lines)

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def _mend(self) -> tuple[int, int]:
        """Cut the file after its last whole line; how many lines there are, and the next row."""
        count, end, last = 0, 0, b""
        with self.path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    count, end, last = count + 1, end + len(line), line
        self._file.truncate(end)
        if not count:
            return 0, 0
        try:
            return count, int(json.loads(last)["row"]) + 1
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"this command did not write the last line of {self.path}; remove the line, "
                "or name another --out"
            ) from error


def _check_same(path: Path, settings_file: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to continue rows that were made with other settings."""
    try:
        before = json.loads(settings_file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} exists and was not written by this command ({settings_file.name} is missing or"
            " damaged); name another --out"
        ) from error
    if changes := differences(before, settings):
        raise ValueError(
            f"{path} was written with other settings: {changes}; repeat them to continue it, or "
            "name another --out"
        )
