"""Strings that end a row: where a text first meets one.

A row ends with the first token with which its text contains a stop string. The match is the first
one to be complete, of several that end together the longest, so that it does not depend on how the
text is split into tokens. The row's text ends before the match.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from longspec_jax.checks import shown

MOST_STRINGS = 64
"""Most stop strings of a row."""
MOST_CHARACTERS = 4096
"""Most characters of a row's stop strings together."""
HOW = "must be text, a list of texts, or a list of texts for every prompt"


class Match(NamedTuple):
    """A stop string in a text."""

    end: int
    """Characters of the text up to its end."""
    length: int
    """Characters of the stop string."""


class StopStrings:
    """A search for several strings at once, character by character (Aho and Corasick, 1975).

    The state of a search is a number: the node of the longest end of the text so far with which a
    stop string begins. The time is linear in the text, whatever the strings.
    """

    def __init__(self, strings: Sequence[str]):
        """Build the automaton of the strings, none of which is empty."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found = [0]
        for string in strings:
            node = 0
            for character in string:
                if character not in self._next[node]:
                    self._next[node][character] = len(self._next)
                    self._depth.append(self._depth[node] + 1)
                    self._next.append({})
                    self._found.append(0)
                node = self._next[node][character]
            self._found[node] = len(string)
        self._shorter = [0] * len(self._next)
        """The node of the longest proper end of a node's text with which a stop string begins."""
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._next[node].items():
                self._shorter[child] = self._step(self._shorter[node], character)
                self._found[child] = self._found[child] or self._found[self._shorter[child]]
                waiting.append(child)

    def read(self, state: int, text: str) -> tuple[int, Match | None]:
        """Go on with a search, up to the first match.

        Args:
          state: after the text before; 0 at the beginning.

        Returns:
          The state after them, and the match if one ends among them.
        """
        for index, character in enumerate(text):
            state = self._step(state, character)
            if self._found[state]:
                return state, Match(index + 1, self._found[state])
        return state, None

    def held(self, state: int) -> int:
        """Characters at the end of the text with which a stop string may begin."""
        return self._depth[state]

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._next[node]:
            node = self._shorter[node]
        return self._next[node].get(character, 0)


def stop_strings(value: object, rows: int) -> tuple[tuple[str, ...], ...]:
    """The stop strings of every row.

    Args:
      value: one text, a list of texts for all rows, or a list of texts for each.

    Raises:
      ValueError: for anything else, an empty string, too many or too long ones, and lists that do
        not fit the rows.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence | set | frozenset) or isinstance(value, bytes):
        raise ValueError(f"stop_strings={shown(value)} {HOW}")
    items = list(value)
    nested = [item for item in items if not isinstance(item, str)]
    if nested and len(nested) < len(items):
        raise ValueError(f"stop_strings={shown(value)} {HOW}")
    sets = nested if nested else [items] * rows
    if len(sets) != rows:
        raise ValueError(
            f"stop_strings has {len(sets)} lists for {rows} prompt{'s' * (rows != 1)}; pass one "
            "list, or one per prompt"
        )
    return tuple(map(_checked, sets))


def _checked(strings: object) -> tuple[str, ...]:
    if not isinstance(strings, Sequence | set | frozenset) or not all(
        isinstance(one, str) for one in strings
    ):
        raise ValueError(f"stop_strings={shown(strings)} {HOW}")
    found = tuple(dict.fromkeys(strings))
    if "" in found:
        raise ValueError(
            "stop_strings holds an empty text, which would end every row; leave it out"
        )
    size = sum(map(len, found))
    if len(found) > MOST_STRINGS or size > MOST_CHARACTERS:
        raise ValueError(
            f"stop_strings holds {len(found)} texts of {size} characters together; a row may have "
            f"{MOST_STRINGS} of {MOST_CHARACTERS} characters together"
        )
    return found
