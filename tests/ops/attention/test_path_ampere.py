"""Path attention without Hopper's instructions: against dense float32, and for bits."""

import jax
import numpy as np
import pytest

from longspec_jax.decoding.cache import ring_slots
from longspec_jax.ops import hardware
from longspec_jax.ops.attention import path
from tests.kit import each_row
from tests.ops.attention.test_path import Scores, Text, check_bits
from tests.ops.interpreted_ampere import interpret

POSITIONS = [3, 80, 150]
MORE_POSITIONS = [*POSITIONS, 0, 15, 16, 17, 79, 81, 127, 128, 145, 511, 512, 1023, 1100]
"""On, before and after what bounds recent tokens, steps, splits and reaches."""


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
