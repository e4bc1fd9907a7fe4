"""The policy on recorded text: how near it comes to the best fixed tree, by a table of seconds.

``emitted_smollm2.json`` holds what SmolLM2's shipped draft and lookup would have emitted at every
position of four texts, three greedy ones and one at temperature 1, and what a joined tree shows of
lookup alone there; a digit of base 32 is a position.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.chooser import Measurement, Watch
from longspec_jax.decoding.policy import FastestWithinBudget
from longspec_jax.generation.speeds import along_with, guessed_tokens

TEXTS = json.loads(Path(__file__).with_name("emitted_smollm2.json").read_text("utf-8"))
SMALL, ALONE, WIDE = TREES = "4,4,4@16~15", "none@16~15", "4,16,16,16,16@64~16"
GUESSES = [guessed_tokens(TreeConfig.parse(tree)) for tree in ("none", *TREES)]
SHOWS = (
    (True, False, False, False),
    (True, True, True, False),
    (True, False, True, False),
    (True, True, True, True),
)
SECONDS = {
    "SmolLM2": (0.96e-3, 1.85e-3, 1.2e-3, 2.43e-3),
    "1.5B": (1.88e-3, 3.0e-3, 2.25e-3, 3.8e-3),
    "large": (5e-3, 6e-3, 5.25e-3, 6.7e-3),
    # Of 1.5B, too: its largest tree has 32 nodes, the others 16 as here.
    "EAGLE-3": (1.65e-3, 2.25e-3, 1.86e-3, 2.5e-3),
}
"""Of plain rounds and of the trees, about as on an H100 and an H200."""
NEAR = {"SmolLM2": 0.9, "1.5B": 0.87, "large": 0.97, "EAGLE-3": 0.9}
LATER = {"SmolLM2": 0.89, "1.5B": 0.92, "large": 0.98, "EAGLE-3": 0.97}
WAIT = 1.5e-3
LONG_WAIT = 3e-3
"""As on an H200 with 30 layers of SmolLM2."""
after = jax.jit(Watch.after, static_argnums=1)
leads = jax.jit(Watch.leads, static_argnums=1)


def shown(text: str, index: int, at: int) -> list[float]:
    """Tokens of a round by every candidate, as far as the one that runs shows them."""
    emitted = TEXTS[text]
    own = [1] + [int(emitted[tree][at], 32) for tree in TREES]
    if index in (1, 3):
        own[2] = int(emitted[f"{TREES[index - 1]} shows"][at], 32)
    return [tokens if SHOWS[index][other] else math.nan for other, tokens in enumerate(own)]


def decoded(
    text: str,
    seconds: Sequence[float],
    fixed: int | None = None,
    guesses: Sequence[float] = GUESSES,
    emitted: Sequence[list[int]] = (),
    wait: float = WAIT,
) -> float:
    """Seconds that a text takes, by the policy's choices or by one candidate to its end.

    What each candidate's rounds emitted goes to ``emitted``.
    """
    policy = FastestWithinBudget.timed(seconds, guesses, wait=wait, shows=SHOWS)
    length, at, elapsed = len(TEXTS[text][SMALL]), 0, 0.0
    while at < length:
        choice = policy.choose()
        index, watch, rounds = choice.candidate, policy.watch(choice), []
        if fixed is not None:
            index, watch = fixed, Watch.of(length, len(seconds))
        while at < length and len(rounds) < watch.rounds and (not rounds or leads(watch, index)):
            rounds.append(shown(text, index, at))
            at += int(rounds[-1][index])
            counted = np.nan_to_num(np.asarray([rounds[-1]]), nan=-1).astype(np.int32)
            watch = after(watch, index, counted)
        spent = len(rounds) * seconds[index] + wait
        own = [int(each[index]) for each in rounds]
        if emitted:
            emitted[index].extend(own)
        seen = Measurement(len(rounds), len(rounds), sum(own), spent, np.asarray(rounds))
        elapsed, policy = elapsed + spent, policy.observe(index, seen)
    return elapsed


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("table", SECONDS)
def test_the_choice_comes_near_the_best_fixed_tree(table: str, text: str) -> None:
    """Of a first call of its kind, the wait at the end of every launch counted."""
    seconds = SECONDS[table]
    fixed = [decoded(text, seconds, index) for index in range(len(seconds))]
    chosen = decoded(text, seconds)
    assert chosen <= fixed[0], "no slower than plain decoding"
    assert min(fixed) >= NEAR[table] * chosen


@pytest.mark.parametrize("texts", [("code", "prose", "chat"), ("sampled",)])
@pytest.mark.parametrize("table", SECONDS)
def test_later_calls_come_nearer(table: str, texts: Sequence[str]) -> None:
    """What other texts emitted does not lead away from what is the fastest in this one."""
    seconds = SECONDS[table]
    emitted: list[list[int]] = [[] for _ in seconds]
    trees = [TreeConfig.parse(tree) for tree in ("none", *TREES)]
    shares, guesses = [], GUESSES
    for text in texts * 3:
        fixed = [decoded(text, seconds, index, wait=LONG_WAIT) for index in range(len(seconds))]
        shares.append(min(fixed) / decoded(text, seconds, None, guesses, emitted, LONG_WAIT))
        guesses = [
            statistics.fmean(own) if own and index else guess
            for index, (own, guess) in enumerate(zip(emitted, GUESSES, strict=True))
        ]
        ran = [index for index, own in enumerate(emitted) if own]
        first = max(ran, key=lambda index: guesses[index] / seconds[index])
        if first:
            guesses = along_with(first, guesses, trees, [row[first] for row in SHOWS])
    later = shares[len(texts) :]
    assert min(later) >= 0.8
    assert statistics.geometric_mean(later) >= LATER[table]
