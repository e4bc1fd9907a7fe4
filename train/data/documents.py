"""From a row of data to a document: the table of row formats, and what becomes of bad rows.

A row is recognised by its fields and becomes a list of :class:`Turn`; plain text is one turn
without a role. Another data set is one more line of the table. A row without a document is refused,
or skipped and counted within a budget.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Turn:
    """A piece of a document."""

    content: str
    role: str = ""
    """``system``, ``user`` or ``assistant``; empty for plain text, which no template wraps."""


Fields = Mapping[str, Any]
Format = Callable[[Fields], list[Turn]]
"""Reads the turns of a row."""
PLAIN = ("target", "text")
"""Fields that are a whole document."""
SYSTEM = Turn("You are a helpful assistant", "system")
_ROLES = {role: role for role in ("system", "user", "assistant")}
SPEAKERS = {"role": _ROLES, "from": {"human": "user", "gpt": "assistant", **_ROLES}}
"""How turns name their speakers: OpenAI's way with ``content``, ShareGPT's with ``value``."""


def _task(question: str, answer: str) -> Callable[[Fields], list[Turn]]:
    """A format that asks a question about some fields and answers with others."""

    def turns(row: Fields) -> list[Turn]:
        texts = _Texts(row)
        return [
            SYSTEM,
            Turn(question.format_map(texts), "user"),
            Turn(answer.format_map(texts), "assistant"),
        ]

    return turns


class _Texts(dict[str, Any]):
    """Fields of a row that are taken as text, which they have to be."""

    def __getitem__(self, name: str) -> str:
        return _text(super().__getitem__(name), name)


def _text(value: object, name: str) -> str:
    """A value, if it is text that a tokenizer takes."""
    if not isinstance(value, str):
        raise ValueError(f"{name} holds a value of type {type(value).__name__} where text belongs")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half a surrogate pair, which cannot be encoded") from error
    return value


def _article(row: Fields) -> list[Turn]:
    """Articles and abstracts come as strings or as parallel lists of strings."""
    articles, abstracts = (
        [row[name]] if isinstance(row[name], str) else _list(row[name], name)
        for name in ("article", "abstract")
    )
    if len(articles) != len(abstracts):
        raise ValueError(f"{len(articles)} articles and {len(abstracts)} abstracts do not pair up")
    turns = [SYSTEM]
    for article, abstract in zip(articles, abstracts, strict=True):
        question = f"Please summarize the following article: {_text(article, 'article')}"
        turns += [Turn(question, "user"), Turn(_text(abstract, "abstract"), "assistant")]
    return turns


def _conversation(field: str) -> Callable[[Fields], list[Turn]]:
    """A format whose field holds turns as they are."""
    return lambda row: [_turn(turn, field) for turn in _list(row[field], field)]


def _turn(turn: object, field: str) -> Turn:
    """A turn of a conversation, written in either way."""
    if not isinstance(turn, Mapping):
        raise ValueError(
            f"{field} holds a value of type {type(turn).__name__} where a turn belongs, such as "
            '{"role": "user", "content": "..."} or {"from": "human", "value": "..."}'
        )
    key, content = ("from", "value") if turn.get("from") is not None else ("role", "content")
    speaker = turn.get(key)
    if not isinstance(speaker, str) or speaker not in SPEAKERS[key]:
        raise ValueError(
            f"a turn of {field} has {key} {speaker!r}; {key}s are {', '.join(SPEAKERS[key])}"
        )
    return Turn(_text(turn.get(content), f"{field}'s {content}"), SPEAKERS[key][speaker])


def _list(value: object, field: str) -> list[object]:
    """A value, if it is a list."""
    if not isinstance(value, list):
        raise ValueError(
            f"{field} holds a value of type {type(value).__name__} where a list belongs"
        )
    return value


def _plain(field: str) -> Callable[[Fields], list[Turn]]:
    """A format whose field is the text."""
    return lambda row: [Turn(_text(row[field], field))]


FORMATS: dict[frozenset[str], Format] = {
    frozenset({"conversation"}): _conversation("conversation"),
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
    frozenset({"messages"}): _conversation("messages"),
    frozenset({"conversations"}): _conversation("conversations"),
    **{frozenset({field}): _plain(field) for field in PLAIN},
}
"""Row formats by the fields that identify them, the more specific first."""


def _questions(row: Fields) -> list[Turn]:
    """A prompt as text, or as the turns of a conversation."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return [Turn(_text(prompt, "prompt"), "user")]
    return [_turn(turn, "prompt") for turn in _list(prompt, "prompt")]


ASKING: dict[frozenset[str], Format] = {
    **{fields: read for fields, read in FORMATS.items() if not fields <= {*PLAIN}},
    frozenset({"prompt"}): _questions,
    **{fields: read for fields, read in FORMATS.items() if fields <= {*PLAIN}},
}
"""Formats of rows whose questions are to be answered; their answers may be missing."""


def to_turns(row: Fields, formats: Mapping[frozenset[str], Format] = FORMATS) -> list[Turn]:
    """The turns of a row, by the first format all of whose fields it fills.

    Raises:
      ValueError: if there is none, or a field holds a value of another type.
    """
    present = {name for name, value in row.items() if value is not None}
    for fields, read in formats.items():
        if fields <= present:
            if turns := read(row):
                return turns
            raise ValueError(f"{' + '.join(sorted(fields))} holds no turns; drop the row")
    known = "; ".join(" + ".join(sorted(fields)) for fields in formats)
    raise ValueError(f"a data row has the fields {sorted(row)}; known formats: {known}")


class BadRows:
    """Counts the rows that cannot be used, and refuses the first one beyond its budget.

    ``option`` is what is typed to raise the budget; empty where there is nothing to type.
    """

    def __init__(self, budget: int, option: str = "--config.data.max_bad_rows"):
        self.count, self.first = 0, ""
        self._budget, self._option = budget, option

    def add(self, place: str, error: ValueError) -> None:
        """Take note of a row at a place, such as ``line 7 of data.jsonl``.

        Raises:
          ValueError: if there are more of them than may be skipped.
        """
        self.count += 1
        self.first = self.first or f"{place}: {error}"
        if self.count <= self._budget:
            return
        if self._budget:
            raise ValueError(
                f"more rows than {self._option}={self._budget} cannot be used, the "
                f"first is {self.first}; repair or remove them, or raise the number"
            )
        skip = f", or skip a number of them with {self._option}=NUMBER" if self._option else ""
        raise ValueError(f"{self.first}; repair or remove the row{skip}")

    def summary(self) -> str:
        """How many were skipped and which was the first; empty if there was none."""
        rows = "row that cannot" if self.count == 1 else "rows that cannot"
        return f"skipped {self.count} {rows} be used, the first is {self.first}" * bool(self.count)
