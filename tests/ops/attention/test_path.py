"""Path attention: which positions are added up together, and that nothing else decides the bits."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.decoding.cache import ring_slots
from longspec_jax.ops import hardware
from longspec_jax.ops.attention import dispatch, path, reference, tiles
from longspec_jax.ops.attention.float8 import codes, rounded
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.attention.tiles import RowTiles
from tests.kit import ancestors, each_row, hopper_or_skip, normal

HEADS = [
    (32, 32, 128),
    (32, 8, 128),
    (40, 8, 128),
    (24, 8, 128),
    (28, 4, 128),
    (12, 2, 128),
    (14, 2, 64),
    (32, 8, 64),
    (16, 4, 256),
    (24, 4, 256),
    (16, 16, 256),
]
"""Query heads, key/value heads, width."""


@each_row(("heads", "kv_heads", "width"), HEADS)
@each_row("narrow", [False, True])
def test_splits_cover_a_position_and_fit_the_machine(narrow, heads, kv_heads, width) -> None:
    groups = heads // kv_heads
    count = path.splits_of(kv_heads, groups, narrow)
    rows = path.REFERENCE_NODES * groups
    shared = RowTiles(rows, 2 if rows > 64 or narrow else 1)
    assert kv_heads * shared.items(count) <= hardware.MULTIPROCESSORS
    assert kv_heads * shared.items(count + 1) > hardware.MULTIPROCESSORS
    position = jnp.asarray([0, 1, 511, 512, 5000, 32767, 32768, 65535, 65536, 131071])
    split = np.asarray(path.split_of(position, kv_heads, groups, width, narrow))
    count = np.where(position < path.FAR, count, count * (1 + ((groups, width) == (4, 64))))
    assert (split % path.SLOTS == 0).all() and (split * count > position).all()
    # No longer than needed by more than the reach and a step of every split.
    beyond = path.REACH * np.maximum(1, np.asarray(position) // 32768 + 1) + path.SLOTS * count
    assert (split * count <= position + 1 + beyond).all()


def test_a_reach_is_shared_by_the_positions_within() -> None:
    position = jnp.arange(100_000)
    reach = np.asarray(path.reach(position))
    assert (reach > np.arange(100_000)).all()
    np.testing.assert_array_equal(np.asarray(path.reach(jnp.asarray(reach[:-1] - 1))), reach[:-1])
    assert set(np.diff(np.unique(reach))) <= {512, 1024}


@each_row("tile", [(16, 1), (64, 1), (256, 4), (64, 4), (16, 4)])
def test_a_tile_fits_shared_memory(tile: tuple[int, int]) -> None:
    rows, groups = tile
    for width, parts in ((256, 1), (256, 2), (128, 1), (128, 2), (64, 1)):
        chosen = path.path_tile(rows, width, groups, parts)
        ring = chosen.stages * 2 * chosen.slots * (width + width // parts)
        assert chosen.stages >= 2
        assert ring + 2 * chosen.warpgroups * 64 * width <= hardware.SHARED_BYTES[hardware.HOPPER]


@each_row("narrow", [False, True])
@each_row("tile", [(16, 1), (128, 1), (16, 4), (256, 4)])
def test_no_warpgroup_waits_for_registers_that_there_are_not(tile, narrow) -> None:
    prefix_mosaic = pytest.importorskip("longspec_jax.ops.attention.prefix_mosaic")
    rows, groups = tile
    chosen = path.path_tile(rows, 128, groups, 1, narrow)
    attending, fetching, *widening = prefix_mosaic.registers(chosen, narrow=narrow) or (0, 0)
    widening *= len(prefix_mosaic.widening_warpgroups(chosen))
    warpgroups = chosen.warpgroups + 1 + len(widening)
    at_launch = 65_536 // (128 * warpgroups) // 8 * 8
    assert attending * chosen.warpgroups + fetching + sum(widening) <= at_launch * warpgroups


@each_row("window", [18, 128, 512, 1024, 4096])
@each_row("most", [1, 4, 16, 33])
@each_row("slots", [64, 128])
def test_splits_of_a_window_cover_it_wherever_it_begins(slots: int, most: int, window: int) -> None:
    split, count = path.window_splits(window, slots, most)
    assert split % slots == 0 and count <= max(2, most)
    root = np.arange(1, 3000)
    first, last = np.maximum(root - (window - 1), 0), root - 1
    assert (last // split - first // split < count).all()


class Refused(NamedTuple):
    """A call that differs from one that is served in one thing."""

    what: str
    nodes: int = 8
    levels: int = 4
    width: int = 64
    capacity: int = 256
    dtype: str = "bfloat16"
    stored: str | None = None
    window: int | None = None


@each_row(
    "call",
    [
        Refused("more than 128", nodes=129),
        Refused("17 levels", levels=17),
        Refused("head width 96", width=96),
        Refused("capacity 120", capacity=120),
        Refused("float32", dtype="float32"),
        Refused("head width 256 is not one of 64, 128", width=256, stored="uint8"),
        Refused("17 tokens is smaller than 18", window=17),
        Refused("200 slots is not a multiple of 128", window=100, capacity=200),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused(call: Refused, monkeypatch) -> None:
    monkeypatch.setattr(hardware, "require_one_order", lambda kernel: True)
    array = functools.partial(jnp.zeros, dtype=call.dtype)
    cached = jnp.zeros((1, 2, call.capacity, call.width), call.stored or call.dtype)
    with pytest.raises(NotImplementedError, match=call.what):
        path.require_kernel(
            array((1, call.nodes, 4, call.width)),
            cached,
            array((1, call.nodes, 2, call.width)),
            call.levels,
            call.window,
        )


def test_a_cpu_has_no_kernel() -> None:
    q, rows = normal(0, 1, 4, 4, 64), normal(1, 1, 4, 2, 64)
    cache = normal(2, 1, 2, 256, 64)
    tree = Fresh(rows, rows, jnp.tril(jnp.ones((1, 4, 4), bool)))
    call = functools.partial(
        dispatch.path_attention,
        *(q, Prefix(cache, cache, jnp.asarray([100])), tree, jnp.arange(4)[None]),
        levels=3,
    )
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="no implementation of path_attention"):
            call()
    expected = reference.speculative_attention(q, Prefix(cache, cache, jnp.asarray([100])), tree)
    np.testing.assert_array_equal(call(implementation="reference"), expected)


class Scores(NamedTuple):
    """What a layer does to scores, and which of them it has."""

    window: int | None = None
    sinks: tuple[float, ...] | None = None
    cap: float | None = None


WHOLE = Scores()
SINKS = -3.0, 0.5, 5.0


class Text(NamedTuple):
    """Queries, keys and values of a text by position, and a tree along it."""

    q: jax.Array
    keys: jax.Array
    values: jax.Array

    @classmethod
    def drawn(cls, tokens: int, heads: int, kv_heads: int, width: int) -> "Text":
        shapes = (heads, kv_heads, kv_heads)
        return cls(
            *(normal(i, 1, tokens, n, width, dtype="bfloat16") for i, n in enumerate(shapes))
        )

    def prefix(self, length: int, window: int | None = None) -> Prefix:
        """The first tokens in a cache, or in the ring of a window; what no query sees is NaN."""
        position = jnp.arange(self.keys.shape[1])
        if window is not None:
            slot = jnp.arange(ring_slots(window, path.SLOTS))
            position = length - 1 - (length - 1 - slot) % len(slot)
            position = jnp.where(position > length - window, position, -1)
        there = ((position >= 0) & (position < length))[None, None, :, None]
        cache = (
            jnp.where(there, x.swapaxes(1, 2)[:, :, position], jnp.nan)
            for x in (self.keys, self.values)
        )
        return Prefix(*cache, jnp.asarray([length], jnp.int32))

    def tree(
        self, length: int, nodes: int, levels: int, seed: int, window: int | None = None
    ) -> tuple:
        """Operands of a random tree with this text along one path, and the path's nodes."""
        rng = np.random.default_rng(seed)
        parents, depth = [-1], [0]
        for node in range(1, nodes):
            parents.append(int(rng.choice([n for n in range(node) if depth[n] < levels])))
            depth.append(depth[parents[-1]] + 1)
        mask = ancestors(parents)
        leaf = int(np.argmax(depth))
        along = [node for node in range(nodes) if mask[leaf, node]]
        at = length + np.arange(len(along))
        q, keys, values = (
            normal(seed + i, 1, nodes, x.shape[2], x.shape[3], dtype="bfloat16")
            .at[:, jnp.asarray(along)]
            .set(x[:, at])
            for i, x in enumerate(self)
        )
        depth = np.asarray(depth, np.int32)
        if window is not None:
            mask = mask & (depth[:, None] - depth < window)
        fresh = Fresh(keys, values, jnp.asarray(mask[None]))
        return (q, self.prefix(length, window), fresh, jnp.asarray(depth)[None]), along


def in_8_bits(prefix: Prefix) -> Prefix:
    return dataclasses.replace(prefix, keys=codes(prefix.keys), values=codes(prefix.values))


POSITIONS = [0, 3, 15, 16, 17, 127, 128, 143, 144, 145, 400, 508, 512, 1023, 1100]
"""On, before and after what bounds recent tokens, steps, splits and reaches."""
FAR = [2900, 4090, 4096, 4200, 4352]
"""Of which some have more splits than are merged without a loop, where key/value heads are few."""
DOUBLED = [65500, 65535, 65536, 70000]
"""Before and after narrow heads have twice the splits."""


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
@each_row("nodes", [8, 16, 40, 64, 72])
def test_a_node_has_the_bits_of_plain_decoding(narrow, heads, kv_heads, width, nodes) -> None:
    """With grouped heads those of a cache in 8 bits are the bits of one in 16 bits, too."""
    hopper_or_skip()
    if width not in tiles.mosaic_widths(narrow=narrow):
        pytest.skip("a cache in 8 bits has narrower heads")
    positions = POSITIONS + FAR * (kv_heads == 2) + DOUBLED * ((kv_heads, width) == (8, 64))
    text = Text.drawn(-(-(positions[-1] + 180) // 8) * 8, heads, kv_heads, width)
    attend = wide = jax.jit(functools.partial(dispatch.path_attention, levels=16))
    if narrow:
        text = text._replace(keys=rounded(text.keys), values=rounded(text.values))
        attend = jax.jit(lambda q, prefix, *tree: wide(q, in_8_bits(prefix), *tree))
    for length in positions:
        operands, along = text.tree(length, nodes, 5, seed=length)
        out = np.float32(attend(*operands))
        if heads > kv_heads:  # With a query head a key/value head, splits are others in 8 bits.
            np.testing.assert_array_equal(out, np.float32(wide(*operands)))
        q, own, *tree = operands
        among = (
            jnp.full((3, *cache.shape[1:]), jnp.nan, cache.dtype).at[2].set(cache[0])
            for cache in (own.keys, own.values)
        )
        among = Prefix(*among, own.length, cache_rows=jnp.asarray([2]))
        np.testing.assert_array_equal(np.float32(attend(q, among, *tree)), out)
        exact = jax.tree.map(
            lambda x: jnp.nan_to_num(x.astype(jnp.float32)) if x.dtype == jnp.bfloat16 else x,
            operands[:3],
        )
        with jax.default_matmul_precision("highest"):
            right = np.asarray(reference.speculative_attention(*exact))
        assert np.abs(out - right).max() <= 0.01 * np.abs(right).max()
        for step, node in enumerate(along):
            position = length + step
            if position >= int(path.reach(jnp.asarray([length]))[0]):
                break
            at = jnp.asarray([position])
            alone = Fresh(text.keys[:, at], text.values[:, at], jnp.ones((1, 1, 1), bool))
            plain = attend(
                *(text.q[:, at], text.prefix(position), alone, jnp.zeros((1, 1), jnp.int32))
            )
            np.testing.assert_array_equal(out[0, node], np.float32(plain)[0, 0])


def check_bits(
    attend: Callable[..., jax.Array],
    text: Text,
    positions: Iterable[int],
    tree: tuple[int, int],
    scores: Scores = WHOLE,
) -> None:
    """Right, and the same in a tree, alone, and from another row of a cache.

    Args:
      attend: the kernels.
      text: what is attended to.
      positions: where trees begin.
      tree: nodes and levels of them.
      scores: what becomes of scores.
    """
    window, cap = scores.window, scores.cap
    sinks = scores.sinks and jnp.asarray(scores.sinks, text.q.dtype)
    attend = functools.partial(attend, sinks=sinks, window=window, cap=cap)
    for length in positions:
        operands, along = text.tree(length, *tree, seed=length, window=window)
        out = np.float32(attend(*operands))
        exact = jax.tree.map(
            lambda x: jnp.nan_to_num(x.astype(jnp.float32)) if x.dtype == jnp.bfloat16 else x,
            operands,
        )
        with jax.default_matmul_precision("highest"):
            options = dict(levels=tree[1], window=window, cap=cap, implementation="reference")
            right = np.asarray(dispatch.path_attention(*exact, sinks, **options))
        assert np.abs(out - right).max() <= 0.01 * np.abs(right).max()
        end = int(path.reach(jnp.asarray([length]))[0])
        for step, node in list(enumerate(along))[: end - length : 2]:
            position = length + step
            at = jnp.asarray([position])
            alone = Fresh(text.keys[:, at], text.values[:, at], jnp.ones((1, 1, 1), bool))
            cached = text.prefix(position, window)
            among = (
                jnp.full((2, *x.shape[1:]), jnp.nan, x.dtype).at[1].set(x[0])
                for x in (cached.keys, cached.values)
            )
            prefix = Prefix(*among, cached.length, cache_rows=jnp.asarray([1]))
            plain = attend(text.q[:, at], prefix, alone, jnp.zeros((1, 1), jnp.int32))
            np.testing.assert_array_equal(out[0, node], np.float32(plain)[0, 0])


FROM_ITS_FIRST_SLOT = 127, 128, 255, 1022, 1023, 1150, 2044, 2047, 2048
"""Where a window of 128 or 1024 tokens begins at a split's first slot, and around it."""


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(16, 8, 256), (64, 8, 64), (32, 32, 128)])
@each_row("scores", [Scores(1024), Scores(128, SINKS), Scores(None, SINKS, 20.0)])
def test_bounded_layers_have_the_bits_of_plain_decoding(scores, heads, kv_heads, width) -> None:
    """With windows that leave a whole split to the root and not to the deepest nodes."""
    hopper_or_skip()
    if scores.sinks is not None:
        scores = scores._replace(sinks=tuple(np.resize(scores.sinks, heads)))
    attend = jax.jit(
        functools.partial(dispatch.path_attention, levels=16), static_argnames=("window", "cap")
    )
    text = Text.drawn(2200, heads, kv_heads, width)
    for nodes in (16, 64):
        check_bits(attend, text, FROM_ITS_FIRST_SLOT, (nodes, 5), scores)
