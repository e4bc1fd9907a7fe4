"""Quantised weights in the order of the Hopper kernel, and the kernel against float64."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import hardware
from longspec_jax.ops.matmul import ordered_tiles, quantised
from longspec_jax.ops.matmul.ordered_tiles import MatmulTile
from longspec_jax.ops.matmul.packed import PackedMatrix, pack
from longspec_jax.ops.matmul.packed_shares import packed_params
from longspec_jax.ops.matmul.quantised_tiles import QuantisedWork, quantised_tile
from longspec_jax.ops.matmul.quantised_weights import FINE, UNIT, QuantisedMatrix
from tests.kit import TOLERANCE, each_row, hopper_or_skip, normal, relative_error
from tests.ops.matmul.published import PUBLISHED
from tests.ops.matmul.test_few_rows import exact, silu


class Case(NamedTuple):
    """Quantised weights, and how they are multiplied."""

    stored: str
    inputs: int
    outputs: tuple[int, ...]
    group: int = 0
    zeros: bool = False
    order: bool = False
    gated: bool = False
    split: bool = False
    dtype: str = "bfloat16"
    offset: bool = False
    counted: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.stored == "uint8" else 8

    def drawn(self) -> QuantisedMatrix:
        """Random weights: all codes, and scales that 16 bits hold exactly."""
        random = np.random.default_rng(self.inputs)
        codes = random.integers(0, 256, (*self.outputs, self.inputs * self.bits // 8), np.uint8)
        groups = -(-self.inputs // self.group) if self.group else 1
        shape = (*self.outputs, groups)
        low, high = (0, 16) if self.bits == 4 else (-99, 99)
        scale = random.integers(128, 256, shape) / 2**14
        if self.group in FINE and not self.zeros:  # Of 17 bits, and offsets of as many.
            scale = random.integers(-(2**17), 2**17, shape) / 2.0**24
        units = None
        if self.counted:
            scale = random.integers(-127, 128, shape).astype(np.int8)
            units = random.uniform(-1, 1, (*self.outputs, -(-self.inputs // UNIT))) / 2**13
            units = jnp.asarray(units, jnp.float16)
        finite = np.where(codes & 0x7F == 0x7F, 0, codes) if "float" in self.stored else codes
        return QuantisedMatrix(
            jnp.asarray(finite.view(jnp.dtype(self.stored))),
            jnp.asarray(scale, None if self.counted else jnp.float32),
            jnp.asarray(random.integers(low, high, shape), jnp.int8) if self.zeros else None,
            jnp.asarray(random.permutation(self.inputs)) if self.order else None,
            self.group,
            offset=self._offset(scale),
            unit=units,
            offset_unit=-8 * units if self.offset and units is not None else None,
        )

    def _offset(self, scale: np.ndarray) -> jax.Array | None:
        if not self.offset:
            return None
        if self.counted:
            return jnp.asarray(scale[..., ::-1])
        return jnp.asarray(-8 * scale[..., ::-1], jnp.float32)

    def operands(self, rows: int = 200) -> tuple[jax.Array, QuantisedMatrix, jax.Array | None]:
        """The first of some random rows, the weights, and a bias where one may be."""
        x = normal(0, 1024, self.inputs, dtype=self.dtype)[:rows]
        plain = not (self.gated or self.split)
        return x, self.drawn(), normal(1, *self.outputs, dtype=self.dtype) if plain else None

    def expected(self) -> np.ndarray:
        """The result of 200 rows in float64."""
        x, matrix, bias = self.operands()
        out = exact(x, matrix.kernel(jnp.float32))
        if self.gated:
            return silu(out[:, 0]) * out[:, 1]
        return out if bias is None else out + np.float64(bias)


CASES = {
    "fp8": Case("float8_e4m3fn", 320, (192,)),
    "fp8 blocks": Case("float8_e4m3fn", 384, (128,), group=128, split=True),
    "int8": Case("int8", 256, (128,), zeros=True, dtype="float16"),
    "int8 groups": Case("int8", 192, (64,), group=64),
    "int8, gated": Case("int8", 256, (2, 64), gated=True),
    "4 bits": Case("uint8", 384, (2, 64), group=128, zeros=True, gated=True),
    "4 bits, one scale": Case("uint8", 256, (1, 128), order=True),
    "4 bits with offsets": Case("uint8", 320, (128,), group=32, offset=True, split=True),
    "4 bits in small groups, gated": Case("uint8", 256, (2, 64), group=32, gated=True),
    "int8 with offsets": Case("int8", 256, (64,), group=32, offset=True, dtype="float16"),
    "int8 in groups of 16": Case("int8", 192, (2, 64), group=16, gated=True),
    "Q4_K": Case("uint8", 512, (128,), group=32, offset=True, split=True, counted=True),
    "Q4_K, gated": Case("uint8", 256, (2, 64), group=32, offset=True, gated=True, counted=True),
    "Q5_K": Case("int8", 256, (64,), group=32, offset=True, counted=True, dtype="float16"),
    "Q6_K": Case("int8", 256, (2, 64), group=16, gated=True, counted=True),
    "Q4_K beside Q6_K": Case("int8", 256, (192,), group=16, offset=True, counted=True),
}
"""Every format, with edges of both axes, a group of two blocks, and several turns of a program."""


@each_row("name", CASES)
def test_packing_loses_nothing(name: str) -> None:
    matrix = CASES[name].drawn()
    plain = pack(matrix, jnp.dtype("bfloat16")).plain()
    assert plain.group == (matrix.group if matrix.groups > 1 else 0)
    for field in ("codes", "scale", "zero", "order", "offset", "unit", "offset_unit"):
        one, other = getattr(plain, field), getattr(matrix, field)
        assert (one is None) == (other is None), field
        if one is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=field)


@each_row("bits", [4, 8])
def test_a_thread_finds_its_inputs_side_by_side(bits: int) -> None:
    """In each word first those of the lower halves of a pair, as the kernel takes them apart."""
    count = 8 * 64 // bits
    code = np.arange(count)
    stored = code.astype(np.int8) if bits == 8 else (code[::2] % 16 | code[1::2] % 16 << 4)
    row = jnp.broadcast_to(stored.astype("int8" if bits == 8 else "uint8"), (64, len(stored)))
    matrix = QuantisedMatrix(row, jnp.ones((64, 1)))
    words = np.asarray(pack(matrix, jnp.dtype("bfloat16")).codes)[0, 5]
    pairs = 16 // bits
    for thread in range(4):
        for word in range(4):
            for pair in range(pairs):
                # Instructions of 16 inputs, of which a thread has two neighbours in each half.
                first = 8 * (pairs * word + pair) + 2 * thread
                value = int(words[4 * thread + word])
                lower, upper = (value >> bits * (pair + pairs * half) for half in (0, 1))
                mask = 2**bits - 1
                assert (lower & mask, upper & mask) == (first & mask, (first + 1) & mask)


def test_weights_that_the_kernel_cannot_read_are_refused() -> None:
    for case, message in (
        (Case("int8", 128, (64,), group=8), "groups of 16 or 32 inputs, or .* 64, not 8"),
        (Case("uint8", 128, (64,), group=32, zeros=True), "no zero points and no 8-bit floats in"),
        (Case("float8_e4m3fn", 128, (64,), group=32), "no zero points and no 8-bit floats in"),
        (Case("int8", 128, (64,), group=64, offset=True), "and offsets in no others"),
        (Case("int8", 128, (72,)), "outputs in multiples of 64, not 72"),
        (Case("int8", 100, (64,)), "inputs in multiples of 8, not 100"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            pack(case.drawn(), jnp.dtype("bfloat16"))
    floats = Case("uint8", 128, (64,)).drawn().replace(floating=True)  # pyright: ignore
    with pytest.raises(NotImplementedError, match="those of stacked experts, in groups of 32"):
        pack(floats, jnp.dtype("bfloat16"))


def test_parameters_are_packed_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["4 bits, one scale"]
    whole, odd = jnp.ones(3), Case("int8", 64, (72,)).drawn()
    # The kernel of experts multiplies scales by 2^126.
    experts = Case("uint8", 128, (2, 64), group=32).drawn().replace(floating=True)  # pyright: ignore
    wide = experts.replace(scale=experts.scale + 2)

    large = experts.replace(floating=False, scale=experts.scale + 2.0**101)

    def params() -> dict[str, Any]:
        return {"layer": {"kernel": case.drawn(), "scale": whole}, "odd": odd, "wide": wide}

    here = params()
    assert packed_params(here, "bfloat16")["layer"]["kernel"] is here["layer"]["kernel"]
    monkeypatch.setattr(hardware, "require_hopper", lambda kernel: None)
    assert packed_params(here, "float32")["layer"]["kernel"] is here["layer"]["kernel"]
    there = packed_params(here, "bfloat16")
    assert there["odd"] is odd and there["layer"]["scale"] is whole and there["wide"] is wide
    assert packed_params(large, "bfloat16") is large  # Times 2^24 it is no number.
    assert packed_params(experts, "float16") is experts
    assert isinstance(packed_params(experts, "bfloat16"), PackedMatrix)
    packed = there["layer"]["kernel"]
    assert isinstance(packed, PackedMatrix) and packed.out_axes == case.outputs
    assert here["layer"]["kernel"].codes.is_deleted()
    # A prompt's chunk is XLA's matmul with the same weights.
    monkeypatch.undo()
    x, matrix, bias = case.operands()
    out, right = (quantised.quantised_matmul(x, each, bias) for each in (packed, matrix))
    np.testing.assert_array_equal(np.float32(out), np.float32(right))


@each_row("shares", [1, 2, 4, 8])
def test_work_fits_the_machine(shares: int) -> None:
    """The work of a device that holds one share of the weights."""
    assert quantised_tile(8192, 6144, draft_rows=16) == MatmulTile(64, 1, 256)
    for weights in PUBLISHED:
        sizes = (
            weights.contracted // (shares if weights.split else 1),
            weights.columns // (1 if weights.split else shares),
        )
        if weights.head or any(size % 128 for size in sizes):
            continue
        options = dict(gated=weights.gated, split=weights.split)
        for bits, rows in ((4, 1), (8, 16), (8, 64), (8, 128), (4, 1000)):
            group = 32 if rows > 64 else 0 if rows == 16 else 128
            tile = quantised_tile(*sizes, bits=bits, **options)
            of_draft = quantised_tile(*sizes, bits=bits, **options, draft_rows=rows)
            if of_draft != tile:
                assert bits == 8 and rows == 16 and of_draft.depth == 256 == 2 * tile.depth
            tile = of_draft
            assert sizes[1] % tile.columns == 0
            parts = 2 if weights.gated else 1
            kind = dict(bits=bits, group=group, fine=group in FINE, counted=group in FINE)
            work = QuantisedWork(rows, *sizes, tile, parts, zeros=rows != 16, **kind)
            assert work.programs <= hardware.MULTIPROCESSORS
            out = 64 * (work.halves * work.height * work.out_bytes + 4 * work.handed * work.pitch)
            assert work.stages * work.stage_bytes + out <= hardware.SHARED_BYTES[(9, 0)] - 1024
            if sizes[0] * sizes[1] >= 2**24 and rows <= 64:
                assert work.stages >= 3, weights


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
@pytest.mark.parametrize("name", [name for name in CASES if name != "int8 groups"])
def test_interpreted_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and a row's bits are the same alongside any others."""
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    from longspec_jax.ops.matmul import quantised_mosaic

    monkeypatch.setattr(ordered_tiles, "MULTIPROCESSORS", 2)
    case = CASES[name]
    deep = (case.bits == 4 or not case.group) and not case.inputs % 256
    depth = 256 if deep else 128
    tile = MatmulTile(128 if case.outputs == (128,) else 64, 2 if case.split else 1, depth)
    packed = pack(case.drawn(), jnp.dtype(case.dtype))

    def interpreted(rows: int, dtype: str = case.dtype) -> np.ndarray:
        x, _, bias = case.operands(rows)
        bias = None if bias is None else bias.reshape(-1)
        options: Any = dict(tile=tile, gated=case.gated, interpret=InterpretGPUParams())
        options["dtype"] = jnp.dtype(dtype)
        out = np.asarray(quantised_mosaic.matmul(x, packed, bias, **options), np.float64)
        return np.asarray(out.sum(0) if case.split else out)

    # The interpreter multiplies in the order of as many columns as there are.
    whole, right = interpreted(24), case.expected().reshape(200, -1)
    assert relative_error(whole, right[:24]) <= TOLERANCE[case.dtype]
    np.testing.assert_array_equal(interpreted(19), whole[:19])
    # Three groups of 6, in other columns.
    assert relative_error(interpreted(18), right[:18]) <= TOLERANCE[case.dtype]
    if case.bits == 8 and name != "int8":  # Two sums a warpgroup, and a second row tile.
        assert relative_error(interpreted(136), right[:136]) <= TOLERANCE[case.dtype]
    if name == "int8":  # Logits.
        assert relative_error(interpreted(24, "float32"), right[:24]) < 1e-5


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="needs jax 0.11 or newer")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.group in FINE])
def test_interpreted_weights_of_fine_groups_are_rounded_once(name: str) -> None:
    """A row with a single 1 is multiplied to what the definition says, bit for bit."""
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    from longspec_jax.ops.matmul import quantised_mosaic

    case = CASES[name]
    case = case._replace(gated=False, split=False, outputs=(math.prod(case.outputs),))
    matrix, dtype = case.drawn(), jnp.dtype(case.dtype)
    options: Any = dict(tile=MatmulTile(64, 1, 128), dtype=jnp.float32)
    options["interpret"] = InterpretGPUParams()
    found = [
        quantised_mosaic.matmul(rows, pack(matrix, dtype), **options)
        for rows in jnp.split(jnp.eye(case.inputs, dtype=dtype), case.inputs // 64)
    ]
    expected = np.float32(matrix.dequantised(dtype))
    np.testing.assert_array_equal(np.concatenate(found).T, expected)


LARGE = [
    Case("float8_e4m3fn", 4096, (6144,)),
    Case("float8_e4m3fn", 4096, (2, 11008), gated=True),
    Case("float8_e4m3fn", 14336, (4096,), group=128, split=True),
    Case("int8", 2560, (48, 128)),
    Case("int8", 4096, (4096,), group=64, zeros=True, split=True, dtype="float16"),
    Case("uint8", 4096, (2, 14336), group=128, gated=True),
    Case("uint8", 11008, (4096,), group=128, zeros=True, split=True),
    Case("uint8", 896, (1152,), group=64, order=True, dtype="float16"),
    Case("uint8", 4096, (6144,), zeros=True),
    Case("uint8", 4096, (2, 14336), group=32, offset=True, gated=True),
    Case("uint8", 4096, (4096,), group=32, offset=True, split=True),
    Case("uint8", 896, (1152,), group=32, dtype="float16"),
    Case("int8", 14336, (4096,), group=16, split=True),
    Case("int8", 1536, (2048,), group=32, offset=True),
    Case("uint8", 3584, (2, 18944), group=32, offset=True, gated=True, counted=True),
    Case("uint8", 4096, (4096,), group=32, offset=True, split=True, counted=True),
    Case("int8", 14336, (4096,), group=16, split=True, counted=True),
    Case("int8", 1536, (2048,), group=16, offset=True, counted=True),
    Case("uint8", 1536, (2, 8960), group=32, offset=True, gated=True, counted=True),
    Case("int8", 8960, (1536,), group=16, split=True, counted=True),
    Case("uint8", 8960, (1536,), group=32, offset=True, split=True, counted=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES.values(), *LARGE], ids=str)
def test_hopper_kernel(case: Case) -> None:
    """Right for any number of rows, which keep their bits and know nothing of each other."""
    hopper_or_skip()
    options = dict(gated=case.gated, split=case.split)
    multiply = quantised.QUANTISED_MATMUL.named("mosaic")
    packed, right = pack(case.drawn(), jnp.dtype(case.dtype)), case.expected()
    found = {}
    for rows in (1, 8, 10, 33, 64, 128, 200, 512, 1024):
        x, _, bias = case.operands(rows)
        x = x.at[7].set(jnp.nan) if rows == 64 else x
        out = np.float64(multiply(x, packed, bias, **options))
        found[rows] = out.sum(0) if case.split else out
    broken = found.pop(64)
    assert np.isnan(broken[7]).all() and np.isfinite(np.delete(broken, 7, axis=0)).all()
    for rows, out in found.items():
        assert relative_error(out[:200], right[:rows]) <= TOLERANCE[case.dtype], rows
        np.testing.assert_array_equal(out, found[1024][:rows], err_msg=str(rows))
    np.testing.assert_array_equal(np.delete(broken, 7, axis=0), np.delete(found[1024][:64], 7, 0))
