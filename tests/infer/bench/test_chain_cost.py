"""The cost model of chains, beside chains that are drawn token by token."""

import numpy as np
import pytest

from infer.bench.chain_cost import ChainCost, confirmed, measured_agreement

COST = ChainCost(0.003, 0.010, partial_yield=3.0, height=6, end_yield=2.5)


def test_by_hand() -> None:
    """Chains of 12: three rounds of three tokens, and a tree behind that yields 2.5."""
    assert COST.rounds(12) == 3 and COST.rounds(6) == COST.rounds(2) == 1
    assert COST.tokens(12, 1.0) == 9 + 2.5
    assert COST.tokens(12, 0.5) == pytest.approx(sum(0.5**i for i in range(10)) + 1.5 * 0.5**9)
    assert COST.speed(12, 1.0) == pytest.approx(11.5 / 0.019)
    assert COST.tokens(12, 0.0) == 1, "nothing is confirmed: the full pass's own token remains"


@pytest.mark.parametrize("agreement", [0.3, 0.9, 0.99])
def test_it_is_what_drawn_chains_have(agreement: float) -> None:
    draw = np.random.default_rng(0)
    agrees = draw.random((40000, 8)) < agreement
    held = np.cumprod(agrees, axis=1).sum(axis=1)
    assert confirmed(8.0, agreement) == pytest.approx(held.mean(), abs=0.05)


@pytest.mark.parametrize("levels", [6, 12, 24])
def test_it_pays_from_the_break_even_on(levels: int) -> None:
    speed = COST.speed(levels, 0.93)
    found = COST.break_even(levels, speed)
    assert found == pytest.approx(0.93, abs=1e-6)
    assert COST.break_even(levels, COST.speed(levels, 1.0)) is None


def test_the_better_draft_and_target_agree_the_longer_the_best_chain() -> None:
    chains = (6, 12, 24, 48)
    best = [COST.best(chains, agreement) for agreement in (0.2, 0.9, 0.97, 0.999)]
    assert best == sorted(best) and best[0] == 6 and best[-1] == 48


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ((0.0, 1.0, 2.0, 6), "partial_seconds=0.0 and full_seconds=1.0 must be above 0"),
        ((1.0, 1.0, 0.5, 6), "partial_yield=0.5 must be 1 to height=6"),
        ((1.0, 1.0, 2.0, 6, 0.0), "end_yield=0.0 at least 1"),
        ((1.0, 1.0, float("nan"), 6), "partial_yield=nan"),
    ],
)
def test_what_no_round_has_is_refused(figures: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChainCost(*figures)  # type: ignore[arg-type]  # As it was measured.


@pytest.mark.parametrize("agreement", [0.5, 0.9, 0.98])
def test_agreement_is_found_again_in_counts(agreement: float) -> None:
    """Of chains that differ in length, with trees behind them that add to some counts."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(9, 14, 4000)
    held = np.cumprod(draw.random((4000, 14)) < agreement, axis=1).sum(axis=1)
    counts = np.where(held < lengths, held, lengths + draw.integers(0, 4, 4000))
    assert measured_agreement(counts.tolist(), 9) == pytest.approx(agreement, abs=0.01)


def test_no_counts_are_no_agreement() -> None:
    assert np.isnan(measured_agreement([], 5)) and np.isnan(measured_agreement([0, 0], 0))
    assert measured_agreement([0], 5) == 0.0 and measured_agreement([7, 5], 5) == 1.0
