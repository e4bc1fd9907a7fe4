"""The policy on recorded text: how near it comes to the best fixed tree, by a table of seconds.

``emitted_smollm2.json`` holds what SmolLM2's shipped draft and lookup would have emitted at every
position of four texts, three greedy ones and one at temperature 1, and what a joined tree shows of
lookup alone there; a digit of base 32 is a position.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from longspec_jax.decoding.policy import FastestWithinBudget, Measurement

TEXTS = json.loads(Path(__file__).with_name("emitted_smollm2.json").read_text("utf-8"))
SMALL, ALONE, WIDE = TREES = "4,4,4@16~15", "none@16~15", "4,16,16,16,16@64~16"
GUESSES = 1.0, 2.5, 1.3, 2.9
SECONDS = {"1.5B": (1.67e-3, 2.6e-3, 2.0e-3, 3.2e-3), "large": (5e-3, 6e-3, 5.25e-3, 6.7e-3)}
"""Of plain rounds and of the trees, about as on an H100."""


def decoded(text: str, seconds: Sequence[float], fixed: int | None = None) -> float:
    """Seconds that a text takes, by the policy's choices or by one candidate to its end."""
    policy = FastestWithinBudget.timed(seconds, (1.0, None, None, None), None, GUESSES)
    emitted, shows = TEXTS[text], {1: f"{SMALL} shows", 3: f"{WIDE} shows"}
    length, at, elapsed = len(emitted[SMALL]), 0, 0.0
    while at < length:
        index, most = policy.choose() if fixed is None else (fixed, length)
        seen = Measurement()
        while seen.rounds < most and at < length:
            count = int(emitted[TREES[index - 1]][at], 32) if index else 1
            other = {2: Measurement(1, 1, int(emitted[shows[index]][at], 32))} if index % 2 else {}
            seen += Measurement(1, 1, count, seconds[index], other)
            at += count
        elapsed += seen.seconds
        policy = policy.observe(index, seen)
    return elapsed


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("table", SECONDS)
def test_the_choice_comes_near_the_best_fixed_tree(table: str, text: str) -> None:
    seconds = SECONDS[table]
    fixed = [decoded(text, seconds, index) for index in range(len(seconds))]
    chosen = decoded(text, seconds)
    assert chosen <= fixed[0], "no slower than plain decoding"
    assert min(fixed) >= 0.8 * chosen
