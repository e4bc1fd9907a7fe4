"""Draws follow the target's distribution, and their noise depends on seed and position alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.sampling import (
    NO_TOKEN,
    Sampling,
    SamplingKind,
    cumulative_mass,
    draw,
    noise,
    perturb,
)

VOCABULARY = 11


def sampling(rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    return Sampling(
        jnp.full((rows,), temperature),
        jnp.full((rows,), top_k, jnp.int32),
        jnp.full((rows,), top_p),
        jnp.arange(rows, dtype=jnp.uint32),
        SamplingKind(stochastic=temperature > 0, filtered=top_k > 0 or top_p < 1),
    )


@partial(jax.jit, static_argnums=2)
def drawn_at(logits: jax.Array, positions: jax.Array, vocabulary: int, s: Sampling) -> jax.Array:
    """Draws with the noise of these positions."""
    return draw(logits, noise(s, positions, vocabulary), s)


def expected(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The filtered distribution, token by token."""
    probs = np.exp(logits / temperature - np.max(logits / temperature))
    order = np.argsort(-probs)
    kept = order[: top_k or len(probs)]
    mass = probs[kept] / probs[kept].sum()
    kept = kept[: int(np.searchsorted(np.cumsum(mass), top_p)) + 1]
    result = np.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 4, 1.0), (1.0, 0, 0.7), (0.9, 6, 0.8)],
)
def test_draws_follow_the_target(temperature: float, top_k: int, top_p: float) -> None:
    rows = 40_000
    logits = 1.5 * np.random.default_rng(3).standard_normal(VOCABULARY)
    s = sampling(rows, temperature, top_k, top_p)
    positions = jnp.full((rows, 1), 17)
    batch = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, 1, VOCABULARY))
    drawn = np.asarray(drawn_at(batch, positions, VOCABULARY, s))[:, 0]
    counts = np.bincount(drawn, minlength=VOCABULARY)
    law = expected(logits, temperature, top_k, top_p)
    assert counts[law == 0].sum() == 0
    inside = law > 0
    chi_square = ((counts - rows * law)[inside] ** 2 / (rows * law[inside])).sum()
    assert chi_square < 35  # 10 degrees of freedom at most: exceeded once in ten thousand.


def test_draws_at_different_positions_are_independent() -> None:
    rows = 20_000
    s = sampling(rows, 1.0)
    positions = jnp.broadcast_to(jnp.array([[4, 5]]), (rows, 2))
    drawn = np.asarray(drawn_at(jnp.zeros((rows, 2, 3)), positions, 3, s))
    joint = np.histogram2d(drawn[:, 0], drawn[:, 1], bins=3)[0] / rows
    np.testing.assert_allclose(joint, 1 / 9, atol=0.012)


def test_noise_depends_on_seed_and_position_alone() -> None:
    s = sampling(3, 1.0)
    together = noise(s, jnp.array([[3, 8], [3, 8], [9, 3]]), VOCABULARY)
    alone = noise(
        Sampling(s.temperature[:1], s.top_k[:1], s.top_p[:1], s.seed[2:], s.kind),
        jnp.array([[3]]),
        VOCABULARY,
    )
    np.testing.assert_array_equal(together[2, 1], alone[0, 0])
    assert not np.array_equal(together[0, 0], together[1, 0])
    assert not np.array_equal(together[0, 0], together[0, 1])


def test_temperature_zero_is_the_argmax_with_ties_to_the_lowest_token() -> None:
    logits = jnp.array([[[1.0, 3.0, 3.0, 2.0]]])
    s = sampling(1, 0.0)
    assert int(draw(logits, noise(s, jnp.array([[0]]), 4), s)[0, 0]) == 1


def test_rows_of_both_kinds_share_a_batch() -> None:
    s = sampling(2, 1.0).replace(temperature=jnp.array([0.0, 1.0]))
    logits = jax.random.normal(jax.random.key(0), (2, 1, VOCABULARY))
    gumbel = noise(s, jnp.array([[5], [5]]), VOCABULARY)
    np.testing.assert_array_equal(perturb(logits, gumbel, s)[0], logits[0])
    below_the_best = logits[1] - logits[1].max()
    np.testing.assert_allclose(perturb(logits, gumbel, s)[1], below_the_best + gumbel[1], rtol=1e-6)


def test_a_perfect_draft_ranks_the_draw_first() -> None:
    s = sampling(50, 0.8, top_p=0.9)
    logits = jax.random.normal(jax.random.key(1), (50, 1, VOCABULARY))
    gumbel = noise(s, jnp.arange(50)[:, None], VOCABULARY)
    scores = RoundNoise(gumbel, s).scores(logits, 0)
    np.testing.assert_array_equal(scores.argmax(axis=-1), draw(logits, gumbel, s))


def test_noise_has_its_tail() -> None:
    """The cheap noise lies on a grid and ends at 15.9: a tail of many tokens was drawn too seldom.

    Of a hundredth of the mass over 128k tokens it drew less than half.
    """
    count = 32 * 128_256
    gumbel = np.asarray(noise(sampling(1, 1.0), jnp.arange(32)[None], 128_256)).ravel()
    for edge in (6.0, 10.0):
        expected = count * -np.expm1(-np.exp(-edge))
        assert abs((gumbel > edge).sum() - expected) < 4 * expected**0.5
    largest = np.sort(gumbel)[-64:]
    assert len(np.unique(largest)) == 64


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (50, 1.0)])
def test_a_neighbours_filter_leaves_an_unfiltered_row_alone(top_k: int, top_p: float) -> None:
    """Summed from the likely end, float32 reaches 1 with most of a wide vocabulary to come."""
    s = sampling(2, 1.0, top_k, top_p).replace(
        top_k=jnp.array([0, top_k]), top_p=jnp.array([1.0, top_p])
    )
    logits = 6 * jax.random.normal(jax.random.key(2), (2, 1, 128_256))
    possible = jnp.isfinite(perturb(logits, jnp.zeros((2, 1, 1)), s)).sum(axis=-1)[:, 0]
    assert int(possible[0]) == 128_256 and int(possible[1]) < 128_256


def test_top_p_close_to_one_keeps_what_it_promises() -> None:
    s = sampling(1, 1.0, 0, 1 - 1e-6)
    logits = np.random.default_rng(5).normal(0, 3, 128_256)
    possible = np.isfinite(
        perturb(jnp.asarray(logits, jnp.float32)[None, None], jnp.zeros((1, 1, 1)), s)
    )
    law = np.exp(logits - logits.max())
    law = np.sort(law / law.sum())
    left_out = np.searchsorted(np.cumsum(law), 1e-6)
    assert abs(int(possible.sum()) - (128_256 - left_out)) < 0.03 * left_out


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 32_000, 262_144])
def test_the_mass_of_top_p_is_a_sum_in_any_order(vocabulary: int) -> None:
    logits = np.random.default_rng(7).normal(0, 4, vocabulary).astype(np.float32)
    logits = jnp.asarray(logits - logits.max())
    mass = np.asarray(cumulative_mass(logits))
    exact = np.cumsum(np.exp(np.asarray(logits, np.float64)))
    np.testing.assert_allclose(mass, exact, rtol=3e-7, atol=vocabulary * 2.0**-42)
    # The last sum is of the same numbers; float32 sums of this many differ in every order.
    shuffled = [jax.random.permutation(jax.random.key(seed), logits) for seed in range(4)]
    np.testing.assert_array_equal([cumulative_mass(one)[-1] for one in shuffled], [mass[-1]] * 4)


def test_equal_tokens_fill_the_digits_of_their_mass() -> None:
    count = np.arange(1, 262_145)
    mass = cumulative_mass(jnp.zeros(count.size))
    np.testing.assert_array_equal(mass, count.astype(np.float32))


@pytest.mark.parametrize("temperature", [1.2e-38, 1.3e-38, 2e-38, 1e-45, 1e-30, 1e-3])
def test_a_tiny_temperature_draws_the_argmax(temperature: float) -> None:
    logits = jnp.array([[[5.0, 80.0, 7.0, 79.0], [-3.0, -9.0, -1.0, -2.0]]])
    s = sampling(1, 1.0).replace(temperature=jnp.array([temperature], jnp.float32))
    drawn = draw(logits, noise(s, jnp.array([[3, 4]]), 4), s)
    np.testing.assert_array_equal(drawn[0], [1, 2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_nothing_is_drawn_from_logits_that_are_not_finite(temperature, filtered, bad) -> None:
    s = sampling(1, temperature, 3 if filtered else 0)
    logits = jnp.array([[[1.0, 2.0, 0.5, 3.0]] * 2])
    spoiled = logits.at[0, 0].set(bad) if bad < 0 else logits.at[0, 0, 1].set(bad)
    drawn = draw(spoiled, noise(s, jnp.array([[3, 4]]), 4), s)
    assert int(drawn[0, 0]) == NO_TOKEN and int(drawn[0, 1]) >= 0
