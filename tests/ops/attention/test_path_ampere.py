"""Path attention without Hopper's instructions: against dense float32, and for bits."""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.decoding.cache import ring_slots
from longspec_jax.ops import hardware
from longspec_jax.ops.attention import dispatch, path
from longspec_jax.ops.attention.operands import Fresh, Prefix
from tests.kit import each_row
from tests.ops.attention.test_path import WHOLE, Scores, Text
from tests.ops.interpreted_ampere import interpret

POSITIONS = [3, 80, 150]
MORE_POSITIONS = [*POSITIONS, 0, 15, 16, 17, 79, 81, 127, 128, 145, 511, 512, 1023, 1100]
"""On, before and behind what bounds recent tokens, steps, splits and reaches."""


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
            at = slice(position, position + 1)
            alone = Fresh(text.keys[:, at], text.values[:, at], jnp.ones((1, 1, 1), bool))
            cached = text.prefix(position, window)
            among = (
                jnp.full((2, *x.shape[1:]), jnp.nan, x.dtype).at[1].set(x[0])
                for x in (cached.keys, cached.values)
            )
            prefix = Prefix(*among, cached.length, cache_rows=jnp.asarray([1]))
            plain = attend(text.q[:, at], prefix, alone, jnp.zeros((1, 1), jnp.int32))
            np.testing.assert_array_equal(out[0, node], np.float32(plain)[0, 0])


BOUNDED = [Scores(150), Scores(18, (1.5, -20.0)), Scores(None, (-1.0, 40.0), 5.0)]
"""Windows, sinks and soft caps. A window shows the whole text, or less than a step; a sink takes
nothing, or nearly everything."""


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
@each_row("scores", BOUNDED)
def test_interpreted_kernels_of_bounded_layers(scores, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trees on both sides of a window's first turns, and across the seam of its ring."""
    from longspec_jax.ops.attention import path_ampere

    interpret(monkeypatch)
    monkeypatch.setattr(path_ampere, "MULTIPROCESSORS", 4)
    window = scores.window or 150
    turn = ring_slots(window, path.SLOTS)
    positions = [window - 1, window, window + 1, turn - 2, 2 * turn + 17]
    check_bits(path_ampere.path_attention, Text.drawn(640, 2, 1, 64), positions, (6, 3), scores)


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
def test_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspec_jax.ops.attention import path_ampere

    interpret(monkeypatch)
    monkeypatch.setattr(path_ampere, "MULTIPROCESSORS", 4)
    check_bits(path_ampere.path_attention, Text.drawn(256, 2, 1, 64), POSITIONS, (6, 3))


@pytest.mark.gpu
@each_row(("heads", "kv_heads", "width"), [(32, 8, 128), (14, 2, 64), (32, 32, 128)])
def test_kernels(heads: int, kv_heads: int, width: int) -> None:
    hardware.require_one_order("the kernel")
    from longspec_jax.ops.attention import path_ampere

    attend = jax.jit(path_ampere.path_attention)
    text = Text.drawn(1280, heads, kv_heads, width)
    check_bits(attend, text, MORE_POSITIONS, (64, 15))
    bounded = Scores(400, tuple(np.linspace(-3, 5, heads)), 20.0)
    attend = jax.jit(path_ampere.path_attention, static_argnames=("window", "cap"))
    check_bits(attend, text, MORE_POSITIONS, (64, 15), bounded)
