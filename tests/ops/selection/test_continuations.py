"""The best continuations of a level: plain JAX and the kernels against a sort of all pairs."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import hardware
from longspec_jax.ops.selection import continuations, continuations_pallas
from longspec_jax.ops.selection.continuations import SMALL_VOCABULARY, block_size
from tests.ops.interpreted_ampere import interpret
from tests.ops.selection import oracle

Op = Callable[[jax.Array, jax.Array, int], tuple[jax.Array, jax.Array, jax.Array]]
INF = np.inf


def plain(scores: jax.Array, totals: jax.Array, count: int) -> tuple:
    return jax.jit(continuations.chosen_continuations.definition, static_argnums=2)(
        scores, totals, count
    )


def kernels(interpret: bool, scores: jax.Array, totals: jax.Array, count: int) -> tuple:
    call = continuations_pallas.best_continuations
    block = block_size(scores.shape[2])
    return call(scores, totals, count=count, block=block, interpret=interpret)


COMPILED = partial(kernels, False)
OPS = [
    pytest.param(plain, id="plain"),
    pytest.param(partial(kernels, True), id="interpret"),
    pytest.param(COMPILED, id="kernels", marks=pytest.mark.gpu),
]


def drawn(seed: int, batch: int, nodes: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores far from normalised, and cumulative log-probabilities of their nodes."""
    rng = np.random.default_rng(seed)
    scores = 3 * rng.standard_normal((batch, nodes, vocabulary), np.float32)
    scores += 40 * rng.standard_normal((batch, nodes, 1), np.float32)
    return scores, -3 * rng.random((batch, nodes), np.float32)


def check(op: Op, scores: np.ndarray, totals: np.ndarray, count: int) -> np.ndarray:
    """Equal pairs in equal order; the totals. Values differ by nothing or by more than rounding."""
    operands = jnp.asarray(scores), jnp.asarray(totals)
    wanted = oracle.best_continuations(*operands, count + 1)
    finite = np.where(np.isneginf(wanted[0]), -1e9, wanted[0])
    gaps = -np.diff(finite, axis=1)
    assert ((gaps == 0) | (gaps > 1e-5)).all(), "the test's numbers leave the order open"
    best, nodes, tokens = op(*operands, count)
    assert best.shape == nodes.shape == tokens.shape == (len(scores), count)
    np.testing.assert_array_equal(nodes, wanted[1][:, :count])
    np.testing.assert_array_equal(tokens, wanted[2][:, :count])
    np.testing.assert_allclose(best, wanted[0][:, :count], atol=1e-5)
    assert (np.asarray(best) <= np.take_along_axis(totals, np.asarray(nodes), axis=1)).all()
    return np.asarray(best)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((2, 3, 5000), 7),
        ((2, 16, 4099), 16),
        ((1, 1, 130), 2),
    ],
    ids=str,
)
def test_the_best_of_all_pairs(op: Op, shape: tuple[int, ...], count: int) -> None:
    scores, totals = drawn(sum(shape), *shape)
    scores[0, 0, 256:384] += 3.0  # Most of the best in one block.
    scores[-1, -1, -2:] += 9.0  # Some of the best in the ragged one.
    check(op, scores, totals, count)


@pytest.mark.parametrize("op", OPS)
def test_ties_go_to_the_lower_node_and_then_to_the_lower_token(op: Op) -> None:
    """Also where a block with a better entry comes later."""
    row = np.random.default_rng(0).integers(0, 4, (2, 1, 5000)).astype(np.float32)
    row[0, 0, [4000, 999]] = 5.0
    row[1] = np.where(row[1] == 3.0, 2.0, row[1])
    row[1, 0, [70, 80, 3000, 4500]] = 3.0
    row[1, 0, 4501] = 7.0
    scores, totals = np.repeat(row, 3, axis=1), np.array([[-1.5] * 3, [-1.0, -2.5, -1.0]])
    best = check(op, scores, totals.astype(np.float32), 40)
    assert (np.diff(best, axis=1) == 0).sum() > 60, "the test should have ties"


@pytest.mark.parametrize("op", OPS)
def test_impossible_tokens_fill_up(op: Op) -> None:
    """One node of one token, one of none, and in a row fewer possible tokens than are wanted."""
    scores, totals = drawn(1, 3, 3, 5000)
    scores[0, 0] = np.where(np.arange(5000) == 4995, scores[0, 0], -INF)
    scores[0, 1] = -INF
    scores[0, 2] = np.where(np.arange(5000) % 100 == 7, scores[0, 2], -INF)
    scores[1] = np.where(np.isin(np.arange(5000), [4990, 4995, 17]), scores[1], -INF)
    scores[2] = -INF
    best = check(op, scores, totals, 16)
    np.testing.assert_array_equal(np.isfinite(best).sum(axis=1), [16, 9, 0])
    assert totals[0, 0] in best[0], "a token without alternatives is certain"


@pytest.mark.parametrize("op", OPS)
def test_more_are_wanted_than_blocks_hold_possible_ones(op: Op) -> None:
    """As many as there are blocks: the padding of the ragged ones is never chosen."""
    scores, totals = drawn(2, 1, 2, 300)
    block = block_size(300)
    scores[0] = np.where(np.arange(300) >= 299, scores[0], -INF)
    check(op, scores, totals, 2 * -(-300 // block))


@pytest.mark.parametrize("op", OPS)
def test_what_is_no_number_is_impossible(op: Op) -> None:
    scores, totals = drawn(3, 2, 4, 5000)
    scores[0, 0, [3, 700, 4999]] = np.nan
    scores[0, 1] = np.nan
    scores[1, 0, 5] = INF
    totals[1, 3] = -INF
    best = check(op, scores, totals, 16)
    assert np.isfinite(best).all()
    check(op, scores, np.full_like(totals, -INF), 5)


@pytest.mark.parametrize("op", OPS)
def test_no_path_is_likelier_than_its_beginning(op: Op) -> None:
    """Where one token is nearly certain, rounding could lift it above its node."""
    scores, totals = drawn(4, 4, 16, 5000)
    scores[:, np.arange(16), np.arange(16) * 311] += np.linspace(20, 90, 16)
    best = check(op, scores, totals, 16)
    assert (best == np.sort(totals, axis=1)[:, ::-1]).any(axis=1).all()


@pytest.mark.parametrize("op", OPS)
def test_flat_scores(op: Op) -> None:
    """The largest sums of exponentials there are, next to the smallest."""
    scores, totals = drawn(6, 1, 3, 32000)
    scores[0, 0], scores[0, 1] = 7.0, np.round(scores[0, 1]) / 8
    scores[0, 2, 77] = 300.0
    best = check(op, scores, np.asarray([[-0.5, -0.75, -8.0]], np.float32), 40)
    assert len(np.unique(best)) > 3, "nodes should mix"


@pytest.mark.parametrize("op", OPS)
def test_half_precision(op: Op) -> None:
    """As the same numbers in float32.

    The compiled kernels add up their exponentials in another order: a GPU's threads read wider.
    """
    scores, totals = drawn(5, 1, 3, 5000)
    half = jnp.asarray(scores).astype(jnp.bfloat16)
    found, wanted = (op(s, jnp.asarray(totals), 8) for s in (half, half.astype(jnp.float32)))
    assert found[0].dtype == jnp.float32
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6 if op is COMPILED else 0)
    jax.tree.map(np.testing.assert_array_equal, found[1:], wanted[1:])


@pytest.mark.parametrize(("shape", "count"), [((2, 5, 13), 7), ((1, 2, 4097), 70)], ids=str)
def test_sizes_without_kernels(shape: tuple[int, ...], count: int) -> None:
    """Small vocabularies, and more continuations than there are blocks."""
    op = jax.jit(continuations.best_continuations, static_argnums=2)
    check(op, *drawn(sum(shape), *shape), count)


def test_a_tree_wider_than_its_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="only 6 continuations"):
        continuations.best_continuations(jnp.zeros((1, 2, 3)), jnp.zeros((1, 2)), 7)


def test_kernels_are_used_where_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def noted(scores: jax.Array, totals: jax.Array, **options: int) -> tuple:
        used.append(options)
        return continuations.chosen_continuations.definition(scores, totals, options["count"])

    monkeypatch.setattr(continuations_pallas, "best_continuations", noted)
    monkeypatch.setattr(hardware, "compute_capability", lambda: (8, 0))

    def uses(shape: tuple[int, ...], count: int, name: str | None = "pallas") -> bool:
        before = len(used)
        scores, totals = jnp.zeros(shape), jnp.zeros(shape[:2])
        op = partial(continuations.best_continuations, count=count, implementation=name)
        jax.eval_shape(op, scores, totals)
        return len(used) > before

    assert uses((1, 4, 5000), 16) and used == [{"count": 16, "block": 128}]
    assert uses((1, 4, 5000), 16, None)
    assert not uses((1, 4, 5000), 16, "xla") and not uses((1, 4, 5000), 16, "reference")
    assert not uses((1, 4, SMALL_VOCABULARY), 16)
    assert not uses((1, 65, 5000), 16) and not uses((1, 4, 5000), 65)
    assert not uses((1, 1, 5000), 41), "there are only 40 blocks"


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [32000, 128256])
@pytest.mark.parametrize(("nodes", "count"), [(1, 4), (4, 16), (16, 16)])
def test_kernels_at_the_sizes_of_a_draft(nodes: int, count: int, vocabulary: int) -> None:
    """Chosen without being named, as the definition on the same machine and as the sort."""
    op = jax.jit(continuations.best_continuations, static_argnums=2)
    for seed in range(3):
        scores, totals = drawn(seed, 2, nodes, vocabulary)
        check(op, scores, totals, count)
        check(plain, scores, totals, count)
    lowered = op.lower(jnp.asarray(scores), jnp.asarray(totals), count).as_text()
    assert lowered.count("choose_continuations") >= 1


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged blocks, ties, impossible tokens, and fewer possible ones than are wanted."""
    interpret(monkeypatch)
    monkeypatch.setattr(continuations, "require_decode_step", lambda *_: None)
    monkeypatch.setattr(continuations, "require_mosaic", lambda _: None)
    op = continuations.chosen_continuations.named("mosaic")
    scores, totals = drawn(7, 2, 3, 4100)
    scores[0, 0, 256:384] += 3.0
    scores[0, 1] = np.round(scores[0, 0])
    scores[0, 2, [3, 70, 700]] = 99.0
    scores[1] = np.where(np.isin(np.arange(4100), [4090, 4095, 17]), scores[1], -INF)
    scores[1, 0, 17] = np.nan
    check(op, scores, totals, 11)
