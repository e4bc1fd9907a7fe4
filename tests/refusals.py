"""Values that break a rule and values at its edges, made from the rule: one table for all surfaces.

A test of refusals goes through the declared options and these values, so that an option has its
refusals tested when it is declared.
"""

import math
from typing import Any

import numpy as np

from longspec_jax.checks import Each, Maybe, OneOf, Real, Rule, Text, Truth, Whole, is_number


class _Nothing:
    """An object like no other, of one name in every process."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()
NO_NUMBERS = [None, "5", "", True, np.True_, b"5", {}, {5}, NOTHING, [None], ["5"], [[5]], 3j]


def wrong(rule: Rule) -> list[Any]:
    """Values of other types, outside the range, and no numbers."""
    match rule:
        case Maybe():
            return [value for value in wrong(rule.rule) if value is not None]
        case Whole():
            others = [1.5, 5.0, math.nan, math.inf, np.float32(2), 10**30]
            return [*NO_NUMBERS, *others, rule.least - 1, rule.most + 1]
        case Real():
            below = rule.least - 1 if rule.includes_least else rule.least
            outside = [below, -math.inf, math.inf, math.nan, rule.most * 2 + 1]
            return [*NO_NUMBERS, *outside]
        case Truth():
            return [None, 0, 1, 1.0, "yes", "", [True], np.True_]
        case OneOf():
            return [None, "", 3, True, [rule.words[0]], f"{rule.words[0]}x"]
        case Text():
            long = [] if rule.most is None else ["x" * (rule.most + 1)]
            return [None, 3, True, b"x", ["x"], *long, *([""] if rule.least else [])]
        case Each():
            items = [[value] for value in wrong(rule.item)]
            return [None, 3, True, {}, *items, *([[]] if rule.least else [])]
        case _:
            return [NOTHING]


def edges(rule: Rule) -> list[Any]:
    """Values that just keep a rule."""
    match rule:
        case Maybe():
            return [None, *edges(rule.rule)]
        case Whole():
            return [rule.least, rule.most, np.int64(rule.least)]
        case Real():
            least = rule.least if rule.includes_least else np.nextafter(rule.least, rule.most)
            return [rule.most, float(least)]
        case Truth():
            return [True, False]
        case OneOf():
            return [*rule.words]
        case Text():
            return ["x" * max(1, rule.least)]
        case Each():
            return [[value] for value in edges(rule.item)]
        case _:
            return []


def wrong_text(rule: Rule) -> list[str]:
    """Texts of a flag that break a rule, without spaces."""
    texts = ["", "x", "True", *(str(value) for value in wrong(rule) if is_number(value))]
    return [text for text in texts if rule.refusal(rule.of_text(text))]
