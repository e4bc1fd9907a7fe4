"""One test body for every implementation: reference, XLA, interpreted and compiled kernels."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops.attention import attention_xla, dispatch, kernels, reference
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.attention.tiles import TreeTile
from tests.kit import TOLERANCE, each_row, hopper_or_skip, relative_error
from tests.ops.attention import oracle
from tests.ops.attention.oracle import Shape, inputs

GPU = pytest.mark.gpu
INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("jax_triton") is None, reason="needs the package jax-triton"
)
COMPILED_ONLY = {"mosaic": [GPU], "pallas": [GPU], "triton": [GPU, INSTALLED]}
"""Implementations that no CPU computes, and what their tests ask of the machine."""
EVERYWHERE = ["reference", "xla", "interpret"]
TREE = [*EVERYWHERE, pytest.param("pallas", marks=COMPILED_ONLY["pallas"])]
PREFIX = [*TREE, pytest.param("triton", marks=COMPILED_ONLY["triton"])]
SHAPES = {
    "gqa": Shape(heads=6, kv_heads=2),
    "mha": Shape(heads=3, kv_heads=3),
    "mqa": Shape(heads=5, kv_heads=1),
    "group16": Shape(heads=16, kv_heads=1, tokens=3),
    "width96": Shape(width=96),
    "one-token": Shape(width=128, tokens=1, keys=1),
    "width256": Shape(width=256, tokens=2, heads=2),
    "69-nodes": Shape(heads=2, kv_heads=2, width=128, tokens=69, slots=67, keys=69),
}


FIRST = "gqa", "one-token", "69-nodes"
"""Shapes of the first tier."""


def cases(*implementations: str, interpreted: tuple[str, ...] = tuple(SHAPES)) -> list:
    """Every implementation, shape and dtype; without a GPU the half dtypes on one shape only.

    Interpreting a kernel takes seconds, so that some tests name the shapes that matter to them. The
    reference does the same for every shape.
    """
    found = []
    for implementation in implementations:
        compiled_only = implementation in COMPILED_ONLY
        for name, shape in SHAPES.items():
            if implementation == "interpret" and name not in interpreted:
                continue
            if implementation == "reference" and name not in ("gqa", "mqa"):
                continue
            for dtype in ("float32", "bfloat16", "float16"):
                if compiled_only or dtype == "float32" or (name == "gqa" and dtype != "float16"):
                    marks = [*COMPILED_ONLY.get(implementation, ())]
                    marks += [] if compiled_only or name in FIRST else [pytest.mark.full]
                    label = f"{implementation}-{name}-{dtype}"
                    found.append(pytest.param(implementation, shape, dtype, marks=marks, id=label))
    return found


def check(actual: tuple, expected: tuple, dtype: str) -> None:
    """Compare an output and its log-sum-exp with float64."""
    assert relative_error(actual[0], expected[0]) <= TOLERANCE[dtype]
    empty = np.isneginf(expected[1])
    np.testing.assert_array_equal(np.isneginf(actual[1]), empty)
    np.testing.assert_array_equal(np.asarray(actual[0])[empty], 0.0)
    gap = np.abs(np.asarray(actual[1])[~empty] - expected[1][~empty])
    assert gap.max(initial=0.0) <= oracle.LSE_TOLERANCE[dtype]


def compiled_with(op: str, **options):
    return jax.jit(functools.partial(getattr(dispatch, op), **options))


@functools.cache
def compiled(op: str, implementation: str | None):
    return compiled_with(op, implementation=implementation)


def _among_others(own: Prefix) -> Prefix:
    """The same rows of a larger cache, of which all others are NaN."""
    there = jnp.asarray([4, 1])
    keys, values = (
        jnp.full((5, *cache.shape[1:]), jnp.nan, cache.dtype).at[there].set(cache)
        for cache in (own.keys, own.values)
    )
    return dataclasses.replace(own, keys=keys, values=values, cache_rows=there)


@pytest.mark.parametrize("implementation", PREFIX)
@pytest.mark.parametrize("start", [None, [7, 0]], ids=["whole", "bounded"])
def test_rows_of_a_larger_cache_are_read_where_they_lie(
    implementation: str, start: list[int] | None
) -> None:
    """With the same bits as from a cache of only these rows."""
    x = inputs(Shape(), "float32", [131, 77], start)
    q, own = x.prefix
    among = _among_others(own)
    attend = compiled("prefix_attention", implementation)
    jax.tree.map(np.testing.assert_array_equal, attend(q, among), attend(q, own))
    if start is None:
        attend, (_, fresh) = compiled("speculative_attention", implementation), x.tree
        np.testing.assert_array_equal(attend(q, among, fresh), attend(q, own, fresh))
        chunk = Fresh(fresh.keys[:, :5], fresh.values[:, :5])
        np.testing.assert_array_equal(attend(q, among, chunk), attend(q, own, chunk))


@pytest.mark.gpu
def test_the_hopper_kernel_reads_rows_of_a_larger_cache_where_they_lie() -> None:
    hopper_or_skip()
    x = inputs(Shape(tokens=69, keys=69, slots=1024, width=128), "bfloat16", [1001, 77])
    (q, own), attend = x.prefix, compiled("prefix_attention", "mosaic")
    jax.tree.map(np.testing.assert_array_equal, attend(q, _among_others(own)), attend(q, own))


@pytest.mark.parametrize(
    ("implementation", "shape", "dtype"),
    cases(
        *EVERYWHERE,
        "pallas",
        "triton",
        interpreted=("gqa", "mha", "group16", "width96", "69-nodes"),
    ),
)
def test_prefix_equals_float64(implementation: str, shape: Shape, dtype: str) -> None:
    x = inputs(shape, dtype, [shape.slots, 37])
    actual = compiled("prefix_attention", implementation)(*x.prefix)
    assert actual.out.dtype == actual.lse.dtype == jnp.float32
    check(actual, oracle.prefix(x), dtype)


@pytest.mark.parametrize("implementation", PREFIX)
def test_prefix_at_lengths_around_every_edge(implementation: str) -> None:
    lengths = [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 193, 1023, 1024, 1025, 1031]
    shape = Shape(batch=len(lengths), tokens=2, heads=2, kv_heads=1, slots=1031)
    x = inputs(shape, "float32", lengths)
    check(compiled("prefix_attention", implementation)(*x.prefix), oracle.prefix(x), "float32")
    shorter = dataclasses.replace(x, length=jnp.asarray(lengths[::-1]))
    clean = dataclasses.replace(shorter, k=jnp.nan_to_num(x.k), v=jnp.nan_to_num(x.v))
    actual = compiled("prefix_attention", implementation)(*clean.prefix)
    check(actual, oracle.prefix(clean), "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1000, 4096])
@pytest.mark.parametrize(("tokens", "heads"), [(65, 4), (69, 8), (64, 10), (69, 10)])
def test_prefix_of_many_rows_on_hopper(tokens: int, heads: int, slots: int) -> None:
    """With whole row tiles, and with a last one whose rows two warpgroups share."""
    hopper_or_skip()
    lengths = [0, 1, 127, 128, 513, slots // 2 + 1, slots - 1, slots]
    x = inputs(Shape(8, tokens, heads, 2, width=128, slots=slots), "bfloat16", lengths)
    check(compiled("prefix_attention", "mosaic")(*x.prefix), oracle.prefix(x), "bfloat16")


@pytest.mark.parametrize("implementation", PREFIX)
def test_prefix_between_a_lower_and_an_upper_bound(implementation: str) -> None:
    bounds = [(0, 9), (5, 5), (7, 3), (63, 64), (64, 65), (64, 128), (65, 127), (63, 129)]
    bounds += [(31, 1031), (1030, 1031), (512, 1025), (513, 1024)]
    start, length = (list(side) for side in zip(*bounds, strict=True))
    shape = Shape(batch=len(bounds), tokens=2, heads=2, kv_heads=1, slots=1031)
    x = inputs(shape, "float32", length, start)
    actual = compiled("prefix_attention", implementation)(*x.prefix)
    check(actual, oracle.prefix(x), "float32")


@pytest.mark.parametrize(
    ("implementation", "shape", "dtype"),
    cases(*EVERYWHERE, "pallas", interpreted=("gqa", "width96")),
)
def test_tree_equals_float64(implementation: str, shape: Shape, dtype: str) -> None:
    x = inputs(shape, dtype, [1, 1])
    check(compiled("tree_attention", implementation)(*x.tree), oracle.tree(x), dtype)


@pytest.mark.parametrize("keys", [1, 64, 139])
@pytest.mark.parametrize("implementation", TREE)
def test_tree_with_rectangular_masks_and_blind_rows(implementation: str, keys: int) -> None:
    shape = Shape(tokens=11, keys=keys)
    mask = np.random.default_rng().random((2, 11, keys)) < 0.3
    mask[0, 3] = mask[1] = False
    x = inputs(shape, "float32", [1, 1], mask=mask)
    check(compiled("tree_attention", implementation)(*x.tree), oracle.tree(x), "float32")


@pytest.mark.parametrize(
    ("implementation", "shape", "dtype"),
    cases(*EVERYWHERE, "pallas", "triton", interpreted=("gqa", "69-nodes")),
)
def test_speculative_equals_float64(implementation: str, shape: Shape, dtype: str) -> None:
    x = inputs(shape, dtype, [shape.slots, 0])
    actual = compiled("speculative_attention", implementation)(*x.speculative)
    assert actual.dtype == jnp.dtype(dtype)
    # The output is rounded to its dtype once more.
    rounding = {"float32": 0.0, "bfloat16": 2e-3, "float16": 3e-4}[dtype]
    assert relative_error(actual, oracle.speculative(x)) <= TOLERANCE[dtype] + rounding


@pytest.mark.parametrize("implementation", PREFIX)
def test_speculative_over_many_splits(implementation: str) -> None:
    shape = Shape(batch=5, tokens=3, heads=4, kv_heads=2, slots=1531, keys=3)
    x = inputs(shape, "float32", [1531, 1024, 0, 1, 769])
    actual = compiled("speculative_attention", implementation)(*x.speculative)
    assert relative_error(actual, oracle.speculative(x)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", ["reference", "xla", None])
def test_speculative_between_a_lower_and_an_upper_bound(implementation: str | None) -> None:
    x = inputs(Shape(batch=3, slots=1031), "float32", [1031, 1024, 9], [1000, 0, 9])
    actual = compiled("speculative_attention", implementation)(*x.speculative)
    assert relative_error(actual, oracle.speculative(x)) <= TOLERANCE["float32"]
    with pytest.raises(NotImplementedError, match="prefix with a start"):
        dispatch.speculative_attention(*x.speculative, implementation="interpret")


@pytest.mark.parametrize("implementation", EVERYWHERE[1:] + [pytest.param("pallas", marks=GPU)])
def test_a_row_does_not_depend_on_its_neighbours(implementation: str) -> None:
    x = inputs(Shape(batch=3, slots=1031), "bfloat16", [517, 1031, 3])
    y = inputs(Shape(batch=3, slots=1031), "bfloat16", [0, 9, 1000])

    def row_of(first: int, values: oracle.Inputs, others: oracle.Inputs) -> oracle.Inputs:
        fields = {
            field.name: getattr(others, field.name).at[first].set(getattr(values, field.name)[0])
            for field in dataclasses.fields(others)
            if getattr(others, field.name) is not None
        }
        return dataclasses.replace(others, **fields)

    moved = row_of(2, x, y)
    for op, operands in (
        ("prefix_attention", oracle.Inputs.prefix),
        ("tree_attention", oracle.Inputs.tree),
        ("speculative_attention", oracle.Inputs.speculative),
    ):
        run = compiled(op, implementation)
        alone, beside = run(*operands.fget(x)), run(*operands.fget(moved))
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(beside), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[0], np.asarray(b)[2])


@pytest.mark.parametrize("implementation", TREE)
@pytest.mark.parametrize(("op", "keys"), [("prefix", 7), ("tree", 7), ("tree", 300)])
def test_an_output_is_rounded_as_it_is_written(implementation: str, op: str, keys: int) -> None:
    """Bit by bit as if it were rounded afterwards; more keys than a step holds are merged first."""
    x = inputs(Shape(width=128, keys=keys), "bfloat16", [131, 37])
    run = functools.partial(getattr(dispatch, f"{op}_attention"), implementation=implementation)
    whole, rounded = run(*getattr(x, op)), run(*getattr(x, op), dtype="bfloat16")
    assert whole.out.dtype == jnp.float32 and rounded.out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(rounded.out), np.float32(whole.out.astype("bfloat16")))
    np.testing.assert_array_equal(rounded.lse, whole.lse)


@pytest.mark.parametrize("implementation", PREFIX)
def test_two_runs_are_equal(implementation: str) -> None:
    x = inputs(Shape(slots=1031), "bfloat16", [1031, 700])
    run = compiled("speculative_attention", implementation)
    np.testing.assert_array_equal(np.asarray(run(*x.speculative)), np.asarray(run(*x.speculative)))


@pytest.mark.parametrize("implementation", TREE)
@pytest.mark.parametrize(("tokens", "groups"), [(5, 1), (37, 3)])
def test_a_window_is_measured_by_positions_in_a_ring(
    implementation: str, tokens: int, groups: int
) -> None:
    """Queries of several depths, with a soft cap: rings that wrapped, that did not, and are empty.

    The last queries' windows have left the ring, and the first fresh keys.
    """
    slots, window = 41, 23
    lengths = [0, 7, 41, 42, 131]
    shape = Shape(len(lengths), tokens, 2 * groups, 2, slots=slots, keys=tokens)
    x = inputs(shape, "float32", [min(length, slots) for length in lengths])
    x = dataclasses.replace(x, length=jnp.asarray(lengths))
    options = dict(scale=0.37, cap=1.5)
    run = functools.partial(compiled_with, implementation=implementation, **options)
    tree = oracle.windowed(x, window, [2 * t // 3 for t in range(tokens)])
    check(run("prefix_attention")(*tree.prefix), oracle.prefix(tree, **options), "float32")
    found = run("speculative_attention")(*tree.speculative)
    assert relative_error(found, oracle.speculative(tree, **options)) <= TOLERANCE["float32"]
    full = dataclasses.replace(x, mask=jnp.ones_like(x.mask))
    chunk = oracle.windowed(full, window, list(range(tokens)))
    found = run("speculative_attention")(*chunk.prefix, Fresh(chunk.tree_k, chunk.tree_v))
    assert relative_error(found, oracle.speculative(chunk, **options)) <= TOLERANCE["float32"]


@each_row("op", ["prefix_attention", "tree_attention", "speculative_attention"])
@each_row("implementation", EVERYWHERE)
def test_gradients_are_refused_in_a_sentence(op: str, implementation: str) -> None:
    x = inputs(Shape(), "float32", [3, 5])
    operands = getattr(x, op.removesuffix("_attention"))
    run = functools.partial(getattr(dispatch, op), implementation=implementation)

    def loss(q: jax.Array) -> jax.Array:
        return jax.tree.leaves(run(q, *operands[1:]))[0].astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match=f"{op} serves decoding and has no gradient"):
        jax.grad(loss)(x.q)
    if implementation == "xla":
        frozen = jax.grad(lambda q, s: s * loss(jax.lax.stop_gradient(q)), argnums=1)(x.q, 2.0)
        assert np.isfinite(frozen)


@pytest.mark.parametrize(("tokens", "groups"), [(1, 1), (37, 3), (150, 4)])
@pytest.mark.parametrize("implementation", TREE)
def test_chunk_attention_is_causal_after_the_prefix(
    implementation: str, tokens: int, groups: int
) -> None:
    """One row has no prefix, and 150 tokens are several tiles of queries and of keys."""
    shape = Shape(tokens=tokens, keys=tokens, heads=2 * groups, kv_heads=2)
    x = inputs(shape, "float32", [131, 0], mask=_causal(2, tokens))
    attend, chunk = compiled("speculative_attention", implementation), Fresh(x.tree_k, x.tree_v)
    actual = attend(*x.prefix, chunk)
    assert relative_error(actual, oracle.speculative(x)) <= TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("rows", "keys", "groups"), [(16, 32, 1), (16, 16, 5), (64, 16, 1), (64, 32, 5)]
)
def test_any_tile_of_a_chunk_sees_the_same(rows: int, keys: int, groups: int) -> None:
    """Tiles of queries and keys begin and end at different tokens."""
    shape = Shape(tokens=77, keys=77, heads=groups, kv_heads=1, width=48)
    x = inputs(shape, "bfloat16", [37, 131], mask=_causal(2, 77))
    tile = TreeTile(rows, keys, 1, 4, 2)
    chunk = Fresh(x.tree_k, x.tree_v)
    actual = kernels.speculative_attention(*x.prefix, chunk, tree_tile=tile, interpret=True)
    assert relative_error(actual, oracle.speculative(x)) <= TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize(("tokens", "width"), [(2048, 128), (700, 96), (300, 256)])
def test_chunks_of_a_real_prefill(
    dtype: str, heads: tuple[int, int], tokens: int, width: int
) -> None:
    shape = Shape(1, tokens, *heads, width=width, slots=4096, keys=tokens)
    x = inputs(shape, dtype, [3000], mask=_causal(1, tokens))
    attend = compiled("speculative_attention", None), jax.jit(kernels.speculative_attention)
    for run in attend:
        actual = run(*x.prefix, Fresh(x.tree_k, x.tree_v))
        assert relative_error(actual, oracle.speculative(x)) <= TOLERANCE[dtype]


SINKS = np.array([0.5, -3.0, 40.0, 2.0, -40.0, 1.0], np.float32)
"""Some that hold hardly anything of a softmax, and one that holds all of it."""


@pytest.mark.parametrize("implementation", PREFIX)
@pytest.mark.parametrize("window", [None, 9])
def test_sinks_take_part_in_the_softmax_once(implementation: str, window: int | None) -> None:
    """Of splits, fresh keys and both; of a query that sees no key nothing is left."""
    if implementation == "triton" and window is not None:
        pytest.skip("the jax-triton implementation takes no window")
    options = dict(scale=0.37) if implementation == "triton" else dict(scale=0.37, cap=1.5)
    run = functools.partial(compiled_with, implementation=implementation, **options)
    shape, sinks = Shape(tokens=5, keys=5, slots=1031), jnp.asarray(SINKS)
    nothing = _causal(2, 5) & np.array([[[True]], [[False]]])
    x = inputs(shape, "float32", [1031, 0], mask=nothing)
    chunk = inputs(shape, "float32", [1031, 0], mask=_causal(2, 5))
    if window is not None:
        drawn = inputs(shape, "float32", [1031, 3], mask=np.ones((2, 5, 5), bool))
        drawn = dataclasses.replace(drawn, length=jnp.asarray([1400, 3]))
        x = chunk = oracle.windowed(drawn, window, list(range(5)))
    found = run("speculative_attention")(*x.speculative, sinks)
    expected = oracle.speculative(x, **options, sinks=SINKS)
    assert relative_error(found, expected) <= TOLERANCE["float32"]
    assert relative_error(found, oracle.speculative(x, **options)) > 0.1
    found = run("speculative_attention")(*chunk.prefix, Fresh(chunk.tree_k, chunk.tree_v), sinks)
    expected = oracle.speculative(chunk, **options, sinks=SINKS)
    assert relative_error(found, expected) <= TOLERANCE["float32"]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["without", "sinks"])
def test_causal_attention_counts_both_ends_of_the_window_and_sinks(
    sinks: np.ndarray | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks in blocks of queries, the last of which is not whole, and some keys of a window."""
    monkeypatch.setattr(attention_xla, "BLOCK", 5)
    distance = np.arange(13)[:, None] - np.arange(13)
    mask = (distance >= 0) & (distance <= (13 if window is None else window))
    x = inputs(
        Shape(tokens=13, keys=13), "float32", [0, 0], mask=np.broadcast_to(mask, (2, 13, 13))
    )
    expected = oracle.speculative(x, sinks=sinks)
    given = None if sinks is None else jnp.asarray(sinks)
    for attend in (dispatch.causal_attention, reference.causal_attention):
        actual = attend(x.q, x.tree_k, x.tree_v, given, window=window)
        assert relative_error(actual, expected) <= TOLERANCE["float32"]


def test_sinks_are_one_a_head() -> None:
    x = inputs(Shape(), "float32", [3, 5])
    with pytest.raises(Exception, match=r"one number a query head, \(6,\)|Type-check error"):
        dispatch.speculative_attention(*x.speculative, jnp.zeros(2))


def test_a_chunk_has_as_many_keys_as_queries() -> None:
    x = inputs(Shape(tokens=5, keys=7), "float32", [3, 5])
    with pytest.raises(ValueError, match="5 queries has as many keys, not 7"):
        dispatch.speculative_attention(*x.prefix, Fresh(x.tree_k, x.tree_v))


def _causal(batch: int, tokens: int) -> np.ndarray:
    return np.tri(tokens, dtype=bool)[None].repeat(batch, 0)


def test_causal_attention_of_a_soft_cap_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of queries, the last of which is not whole: as in the definition."""
    monkeypatch.setattr(attention_xla, "BLOCK", 5)
    x = inputs(Shape(tokens=13, keys=13), "float32", [1, 1], mask=_causal(2, 13))
    options = dict(window=6, scale=0.37, cap=1.5)

    def loss(attend, q: jax.Array) -> jax.Array:
        return (attend(q, x.tree_k, x.tree_v, **options) ** 2).sum()

    ours, theirs = (
        jax.jit(jax.value_and_grad(functools.partial(loss, module.causal_attention)))(x.q)
        for module in (dispatch, reference)
    )
    for found, expected in zip(ours, theirs, strict=True):
        assert relative_error(found, expected) <= TOLERANCE["float32"]


def test_explicit_choices_refuse_and_automatic_choice_falls_back() -> None:
    x = inputs(Shape(), "float32", [3, 5])
    if jax.default_backend() != "gpu":
        for op in ("prefix", "tree", "speculative"):
            run = getattr(dispatch, f"{op}_attention")
            with pytest.raises(NotImplementedError, match="computes on 'cpu'"):
                run(*getattr(x, op), implementation="pallas")
        with pytest.raises(NotImplementedError, match="computes on 'cpu'|cannot be imported"):
            dispatch.prefix_attention(*x.prefix, implementation="triton")
        automatic, xla = (
            dispatch.speculative_attention(*x.speculative, implementation=name)
            for name in (None, "xla")
        )
        np.testing.assert_array_equal(automatic, xla)
    with pytest.raises(ValueError, match="no implementation 'cuda'; choose one of"):
        dispatch.prefix_attention(*x.prefix, implementation="cuda")
    narrow = inputs(Shape(width=12), "float32", [3, 5])
    with pytest.raises(NotImplementedError, match="head width 12"):
        dispatch.prefix_attention(*narrow.prefix, implementation="interpret")
    wide = inputs(Shape(heads=34, kv_heads=2), "float32", [3, 5])
    with pytest.raises(NotImplementedError, match="17 query heads per key/value head exceed 16"):
        dispatch.tree_attention(*wide.tree, implementation="interpret")


@each_row(
    ("change", "message"),
    [
        (lambda x: dict(k=x.k[:, :, :-1]), "their dtype and whole shape"),
        (lambda x: dict(q=x.q[:, :, :5]), "5 query heads"),
        (lambda x: dict(q=x.q.astype(jnp.bfloat16)), "queries are bfloat16"),
        (lambda x: dict(mask=x.mask[:, :-1]), "must be boolean"),
        (lambda x: dict(mask=x.mask.astype(jnp.int8)), "must be boolean"),
        (lambda x: dict(tree_v=x.tree_v[:1]), "whole shape"),
        (lambda x: dict(length=x.length[:1]), "length .* must have one number a row"),
        (lambda x: dict(start=x.length[:, None]), "start .* must have one number a row"),
    ],
)
def test_operands_that_do_not_fit_are_named(change, message: str) -> None:
    x = inputs(Shape(), "float32", [3, 5])
    x = dataclasses.replace(x, **change(x))
    # With shape checking switched on jaxtyping may be the first to refuse.
    with pytest.raises(Exception, match=f"{message}|Type-check error"):
        dispatch.speculative_attention(*x.speculative)


@each_row(
    ("capability", "width", "dtype", "chosen"),
    [
        ((8, 0), 128, jnp.bfloat16, "cudnn"),
        ((8, 0), 136, jnp.bfloat16, "xla"),
        ((9, 0), 136, jnp.bfloat16, "cudnn"),
        ((9, 0), 264, jnp.bfloat16, "xla"),
        ((9, 0), 64, jnp.float32, "xla"),
        ((9, 0), 100, jnp.bfloat16, "xla"),
        ((7, 5), 64, jnp.float16, "xla"),
        (None, 64, jnp.bfloat16, "xla"),  # AMD's.
    ],
)
def test_causal_attention_is_fused_where_its_backward_pass_is(
    capability: tuple[int, int] | None,
    width: int,
    dtype: jnp.dtype,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[str] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, **options: str) -> jax.Array:
        given.append(options["implementation"])
        return q

    monkeypatch.setattr(dispatch, "compute_capability", lambda: capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    blocks = functools.partial(attend, implementation="xla")
    monkeypatch.setattr(dispatch.attention_xla, "causal_attention", lambda *x, **_: blocks(*x))
    x = jnp.zeros((1, 2, 2, width), dtype)
    dispatch.causal_attention(x, x, x)
    assert given == [chosen]
