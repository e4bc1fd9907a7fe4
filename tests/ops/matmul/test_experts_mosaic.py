"""The kernel of experts for Hopper GPUs: where rows are put, and the results of the definition."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import hardware
from longspec_jax.ops.matmul import experts_grouping, experts_tiles
from longspec_jax.ops.matmul.experts import EXPERT_MLPS, ExpertWeights
from longspec_jax.ops.matmul.experts_grouping import expert_tiles
from longspec_jax.ops.matmul.experts_tiles import expert_work, most_tiles, tile_height
from longspec_jax.ops.matmul.packed import pack
from tests.kit import TOLERANCE, each_row, hopper_or_skip, lowered, normal, relative_error
from tests.ops.matmul.reference import expert_mlp_reference
from tests.ops.matmul.test_experts import floats

EXPERTS, CHOSEN = 4, 2
ROWS = (1, 2, 16, 64, 69, 128)


def chosen(rows: int, experts: int = EXPERTS, each: int = CHOSEN, *, crowded: bool = False) -> Any:
    """Choices of random rows. None takes expert 1; or all take only the last two."""
    random = np.random.default_rng(rows)
    others = np.delete(np.arange(experts), 1)
    if crowded:
        return np.tile(others[-each:], (rows, 1))
    return np.stack([random.permutation(others)[:each] for _ in range(rows)])


@each_row("crowded", [False, True])
@each_row("rows", ROWS)
@each_row("held", [3, EXPERTS])
def test_every_pair_has_a_place_in_a_tile_of_its_expert(
    rows: int, held: int, crowded: bool
) -> None:
    experts = np.minimum(chosen(rows, crowded=crowded), held)
    height = tile_height(rows, CHOSEN, held)
    tiles = expert_tiles(jnp.asarray(experts), held, height)
    [count], places = np.asarray(tiles.count), np.asarray(tiles.slot)
    loads = np.bincount(experts.ravel(), minlength=held + 1)[:held]
    if rows > 1:
        assert count == sum(-(-loads // height))
    assert count <= len(tiles.expert) == most_tiles(experts.size, held, height)
    here = experts < held
    assert len(set(places[here])) == here.sum()
    assert (places[here] < count * height).all()
    np.testing.assert_array_equal(tiles.expert[places[here] // height], experts[here])
    row = np.broadcast_to(np.arange(rows)[:, None], experts.shape)[here]
    if tiles.source is None:
        np.testing.assert_array_equal(places[here] % height, row)
    else:
        np.testing.assert_array_equal(tiles.source[places[here]], row)


def test_heights_follow_from_the_mean_number_of_rows() -> None:
    """gpt-oss and Qwen3-30B-A3B: a plain step, trees, several rows."""
    assert [tile_height(rows, 4, 32) for rows in (1, 8, 64, 128, 4096)] == [8, 8, 16, 32, 128]
    assert [tile_height(rows, 8, 128) for rows in (1, 64, 128, 512)] == [8, 8, 16, 64]


def test_work_fits_the_machine() -> None:
    for height in (8, 16, 32, 64, 128):
        for contracted, outputs in ((2880, 2880), (2048, 768), (768, 2048)):
            for gated, packed in ((False, False), (True, False), (False, True), (True, True)):
                kind = dict(gated=gated, packed=packed)
                work = expert_work(height, 40, contracted, outputs, **kind)
                out = work.rows * work.tile.columns * 2
                held = work.stages * work.stage_bytes + out
                assert held <= hardware.SHARED_BYTES[(9, 0)] - 1024
                assert work.stages >= 3 and work.programs <= hardware.MULTIPROCESSORS


def drawn(
    width: int, inner: int, held: int, dtype: str, *, biases: bool, packed: bool = False
) -> ExpertWeights:
    """Random weights whose sums are of the order of 1, in 16 bits or in MXFP4, packed."""
    if packed:
        gate_up: Any = pack(floats(1, 2 * held, inner, width), jnp.dtype(dtype))
        down: Any = pack(floats(2, held, width, inner), jnp.dtype(dtype))
    else:
        gate_up = normal(1, held, 2, inner, width, dtype=dtype) / width**0.5
        down = normal(2, held, width, inner, dtype=dtype) / inner**0.5
    more = normal(3, held, 2, inner, dtype=dtype), normal(4, held, width, dtype=dtype)
    return ExpertWeights(gate_up, down, *more[: 2 * biases])


def of_pairs(out: Any, experts: np.ndarray) -> np.ndarray:
    """The weighted sums of what the experts yield."""
    shares = 1.0 + np.arange(experts.shape[1])
    return np.einsum("rkd,k->rd", np.asarray(out, np.float64), shares)


def right(x: Any, experts: np.ndarray, weights: ExpertWeights, limit: float | None) -> np.ndarray:
    """The same by the definition."""
    shares = jnp.broadcast_to(1.0 + jnp.arange(experts.shape[1]), experts.shape)
    wide = jnp.asarray(x, jnp.float32)[None]
    operands = wide, jnp.asarray(experts)[None], shares[None], weights
    return np.asarray(expert_mlp_reference(*operands, limit), np.float64)[0]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel without a GPU, in two programs."""
    gpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    if not hardware.mosaic_is_supported():
        pytest.skip("the kernel needs jax 0.11 or newer")
    monkeypatch.setattr(hardware, "require_hopper", lambda kernel: None)
    monkeypatch.setattr(experts_tiles, "MULTIPROCESSORS", 2)
    return partial(experts_grouping.expert_mlps_mosaic, interpret=gpu.InterpretGPUParams())


@pytest.mark.parametrize(
    ("rows", "crowded", "dtype"),
    [(2, True, "float16"), (128, True, "float16"), (69, False, "mxfp4"), (1, False, "mxfp4")],
)
def test_interpreted_kernel(rows: int, crowded: bool, dtype: str, interpreted: Any) -> None:
    """gpt-oss's experts: with biases, a bounded gate, and edges in the contraction."""
    packed = dtype == "mxfp4"
    dtype = "bfloat16" if packed else dtype
    weights = drawn(192, 64, EXPERTS, dtype, biases=True, packed=packed)
    x, experts = normal(0, rows, 192, dtype=dtype), chosen(rows, crowded=crowded)
    out = of_pairs(interpreted(x, jnp.asarray(experts), weights, 1.0), experts)
    assert relative_error(out, right(x, experts, weights, 1.0)) <= TOLERANCE[dtype]


def test_a_row_has_the_same_bits_beside_any_others(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever these choose. The interpreter's own order depends on the height of a tile."""
    monkeypatch.setattr(experts_grouping, "tile_height", lambda *sizes: 8)
    weights, x = (
        drawn(128, 64, EXPERTS, "bfloat16", biases=False),
        normal(0, 24, 128, dtype="bfloat16"),
    )
    experts = chosen(24)
    whole = np.asarray(interpreted(x, jnp.asarray(experts), weights, None))
    expected = right(x, experts, weights, None)
    assert relative_error(of_pairs(whole, experts), expected) <= TOLERANCE["bfloat16"]
    for rows in (1, 16):
        out = np.asarray(interpreted(x[:rows], jnp.asarray(experts[:rows]), weights, None))
        np.testing.assert_array_equal(out, whole[:rows], err_msg=str(rows))
    crowded = np.tile(experts[3], (24, 1))
    out = np.asarray(interpreted(x.at[5].set(jnp.nan), jnp.asarray(crowded), weights, None))
    np.testing.assert_array_equal(out[3], whole[3])
    assert np.isnan(np.float32(out[5])).all() and np.isfinite(np.float32(out[4])).all()


LARGE = {
    "gpt-oss-20b": (2880, 2880, 32, 4, 7.0, True),
    "Qwen3-30B-A3B": (2048, 768, 128, 8, None, False),
}
"""Width, width of an expert, experts, chosen, limit of the gate, and whether there are biases."""


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
@each_row("rows", [1, 64, 69, 128])
@each_row("packed", [False, True])
@each_row("name", LARGE)
def test_mlps_lower_for_cuda(
    name: str, packed: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    width, inner, held, each, limit, biases = LARGE[name]
    operand: Any = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype("bfloat16"))
    options = dict(dtype="bfloat16", biases=biases, packed=packed)
    weights = jax.eval_shape(partial(drawn, width, inner, held, **options))
    experts = jax.ShapeDtypeStruct((rows, each), jnp.int32)
    call = partial(EXPERT_MLPS.named("mosaic"), limit=limit)
    text = lowered(call, operand((rows, width)), experts, weights)
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16", "mxfp4"])
@pytest.mark.parametrize("name", LARGE)
def test_hopper_kernel(name: str, packed: bool) -> None:
    """Right for any number of rows, which keep their bits and know nothing of each other."""
    hopper_or_skip()
    width, inner, _, each, limit, biases = LARGE[name]
    held, dtype = 16, "bfloat16"
    weights = drawn(width, inner, held, dtype, biases=biases, packed=packed)
    x, experts = normal(0, 300, width, dtype=dtype), chosen(300, held, each)
    mlps = jax.jit(partial(EXPERT_MLPS.named("mosaic"), limit=limit))
    whole = np.asarray(mlps(x, jnp.asarray(experts), weights), np.float64)
    expected = right(x[:64], experts[:64], weights, limit)
    assert relative_error(of_pairs(whole[:64], experts[:64]), expected) <= 2 * TOLERANCE[dtype]
    for rows in (1, 2, 8, 9, 64, 69, 128):
        out = np.asarray(mlps(x[:rows], jnp.asarray(experts[:rows]), weights), np.float64)
        np.testing.assert_array_equal(out, whole[:rows], err_msg=str(rows))
    crowded = np.tile(experts[7], (128, 1))
    broken = x[:128].at[5].set(jnp.nan)
    broken = np.asarray(mlps(broken, jnp.asarray(crowded), weights), np.float64)
    assert np.isnan(broken[5]).all() and np.isfinite(np.delete(broken, 5, axis=0)).all()
    np.testing.assert_array_equal(broken[7], whole[7])


def test_packed_experts_are_the_definitions_elsewhere() -> None:
    """XLA's forms, for a prompt's rows; and nothing is lost when they are packed."""
    matrix = floats(1, 2 * EXPERTS, 64, 192)
    plain = pack(matrix, jnp.dtype("bfloat16")).plain()
    assert plain.floating and plain.group == 32
    np.testing.assert_array_equal(plain.codes, matrix.codes)
    np.testing.assert_array_equal(plain.scale, matrix.scale)
    weights = drawn(192, 64, EXPERTS, "bfloat16", biases=True, packed=True)
    for rows in (1, 20, 70):
        x, experts = normal(0, rows, 192, dtype="bfloat16"), chosen(rows)
        out = of_pairs(EXPERT_MLPS(x, jnp.asarray(experts), weights, 1.0), experts)
        assert relative_error(out, right(x, experts, weights, 1.0)) <= 2 * TOLERANCE["bfloat16"]
