"""Draws follow the target's distribution, and their noise depends only on seed and position."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longspec_jax.decoding import filters
from longspec_jax.decoding import sampling as sampling_lib
from longspec_jax.decoding.sampling import NO_TOKEN, Sampling
from tests.decoding.lossless import kind_of
from tests.kit import each_row

VOCABULARY = 11
# Outside a program every operation is one of its own.
draw, perturb = map(jax.jit, (sampling_lib.draw, sampling_lib.perturb))
noise = partial(jax.jit, static_argnums=2)(sampling_lib.noise)


def sampling(
    rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Sampling:
    def spread(value: float, dtype: str = "float32") -> jax.Array:
        return jnp.asarray(np.full(rows, value, dtype))

    return Sampling(
        *(spread(temperature), spread(top_k, "int32"), spread(top_p)),
        jnp.asarray(np.arange(rows, dtype=np.uint32)),
        spread(np.log(min_p) if min_p else -np.inf),
        kind_of(temperature, top_k, top_p, min_p),
    )


@jax.jit
def mass(logits: jax.Array, inside: jax.Array) -> jax.Array:
    """The mass of the tokens inside."""
    [found] = filters.masses(logits, [inside])
    return found


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


@each_row(
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


def test_noise_depends_only_on_seed_and_position() -> None:
    s = sampling(3, 1.0)
    together = noise(s, jnp.array([[3, 8], [3, 8], [9, 3]]), VOCABULARY)
    alone = noise(jax.tree.map(lambda leaf: leaf[2:], s), jnp.array([[3]]), VOCABULARY)
    np.testing.assert_array_equal(together[2, 1], alone[0, 0])
    assert not np.array_equal(together[0, 0], together[1, 0])
    assert not np.array_equal(together[0, 0], together[0, 1])


def test_temperature_zero_is_the_argmax_with_ties_to_the_lowest_token() -> None:
    logits = jnp.array([[[1.0, 3.0, 3.0, 2.0]]])
    s = sampling(1, 0.0)
    assert int(draw(logits, noise(s, jnp.array([[0]]), 4), s)[0, 0]) == 1


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


@each_row(("top_k", "top_p"), [(0, 0.9), (50, 1.0)])
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


@each_row("vocabulary", [VOCABULARY, 32_000, 262_144])
def test_the_mass_of_top_p_is_a_sum_in_any_order(vocabulary: int) -> None:
    logits = np.random.default_rng(7).normal(0, 4, vocabulary).astype(np.float32)
    logits = np.sort(logits - logits.max())
    counts = np.unique(np.geomspace(1, vocabulary, 50).astype(int))
    first = np.arange(vocabulary) < counts[:, None]
    found = mass(jnp.asarray(np.broadcast_to(logits, first.shape)), jnp.asarray(first))
    exact = np.cumsum(np.exp(logits.astype(np.float64)))[counts - 1]
    np.testing.assert_allclose(found, exact, rtol=3e-7, atol=vocabulary * 2.0**-42)
    # The same numbers; float32 sums of this many differ in every order.
    shuffled = jnp.stack([np.random.default_rng(seed).permutation(logits) for seed in range(4)])
    np.testing.assert_array_equal(mass(shuffled, shuffled <= 0), [found[-1]] * 4)


def test_equal_tokens_fill_the_digits_of_their_mass() -> None:
    counts = np.unique([*range(1, 40), *(2**n + d for n in range(6, 19) for d in (-1, 0, 1))])
    counts = counts[counts <= 262_144]
    first = jnp.arange(262_144) < counts[:, None]
    np.testing.assert_array_equal(mass(jnp.zeros(first.shape), first), counts.astype(np.float32))


def kept_by_sorting(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens of one row the filters keep, one after the other, by a sort and float64."""
    logits, order = logits.astype(np.float64), np.argsort(-logits, kind="stable")
    kept = np.isin(np.arange(len(logits)), order[: top_k or None])
    probability = np.where(kept, np.exp(logits - logits.max()), 0)
    below = np.cumsum(np.sort(probability))[np.argsort(order[::-1])]
    kept &= (below > (1 - top_p) * probability.sum()) | (np.arange(len(logits)) == order[0])
    return kept & (probability >= min_p)


FILTERS = [
    *[(k, 1.0, 0.0) for k in (1, 2, 50, 128, 1000)],
    *[(0, p, 0.0) for p in (1e-9, 0.05, 0.5, 0.9, 0.999)],
    *[(0, 1.0, p) for p in (0.002, 0.1, 1.0)],
    *[(40, 0.8, 0.0), (40, 0.99, 0.03), (0, 0.95, 0.01), (3, 0.5, 0.9)],
]


def test_filters_keep_what_a_sort_keeps_and_what_transformers_keeps() -> None:
    """All filters in one batch, at two positions: rows with and without each stand side by side."""
    k, p, least = (np.asarray(values) for values in zip(*FILTERS, strict=True))
    rng, rows = np.random.default_rng(11), len(FILTERS)
    logits = rng.normal(0, 2, (rows, 2, 128)).astype(np.float32)
    s = sampling(rows, 1.0, 1).replace(
        temperature=jnp.full(rows, 0.7), top_k=jnp.asarray(k, jnp.int32), top_p=jnp.float32(p)
    )
    s = s.replace(log_min_p=jnp.log(jnp.float32(least)))
    scores = np.asarray(perturb(jnp.asarray(logits), jnp.zeros((rows, 1, 1)), s))
    for row, (k, p, least) in enumerate(FILTERS):
        for position in range(2):
            one, found = logits[row, position], scores[row, position]
            expected = kept_by_sorting(one / np.float32(0.7), k, p, least)
            np.testing.assert_array_equal(
                np.isfinite(found), expected, err_msg=f"{k}, {p}, {least}"
            )
            np.testing.assert_array_equal(np.isfinite(processed(one, k, p, least)), expected)
            inside = (one - one.max())[expected] / np.float32(0.7)
            np.testing.assert_allclose(found[expected], inside, rtol=1e-6)
    alone = jax.tree.map(lambda leaf: leaf[-1:], s)
    np.testing.assert_array_equal(
        perturb(jnp.asarray(logits[-1:, 1:]), jnp.zeros((1, 1, 1)), alone)[0, 0], scores[-1, 1]
    )


def rows_of_all_filters(vocabulary: int, scale: float) -> tuple[jax.Array, list[jax.Array]]:
    """Logits for each of :data:`FILTERS` at two positions, some of them equal, and the filters."""
    rows = len(FILTERS)
    logits = np.random.default_rng(vocabulary).normal(0, scale, (rows, 2, vocabulary))
    logits = np.round(logits, 2).astype(np.float32)
    k, p, least = (np.asarray(values) for values in zip(*FILTERS, strict=True))
    below = jnp.asarray(logits - logits.max(axis=-1, keepdims=True))
    return below, [jnp.asarray(k, jnp.int32), jnp.float32(p), jnp.log(jnp.float32(least))]


@each_row(("vocabulary", "scale"), [(128, 2.0), (5000, 1.0), (5000, 40.0)])
def test_a_gpus_passes_find_the_edges_of_a_cpus(
    vocabulary: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several bits of an edge a pass, and many sums in one reduction."""
    logits, of_rows = rows_of_all_filters(vocabulary, scale)
    bit_by_bit = jax.jit(partial(filters.filtered))(logits, *of_rows)
    monkeypatch.setattr(filters, "searches_wide", lambda: True)
    wide = jax.jit(partial(filters.filtered))(logits, *of_rows)  # A new partial is traced anew.
    np.testing.assert_array_equal(wide, bit_by_bit)


def test_a_drafts_filters_let_in_little_more_than_the_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, of_rows = rows_of_all_filters(5000, 3.0)
    exact = jax.jit(partial(filters.filtered))(logits, *of_rows)
    monkeypatch.setattr(filters, "searches_wide", lambda: True)
    rough = jax.jit(filters.roughly_filtered)(logits, *of_rows)
    least, lower = (
        np.where(np.isfinite(kept), kept, np.inf).min(axis=-1) for kept in (exact, rough)
    )
    edges = np.concatenate([[0.0], filters.ROUGH_EDGES, np.full(2, -np.inf)])
    # The mass of what top-k leaves is a rough one, too: the edge may be one further.
    further = edges[np.searchsorted(-edges, -least) + 1]
    assert (lower <= least).all() and (lower >= further).all()
    assert (lower >= -8).mean() > 0.5


def processed(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """One row through the processors of transformers, in its order."""
    scores, none = torch.from_numpy(logits)[None], torch.zeros((1, 1), dtype=torch.long)
    for processor in (
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(int(top_k) or len(logits)),
        TopPLogitsWarper(float(top_p)),
        MinPLogitsWarper(float(min_p)),
    ):
        scores = processor(none, scores)
    return scores[0].numpy()


def test_equal_logits_at_an_edge_stay_in_together() -> None:
    logits = jnp.asarray([[[2.0, 1.0, 1.0, 1.0, 0.0, -0.0]]] * 3)
    s = sampling(3, 1.0, 2).replace(
        top_k=jnp.asarray([2, 5, 0]), top_p=jnp.asarray([1.0, 1.0, 0.5], jnp.float32)
    )
    kept = np.isfinite(perturb(logits, jnp.zeros((3, 1, 1)), s))[:, 0]
    np.testing.assert_array_equal(kept.sum(axis=1), [4, 6, 4])


@each_row("temperature", [1.2e-38, 1.3e-38, 2e-38, 1e-45, 1e-30, 1e-3])
def test_a_tiny_temperature_draws_the_argmax(temperature: float) -> None:
    logits = jnp.array([[[5.0, 80.0, 7.0, 79.0], [-3.0, -9.0, -1.0, -2.0]]])
    s = sampling(1, 1.0).replace(temperature=jnp.array([temperature], jnp.float32))
    drawn = draw(logits, noise(s, jnp.array([[3, 4]]), 4), s)
    np.testing.assert_array_equal(drawn[0], [1, 2])


@each_row("temperature", [0.0, 1.0])
@each_row("filtered", [False, True])
@each_row("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_nothing_is_drawn_from_logits_that_are_not_finite(temperature, filtered, bad) -> None:
    s = sampling(1, temperature, 3 if filtered else 0)
    logits = jnp.array([[[1.0, 2.0, 0.5, 3.0]] * 2])
    spoiled = logits.at[0, 0].set(bad) if bad < 0 else logits.at[0, 0, 1].set(bad)
    drawn = draw(spoiled, noise(s, jnp.array([[3, 4]]), 4), s)
    assert int(drawn[0, 0]) == NO_TOKEN and int(drawn[0, 1]) >= 0
