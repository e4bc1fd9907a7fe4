"""Every shipped tile still lowers for CUDA, checked without a GPU."""

import dataclasses
import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

from longspec_jax.compilation import keep_programs
from longspec_jax.decoding.cache import ring_slots
from longspec_jax.ops import hardware, launchers, layer, layer_pallas
from longspec_jax.ops.attention import dispatch, fresh_pallas, kernels, path, path_kernels, tiles
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.attention.tiles import MosaicTile, PrefixTile, TreeTile
from longspec_jax.ops.hardware import mosaic_is_supported
from longspec_jax.ops.matmul import ordered_mosaic, quantised_pallas
from longspec_jax.ops.matmul.packed import pack
from longspec_jax.ops.matmul.quantised_tiles import quantised_tile
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.ops.selection import continuations_pallas, gather_pallas
from tests.kit import each_row, hopper_mesh, lowered
from tests.ops import gpus
from tests.ops.attention.oracle import HEADS, TOKENS
from tests.ops.matmul.published import PUBLISHED, SHARES, Weights
from tests.ops.matmul.test_packed import LARGE, Case
from tests.ops.shapes import codes, half, real, truth, whole


def shipped() -> list:
    """One call for each distinct pair of tiles that the heuristics give."""
    found = {}
    for dtype, width in (
        ("bfloat16", 128),
        ("float16", 64),
        ("bfloat16", 96),
        ("bfloat16", 256),
        ("float32", 128),
    ):
        itemsize = jnp.dtype(dtype).itemsize
        for capability in ((8, 0), (9, 0)):
            for heads, kv_heads in HEADS:
                for tokens in TOKENS:
                    sizes = (tokens, heads, kv_heads, width)
                    prefix = tiles.prefix_tile(*sizes, 8192, itemsize, capability)
                    tree = tiles.tree_tile(*sizes, tokens, itemsize)
                    # The split is a number in the kernel; it changes nothing that could fail.
                    shape = {k: v for k, v in vars(prefix).items() if k != "split"}
                    key = (type(prefix), tuple(shape.items()), tree, width > 128, width == 96)
                    found.setdefault(key, (tokens, heads, kv_heads, width, dtype, prefix, tree))
    return [*found.values()]


@each_row(("tokens", "heads", "kv_heads", "width", "dtype", "prefix", "tree"), shipped())
def test_shipped_tiles_lower_for_cuda(tokens, heads, kv_heads, width, dtype, prefix, tree) -> None:
    if isinstance(prefix, MosaicTile) and not mosaic_is_supported():
        pytest.skip("this version of jax lacks the Mosaic GPU interface the kernel is written for")
    operand = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    cache = operand((2, kv_heads, 8192, width))
    rows = operand((2, tokens, kv_heads, width))

    def call(q, k, v, length, tree_k, tree_v, mask):
        operands = Prefix(k, v, length), Fresh(tree_k, tree_v, mask)
        return kernels.speculative_attention(q, *operands, prefix_tile=prefix, tree_tile=tree)

    text = lowered(
        call,
        operand((2, tokens, heads, width)),
        cache,
        cache,
        whole((2,)),
        rows,
        rows,
        truth((2, tokens, tokens)),
    )
    assert text.count("custom_call @") >= 2


@each_row(
    ("kv_heads", "width", "taken"),
    [(16, 256, "Triton"), (4, 512, "XLA")],
)
def test_both_widths_of_gemma_4_lower_for_cuda(kv_heads: int, width: int, taken: str) -> None:
    """A layer with a window by the kernels; the wider heads of a full one, by XLA."""
    cache, nodes = half((1, kv_heads, 1064, width)), half((1, 16, kv_heads, width))

    def step(q, cache, length, positions, nodes, mask, implementation):
        prefix = Prefix(cache, cache, length).within(1024 if width == 256 else None, positions)
        given = q, prefix, Fresh(nodes, nodes, mask)
        return dispatch.speculative_attention(*given, scale=1.0, implementation=implementation)

    given = half((1, 16, 32, width)), cache, whole((1,)), whole((1, 16)), nodes
    mask = truth((1, 16, 16))
    with gpus.pretended(hardware.HOPPER):
        chosen = gpus.lowered(
            gpus.Call(functools.partial(step, implementation=None), (*given, mask))
        )
        assert gpus.kernels(chosen.as_text(), hardware.HOPPER) == taken
        if taken == "XLA":
            with pytest.raises(NotImplementedError, match="head width 512 is not a multiple of 8"):
                gpus.lowered(
                    gpus.Call(functools.partial(step, implementation="pallas"), (*given, mask))
                )


def test_a_kernel_is_kept_under_one_text(tmp_path) -> None:
    """Whatever was traced before it: the next process finds it among the programs that are kept."""
    options = "jax_traceback_in_locations_limit", "jax_compilation_cache_dir"
    before = {name: jax.config.values[name] for name in options}
    q, cache, length = half((1, 4, 2, 64)), half((1, 2, 256, 64)), jnp.zeros(1, jnp.int32)
    mask = truth((1, 4, 4))

    def tree(q, fresh, mask):
        tile = TreeTile(16, 16, 4, 4, 2)
        return fresh_pallas.tree_attention(q, Fresh(fresh, fresh, mask), tile=tile)

    def joined(q, fresh, mask, cache, length):
        operands = Prefix(cache, cache, length), Fresh(fresh, fresh, mask)
        tile = PrefixTile((16,), 16, 64, 4, 2)
        return kernels.speculative_attention(q, *operands, prefix_tile=tile)

    try:
        keep_programs(tmp_path)
        jax.clear_caches()
        alone = lowered(joined, q, q, mask, cache, length)
        jax.clear_caches()
        lowered(tree, q, q, mask)
        assert lowered(joined, q, q, mask, cache, length) == alone
        assert ".py" not in alone
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """One entry for each kernel that is lowered apart, as on a Hopper GPU, and kept by nobody."""
    found: list[None] = []
    export = launchers.export.export

    def noted(*operands: Any, **options: Any) -> Any:
        found.append(None)
        return export(*operands, **options)

    monkeypatch.setattr(launchers, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(launchers.export, "export", noted)
    kept = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        yield found
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_kernel_is_lowered_once_for_all_programs(
    devices: int, exports: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two devices each has one of two rows."""
    width = 64 * (2 + devices)  # A device's share would be known if it had the other case's shape.
    x, scale = half((devices, 3, width)), half((width,))
    partials, mesh = half((2, devices, 3, width)), hopper_mesh(data=devices, fsdp=1, tp=1)

    def twice(x, partials, scale):
        total, normed = layer_pallas.residual_norm(x, partials, scale, eps=1e-6)
        return layer_pallas.residual_norm(total, normed[None].repeat(2, 0), scale, eps=1e-6)

    def other(x, partials, scale):
        return layer_pallas.residual_norm(x + 1, partials, scale, eps=1e-6)

    def kernels_of(program) -> set[str]:
        with use_mesh(mesh):
            traced = jax.jit(lambda *operands: program(*operands)).trace(x, partials, scale)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return set(re.findall(r'custom_call @.* ir = "(.*?)"', text))

    found = [kernels_of(program) for program in (twice, other)]
    assert found[0] == found[1] and len(found[0]) == 1 and len(exports) == 1
    monkeypatch.setattr(launchers, "compute_capability", lambda: None)
    assert len(kernels_of(other)) == 1 and len(exports) == 1


def norm() -> tuple:
    options = {"eps": 1e-6}
    return (
        layer_pallas.residual_norm,
        ("eps",),
        options,
        (half((1, 2, 96)), None, half((96,))),
    )


def tree_part() -> tuple:
    """Its results are a class of their own."""
    q, rows = half((1, 8, 4, 64)), half((1, 8, 2, 64))
    fresh = Fresh(rows, rows, truth((1, 8, 8)))
    options = {"tile": TreeTile(16, 16, 4, 4, 2)}
    return fresh_pallas.tree_attention, ("tile", "dtype"), options, (q, fresh)


@pytest.mark.parametrize("launched", [norm, tree_part])
def test_a_kernel_is_kept_for_other_processes(
    launched: Callable[[], tuple],
    exports: list[None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the programs, under all that it follows from; what is damaged is made again."""
    op, static, options, operands = launched()

    def text() -> str:
        """That of a process which has met no kernel yet."""
        launch = launchers.launcher(*static)(op.__wrapped__.__wrapped__)
        return lowered(lambda *operands: launch(*operands, **options), *operands)

    folder = tmp_path / "of programs"
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        first = text()
        [file] = (folder / "kernels").iterdir()
        assert text() == first and len(exports) == 1
        file.write_bytes(file.read_bytes()[:-9])
        assert text() == first and len(exports) == 2
        monkeypatch.setattr(launchers, "_SOURCES", "another version")
        assert text() == first and len(exports) == 3
        assert len([*(folder / "kernels").iterdir()]) == 2
        assert (folder / "kernels").stat().st_mode & 0o777 == 0o700
        (folder / "kernels").chmod(0o777)  # Kernels of others would run here.
        assert text() == first and len(exports) == 4
        assert len([*(folder / "kernels").iterdir()]) == 2
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@each_row("heads", [(32, 8), (28, 4)])
@each_row("tokens", [48, 2048])
@each_row(("width", "dtype"), [(128, "bfloat16"), (256, "bfloat16"), (64, "float32")])
def test_chunks_lower_for_cuda(heads, tokens, width, dtype) -> None:
    operand = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    q, rows = operand((1, tokens, heads[0], width)), operand((1, tokens, heads[1], width))
    cache, length = operand((1, heads[1], 8192, width)), whole((1,))
    sizes = (tokens, *heads, width)
    prefix = tiles.triton_prefix_tile(*sizes, 8192, q.dtype.itemsize, (8, 0))

    def call(q, k, v, length, keys, values):
        operands = Prefix(k, v, length), Fresh(keys, values)
        return kernels.speculative_attention(q, *operands, prefix_tile=prefix)

    assert lowered(call, q, cache, cache, length, rows, rows).count("custom_call @") == 2


@each_row("tokens", [1, 64])
def test_windows_and_caps_lower_for_cuda(tokens: int) -> None:
    """One kernel of few rows, two of more, and a chunk's two."""
    q, rows, ring = half((2, tokens, 16, 128)), half((2, tokens, 8, 128)), (2, 8, 1064, 128)
    numbers = [whole(shape) for shape in ((2,), (2, tokens))]
    mask = truth((2, tokens, tokens))
    tile = tiles.triton_prefix_tile(tokens, 16, 8, 128, 1064, 2, (9, 0))

    def call(q, k, v, length, oldest, keys, values, mask):
        prefix, options = Prefix(k, v, length, oldest=oldest), dict(cap=50.0, prefix_tile=tile)
        return (
            kernels.speculative_attention(q, prefix, Fresh(keys, values, mask), **options),
            kernels.speculative_attention(q, prefix, Fresh(keys, values), **options),
        )

    text = lowered(call, q, half(ring), half(ring), *numbers, rows, rows, mask)
    assert text.count("custom_call @") == (3 if tokens == 1 else 4)


def matmuls_of_one_order() -> list:
    """One call for each distinct kernel that the published models' weights and shares give."""
    found = {}
    for rows in (1, 64, 72, 200):
        for weights in [*PUBLISHED, *SHARES]:
            work = weights.work(rows)
            edges = weights.columns % work.tile.columns, weights.contracted % work.tile.depth
            key = rows, work.tile, work.turns > 1, work.parts, work.head, edges
            found.setdefault(key, (rows, weights))
    return list(found.values())


@pytest.mark.skipif(not mosaic_is_supported(), reason="the kernel needs jax 0.11 or newer")
@each_row(("rows", "weights"), matmuls_of_one_order())
def test_matmuls_of_one_order_lower_for_cuda(rows: int, weights: Weights) -> None:
    x, sizes = half((rows, weights.contracted)), (weights.contracted, weights.columns)
    tile = weights.tile
    if weights.head:
        call, operands = ordered_mosaic.head_matmul, (x, half(sizes[::-1]))
    elif weights.gated:
        call, operands = ordered_mosaic.matmul, (x, half((sizes[0], 2, sizes[1])))
    else:
        bias = () if weights.split else (half(sizes[1:]),)
        call, operands = ordered_mosaic.matmul, (x, half(sizes), *bias)
    text = lowered(functools.partial(call, tile=tile), *operands)
    assert text.count("custom_call @mosaic_gpu") == 1
    # Rows and columns that do not exist are the copy engine's affair.
    assert "stablehlo.pad" not in text


@pytest.mark.skipif(not mosaic_is_supported(), reason="the kernel needs jax 0.11 or newer")
@each_row("rows", [1, 10, 72])
@each_row("case", LARGE)
def test_matmuls_of_quantised_weights_lower_for_cuda(rows: int, case: Case) -> None:
    from longspec_jax.ops.matmul import quantised_mosaic

    dtype = jnp.dtype(case.dtype)
    matrix = jax.eval_shape(case.drawn)
    packed = jax.eval_shape(functools.partial(pack, dtype=dtype), matrix)
    columns = case.outputs[-1] if case.gated else math.prod(case.outputs)
    sizes = case.inputs, columns
    tile = quantised_tile(*sizes, bits=case.bits, gated=case.gated, split=case.split)
    if not case.group:
        tile = dataclasses.replace(tile, depth=256)  # As of a draft.
    call = functools.partial(quantised_mosaic.matmul, tile=tile, gated=case.gated, dtype=dtype)
    operands = (jax.ShapeDtypeStruct((rows, case.inputs), dtype), packed)
    if not (case.gated or case.split):
        operands += (jax.ShapeDtypeStruct((columns,), dtype),)
    text = lowered(call, *operands)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text and "stablehlo.slice" not in text


@pytest.mark.skipif(not mosaic_is_supported(), reason="the kernels need jax 0.11 or newer")
@each_row(
    ("batch", "nodes", "heads", "kv_heads", "width"),
    [
        (1, 1, 32, 32, 128),
        (1, 64, 32, 8, 128),
        (1, 72, 40, 8, 128),
        (8, 48, 28, 4, 128),
        (3, 5, 14, 2, 64),
        (1, 1, 16, 4, 256),
        (1, 64, 16, 4, 256),
        (1, 128, 24, 4, 256),
        (2, 16, 16, 16, 256),
    ],
)
@each_row("stored", ["bfloat16", "uint8"])
def test_path_attention_lowers_for_cuda(stored, batch, nodes, heads, kv_heads, width) -> None:
    cache = jax.ShapeDtypeStruct((batch + 3, kv_heads, 4096, width), jnp.dtype(stored))
    rows = half((batch, nodes, kv_heads, width))
    if stored == "uint8" and width == 256:
        pytest.skip("a cache in 8 bits has narrower heads")

    def call(q, k, v, length, tree_k, tree_v, mask, depth):
        tree, prefix = Fresh(tree_k, tree_v, mask), Prefix(k, v, length, cache_rows=length % 3)
        return path_kernels.path_attention(q, prefix, tree, depth)

    mask = truth((batch, nodes, nodes))
    operands = half((batch, nodes, heads, width)), cache, cache, whole((batch,)), rows, rows
    text = lowered(call, *operands, mask, whole((batch, nodes)))
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.skipif(not mosaic_is_supported(), reason="the kernels need jax 0.11 or newer")
@each_row(
    ("nodes", "heads", "kv_heads", "width", "window", "sinks", "cap", "stored"),
    [
        (64, 64, 8, 64, 128, True, None, "bfloat16"),  # gpt-oss
        (1, 64, 8, 64, 128, True, None, "bfloat16"),
        (64, 8, 4, 256, 512, False, None, "bfloat16"),  # Gemma 3
        (64, 32, 32, 128, 4096, False, None, "bfloat16"),  # OLMo 3
        (16, 8, 4, 256, 4096, False, 50.0, "bfloat16"),  # Gemma 2
        (64, 8, 4, 256, None, False, 50.0, "bfloat16"),
        (64, 32, 8, 128, 4096, False, None, "uint8"),
    ],
)
def test_path_attention_of_bounded_layers_lowers_for_cuda(
    nodes, heads, kv_heads, width, window, sinks, cap, stored
) -> None:
    slots = 8192 if window is None else ring_slots(window, path.SLOTS)
    cache = jax.ShapeDtypeStruct((2, kv_heads, slots, width), jnp.dtype(stored))
    rows, ahead = half((2, nodes, kv_heads, width)), whole((2, nodes))
    of_heads = half((heads,)) if sinks else None

    def call(q, k, v, length, tree, depth, sinks):
        prefix = Prefix(k, v, length)
        return path_kernels.path_attention(q, prefix, tree, depth, sinks, window=window, cap=cap)

    q, tree = half((2, nodes, heads, width)), Fresh(rows, rows, truth((2, nodes, nodes)))
    text = lowered(call, q, cache, cache, whole((2,)), tree, ahead, of_heads)
    assert text.count("custom_call @mosaic_gpu") == 2


@each_row("rows", [1, 16, 64])
@each_row("case", [*LARGE, Case("int8", 1000, (5001,))])
def test_tritons_matmuls_of_quantised_weights_lower_for_cuda(rows: int, case: Case) -> None:
    matrix, dtype = jax.eval_shape(lambda: case.drawn().flat()), jnp.dtype(case.dtype)
    tile = quantised_pallas.triton_tile(rows, matrix, gated=case.gated, split=case.split)
    call = functools.partial(quantised_pallas.matmul, tile=tile, gated=case.gated, dtype=dtype)
    operands = jax.ShapeDtypeStruct((rows, case.inputs), dtype), matrix
    if not (case.gated or case.split):
        operands += (jax.ShapeDtypeStruct((math.prod(case.outputs),), dtype),)
    assert lowered(call, *operands).count("custom_call @") == 1


def offsets(text: str, elements: str) -> set[str]:
    """The types of the offsets of pointers to such elements, in the Triton kernels of a program."""
    found = set()
    for escaped in re.findall(
        r'custom_call @__gpu\$xla.gpu.triton.* ir = "((?:[^"\\]|\\.)*)"', text
    ):
        code = re.sub(r"\\([0-9A-F]{2})", lambda byte: chr(int(byte[1], 16)), escaped)
        code = code.replace('\\"', '"').replace("\\\\", "\\").encode("latin-1")
        with mlir.JaxIrContext() as context:
            context.append_dialect_registry(mlir.upstream_dialects)
            triton_dialect.register_dialect(context)
            context.load_all_available_dialects()
            module = str(ir.Module.parse(code))
        of_elements = rf"tt\.addptr .*!tt\.ptr<{elements}>.*(i\d+)>?$"
        found |= set(re.findall(of_elements, module, re.MULTILINE))
    return found


FAR = 139264
"""Slots of a cache of 4 heads of 256 numbers: 15 rows are 2^31 codes, and 31 are 2^32."""


def far_prefix(rows: int, tokens: int) -> Callable[[], str]:
    """Attention to a cache in 8 bits."""
    cache = codes((rows, 4, FAR, 256))
    tile = tiles.triton_prefix_tile(tokens, 8, 4, 256, FAR, 2, (9, 0))
    length = whole((rows,))

    def call(q, k, v, length):
        return kernels.prefix_attention(q, Prefix(k, v, length), tile=tile)

    return lambda: lowered(call, half((rows, tokens, 8, 256)), cache, cache, length)


def far_append(rows: int) -> Callable[[], str]:
    fresh = codes((rows, 3, 4, 256))
    cache = codes((rows, 4, FAR, 256))
    numbers = (whole(shape) for shape in ((rows, 3), (rows,)))
    return functools.partial(lowered, layer_pallas.append_rows, [cache], [fresh], *numbers)


def far_gather(rows: int) -> Callable[[], str]:
    cache = codes((rows, 4, FAR // 64, 64, 256))
    return functools.partial(lowered, gather_pallas.gather, cache, whole((rows, 4, 2)))


def far_weights(outputs: int) -> Callable[[], str]:
    matrix = QuantisedMatrix(jax.ShapeDtypeStruct((outputs, 4096), jnp.int8), real((outputs, 1)))
    tile = quantised_pallas.triton_tile(16, matrix)
    call = functools.partial(quantised_pallas.matmul, tile=tile, dtype=jnp.bfloat16)
    return lambda: lowered(call, half((16, 4096)), matrix)


def far_mask(keys: int) -> Callable[[], str]:
    """A mask is of one byte an element, too."""
    mask = truth((1, 2048, keys))
    rows = half((1, keys, 1, 64))
    call = functools.partial(fresh_pallas.tree_attention, tile=TreeTile(16, 64, 4, 4, 2))
    return lambda: lowered(
        lambda q, k, v, mask: call(q, Fresh(k, v, mask)), half((1, 2048, 1, 64)), rows, rows, mask
    )


@pytest.mark.parametrize(
    ("near", "between", "far"),
    [
        pytest.param(*(far_prefix(rows, 1) for rows in (15, 21, 31)), id="one launch"),
        pytest.param(*(far_prefix(rows, 64) for rows in (15, 21, 31)), id="prefix"),
        pytest.param(*map(far_append, (15, 21, 31)), id="append"),
        pytest.param(*map(far_gather, (15, 21, 31)), id="gather"),
        pytest.param(*map(far_weights, (2**19, 2**19 + 1, 2**20 + 1)), id="weights"),
        pytest.param(*map(far_mask, (2**20, 2**20 + 64, 2**21 + 64)), id="mask"),
    ],
)
def test_offsets_reach_every_element(
    near: Callable[[], str], between: Callable[[], str], far: Callable[[], str]
) -> None:
    """Of 32 bits up to 2^31 elements, of 64 beyond 2^32 bytes; between these, none is reached."""
    one_byte = "i[18]"
    assert offsets(near(), one_byte) == {"i32"}
    assert "i64" in offsets(far(), one_byte)
    with pytest.raises(NotImplementedError, match=r"up to 2\^31 elements or of more than 2\^32"):
        between()


def test_offsets_of_wider_elements_are_wide_in_time() -> None:
    """Logits: 2^31 of 16 bits are 2^32 bytes."""
    call = functools.partial(continuations_pallas.best_continuations, count=4, block=256)
    for rows, found in ((2**9, "i32"), (2**9 + 1, "i64")):
        scores = half((rows, 16, 2**18))
        text = lowered(call, scores, real((rows, 16)))
        assert offsets(text, "bf16") == {found}


@each_row("width", [128, 256])
def test_a_cache_beyond_offsets_is_for_the_copy_engine_or_xla(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hopper kernel reads it where it takes codes of the heads' width; XLA writes to it."""
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    rows = 21
    cache = codes((rows, 1024 // width, FAR, width))
    fresh = codes((rows, 1, *cache.shape[1::2]))
    length, mask = whole((rows,)), jnp.ones((rows, 1, 1), bool)

    def attend(q, k, v, length, fresh):
        return dispatch.speculative_attention(q, Prefix(k, v, length), Fresh(fresh, fresh, mask))

    q = half((rows, 1, 16, width))
    text = lowered(attend, q, cache, cache, length, half(fresh.shape))
    mosaic = width == 128 and mosaic_is_supported()
    assert text.count("custom_call @mosaic_gpu") == mosaic
    assert text.count("custom_call @__gpu") == mosaic  # The tree's kernel.
    path = whole((rows, 1))
    text = lowered(layer.append_rows, [cache], [fresh], path, length)
    assert "custom_call @__gpu" not in text


WITHOUT_PALLAS_TRITON = """
import sys

sys.modules["jax.experimental.pallas.triton"] = None
import jax, jax.numpy as jnp
from longspec_jax.decoding.batch_invariant import choose_kernels
from longspec_jax.decoding.target import TargetModel
from longspec_jax.ops import hardware
from tests.kit import lowered, random_target, tiny_target_config

hardware.compute_capability = lambda: (9, 0)
sizes = dict(head_width=128, model_width=512, mlp_width=4096, num_layers=1, vocab_size=104)
target = TargetModel(tiny_target_config(dtype="bfloat16", **sizes))
assert choose_kernels(target, None).batch_invariant
tokens = jnp.zeros((1, 64), jnp.int32)
for batch_invariant in (False, True):
    target = TargetModel(target.config, batch_invariant=batch_invariant)
    call = lambda *operands: target.verify(*operands, levels=5).logits
    mask, length = jnp.ones((1, 64, 64), bool), jnp.full((1,), 2000)
    params, cache = random_target(target.config), target.allocate(1, 4096)
    operands = params, cache, tokens, tokens, mask, length
    text = lowered(call, *operands)
    print(text.count("custom_call @mosaic_gpu"), text.count("triton"))
"""


@pytest.mark.multiproc
@pytest.mark.skipif(not mosaic_is_supported(), reason="the kernels need jax 0.11 or newer")
def test_a_hopper_step_lowers_where_pallas_triton_is_gone() -> None:
    command = [sys.executable, "-c", WITHOUT_PALLAS_TRITON]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    # Attention, norms, heads and the cache, and both matmuls of the MLP; or all matmuls.
    assert printed == ["9", "0", "11", "0"], printed
