"""The row formats of the paper's data, as a table: fields of a row to the turns of a document.

A row is recognised by its fields and becomes a list of :class:`Turn`; plain text is one turn
without a role. Another data set is one more line.
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
ROLES = ("system", "user", "assistant")
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
    if len(articles) != len(abstracts):
        raise ValueError(f"{len(articles)} articles and {len(abstracts)} abstracts do not pair up")
    turns = [SYSTEM]
    for article, abstract in zip(articles, abstracts, strict=True):
        turns.append(Turn(f"Please summarize the following article: {article}", "user"))
        turns.append(Turn(abstract, "assistant"))
    return turns


def _conversation(row: Fields) -> list[Turn]:
    """Turns as they are."""
    turns = []
    for turn in row["conversation"]:
        if turn.get("role") not in ROLES:
            raise ValueError(
                f"a turn of the conversation has role {turn.get('role')!r}; roles are "
                f"{', '.join(ROLES)}"
            )
        turns.append(Turn(turn.get("content"), turn["role"]))
    return turns


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
            return _checked(turns(row), fields)
    known = "; ".join(" + ".join(sorted(fields)) for fields in FORMATS)
    raise ValueError(f"a data row has the fields {sorted(row)}; known formats: {known}")


def _checked(turns: list[Turn], fields: frozenset[str]) -> list[Turn]:
    """The turns, if there is text in all of them."""
    names = " + ".join(sorted(fields))
    if not turns:
        raise ValueError(f"{names} holds no turns; drop the row")
    for turn in turns:
        if not isinstance(turn.content, str):
            kind = type(turn.content).__name__
            raise ValueError(f"{names} holds a value of type {kind} where text belongs")
    return turns
