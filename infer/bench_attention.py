"""How fast attention of tree nodes to a long prefix is, beside the alternatives and the roofs.

Every case is one layer of a decode step: ``tokens`` queries attend to ``context`` cached slots and,
under a random tree mask, to each other. For each case many calls on distinct caches, together
larger than the GPU's second-level cache, run inside one compiled program in which every call waits
for the one before; several executions of the program are queued back to back. The time of a call is
the median over repetitions of that total divided by the number of calls, so that launch overhead
is excluded alike for our kernels and for the alternatives (torch runs in a CUDA graph).

The roof of a case is ``max(bytes / bandwidth, operations / rate)``: bytes are queries, keys, values
and output once each, operations those of the two matrix products. Bandwidth and rate are measured
in the same run.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.ops import attention
from longspec_jax.ops.tiles import (
    MosaicTile,
    PrefixTile,
    TreeTile,
    prefix_tile,
    tree_tile,
)

LAYOUTS = {"ours": "head-major", "cudnn": "token-major", "xla-masked": "token-major"}
"""How each implementation wants the cache; ours is the engine's."""
REPETITIONS = 5
QUEUED_SECONDS = 0.02
"""Least work in the queue per repetition, so that the last synchronisation does not count."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem of the decode step."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    batch: int
    dtype: str = "bfloat16"

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values in the prefix."""
        slots = self.batch * self.kv_heads * self.context
        return 2 * slots * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """The fewest bytes any implementation moves: each operand once."""
        itemsize = jnp.dtype(self.dtype).itemsize
        rows = self.batch * self.tokens * self.head_dim * itemsize
        return self.cache_bytes + rows * 2 * (self.heads + self.kv_heads)

    @property
    def operations(self) -> int:
        """Operations of the two products over the prefix and the whole tree square."""
        keys = self.context + self.tokens
        return 4 * self.batch * self.tokens * self.heads * keys * self.head_dim

    @property
    def copies(self) -> int:
        """Distinct caches in rotation: more than any second-level cache, or as memory allows."""
        return max(2, min(32, math.ceil(2**30 / self.cache_bytes)))

    @property
    def calls(self) -> int:
        """Calls in one program, which goes round the caches; enough to hide its launch."""
        return self.copies * math.ceil(8 / self.copies)


@dataclasses.dataclass(frozen=True)
class Roof:
    """What the device does at best, measured in this run."""

    bytes_per_s: float
    operations_per_s: float

    def seconds(self, case: Case) -> float:
        """The least time of a case."""
        return max(case.bytes / self.bytes_per_s, case.operations / self.operations_per_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench attention``."""
    integers = functools.partial(_split, int)
    parser.add_argument("--tokens", type=integers, default=[1, 16, 48, 69, 128])
    parser.add_argument(
        "--heads", type=functools.partial(_split, str), default=["32/32", "32/8", "40/8"]
    )
    parser.add_argument("--contexts", type=integers, default=[4096, 16384, 32768, 131072])
    parser.add_argument("--batches", type=integers, default=[1, 8])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--implementations",
        type=functools.partial(_split, str),
        default=["ours", "cudnn", "xla-masked", "torch-sdpa", "torch-flex"],
    )
    parser.add_argument("--tiles", action="store_true", help="sweep our tiles instead")
    parser.add_argument("--json", type=Path, help="write header and rows to this file")
    parser.add_argument("--chart", type=Path, help="draw the rows into this PNG")


def main(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write what was asked for."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    cases = [
        Case(
            tokens=tokens,
            heads=int(heads.partition("/")[0]),
            kv_heads=int(heads.partition("/")[2]),
            head_dim=arguments.head_dim,
            context=context,
            batch=batch,
            dtype=arguments.dtype,
        )
        for batch in arguments.batches
        for context in arguments.contexts
        for heads in arguments.heads
        for tokens in arguments.tokens
    ]
    roof = measure_roof()
    report = header(roof)
    print(json.dumps(report))
    measure = (
        sweep_tiles
        if arguments.tiles
        else functools.partial(compare, implementations=arguments.implementations)
    )
    rows = []
    for row in measure(cases, roof):
        rows.append(row)
        print(_line(row), flush=True)
        if arguments.json:  # After every row: a run that is cut short keeps what it measured.
            arguments.json.write_text(json.dumps({"header": report, "rows": rows}, indent=1))
    if arguments.chart:
        draw(rows, arguments.chart)


def header(roof: Roof) -> dict[str, Any]:
    """Where, with what and when the rows were measured."""
    versions = {}
    for package in ("jax", "jaxlib", "jax-triton", "torch", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "device": jax.devices()[0].device_kind,
        "versions": versions,
        "commit": os.environ.get("LONGSPEC_COMMIT") or commit or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "roof_tb_per_s": roof.bytes_per_s / 1e12,
        "roof_tflop_per_s": roof.operations_per_s / 1e12,
        "method": " ".join((__doc__ or "").split("\n\n", 1)[1].split()),
    }


def measure_roof() -> Roof:
    """Read-only bandwidth over 4 GB and the rate of a large bfloat16 product, on random data."""
    small = jax.default_backend() != "gpu"
    elements, side = (2**20, 256) if small else (2**30, 8192)
    values = jax.random.normal(jax.random.key(0), (elements,), jnp.float32)
    total = jax.jit(jnp.sum)
    read = _seconds(lambda: total(values))
    a, b = jax.random.normal(jax.random.key(1), (2, side, side), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    multiply = _seconds(lambda: product(a, b))
    return Roof(4 * elements / read, 2 * side**3 / multiply)


def compare(
    cases: Sequence[Case], roof: Roof, implementations: Sequence[str]
) -> Iterable[dict[str, Any]]:
    """Time every implementation on every case; one that cannot run yields the reason."""
    builders = {"ours": _ours, "cudnn": _cudnn, "xla-masked": _xla_masked}
    for _, group in itertools.groupby(cases, key=lambda case: (case.batch, case.context)):
        group = list(group)
        work = [(name, case) for name in implementations for case in group]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            programs = list(
                pool.map(
                    lambda item: (
                        _compile(item[1], builders[item[0]], LAYOUTS[item[0]])
                        if item[0] in builders
                        else None
                    ),
                    work,
                )
            )
        for (name, case), program in zip(work, programs, strict=True):
            try:
                if isinstance(program, str):
                    raise RuntimeError(program)
                if program is None:
                    seconds = time_torch(case, name.removeprefix("torch-"))
                else:
                    operands = _operands(case, LAYOUTS[name])
                    seconds = _seconds(functools.partial(program, *operands)) / case.calls
            except Exception as error:  # An alternative that fails is a result, too.
                reason = (str(error).splitlines() or [""])[0][:160]
                yield _row(name, case, roof, None, refusal=f"{type(error).__name__}: {reason}")
            else:
                yield _row(name, case, roof, seconds)


def sweep_tiles(cases: Sequence[Case], roof: Roof) -> Iterable[dict[str, Any]]:
    """Time our kernels over candidate tiles, fastest last within each case."""
    for case in cases:
        operands = _operands(case)
        candidates = list(candidate_tiles(case))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            programs = list(pool.map(functools.partial(_compile_tile, case), candidates))
        rows = []
        for (prefix, tree), program in zip(candidates, programs, strict=True):
            tiles = {
                "prefix_tile": dataclasses.asdict(prefix),
                "tree_tile": dataclasses.asdict(tree),
            }
            if isinstance(program, str):
                rows.append(_row("ours", case, roof, None, refusal=program, **tiles))
                continue
            seconds = _seconds(functools.partial(program, *operands)) / case.calls
            rows.append(_row("ours", case, roof, seconds, **tiles))
        yield from sorted(rows, key=lambda row: -(row["microseconds"] or math.inf))


def candidate_tiles(case: Case) -> Iterable[tuple[PrefixTile | MosaicTile, TreeTile]]:
    """Tiles worth trying: the heuristic's, then one departure at a time or two."""
    sizes = (case.tokens, case.heads, case.kv_heads, case.head_dim)
    prefix = prefix_tile(*sizes, case.context, 2, (9, 0))
    tree = tree_tile(*sizes, case.tokens, 2)
    yield prefix, tree
    packed = case.tokens * case.heads // case.kv_heads
    if packed <= 16:
        shapes = [((16,), s, w, d) for s in (32, 64, 128) for w in (1, 2, 4) for d in (2, 3, 4, 5)]
        counts = (16, 32, 64)
    elif packed <= 64:
        shapes = [
            (rows, s, 4, d)
            for rows in ((16,), (32,), (64,))
            for s in (32, 64, 128)
            for d in (2, 3, 4)
        ]
        counts = (8, 16, 32, 64)
    elif packed <= 80:
        shapes = [((64, 16), s, w, d) for s in (32, 64, 128) for w in (4, 8) for d in (2, 3, 4)]
        shapes += [((128,), s, 8, d) for s in (64, 128) for d in (2, 3)]
        counts = (4, 8, 12, 16, 32)
    else:
        shapes = [
            (rows, s, 8, d)
            for rows in ((128,), (128, 16), (128, 32), (128, 64))
            for s in (32, 64, 128)
            for d in (2, 3, 4)
        ]
        shapes += [(rows, 64, 4, d) for rows in ((64,), (64, 16)) for d in (2, 3)]
        counts = (4, 8, 16, 32)
    for rows, slots, warps, stages in shapes:
        for count in counts:
            split = max(slots, math.ceil(case.context / count / slots) * slots)
            candidate = PrefixTile(rows, slots, split, warps, stages)
            if candidate != prefix:
                yield candidate, tree
    if packed > 16:
        rings = [(1, 64, d) for d in (3, 4, 6)] + [(1, 128, d) for d in (2, 3)]
        rings += [(2, 64, d) for d in (3, 4, 5)] + [(2, 128, 2), (3, 64, 3), (3, 64, 4)]
        for warpgroups, slots, stages in rings:
            for count in (4, 8, 11, 16):
                split = max(slots, math.ceil(case.context / count / slots) * slots)
                yield MosaicTile(warpgroups, slots, split, stages), tree
    for keys in (32, 64, 128):
        for partials in (1, 2, 4, 8):
            for warps in (2, 4, 8):
                candidate = TreeTile(16, keys, partials, warps, 2)
                if candidate != tree:
                    yield prefix, candidate


def time_torch(case: Case, kind: str) -> float:
    """Median seconds of one call of torch's attention, replayed from a CUDA graph."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    keys = case.context + case.tokens

    def normal(*sizes: int) -> Any:
        return torch.randn(sizes, device="cuda", dtype=dtype)

    q = normal(case.batch, case.heads, case.tokens, case.head_dim)
    caches = [normal(2, case.batch, case.kv_heads, keys, case.head_dim) for _ in range(case.copies)]
    tree = torch.from_numpy(np.asarray(_tree_mask(case.tokens))).cuda()
    grouped = case.heads != case.kv_heads
    if kind == "sdpa":
        prefix = torch.ones(case.tokens, case.context, dtype=torch.bool, device="cuda")
        mask = torch.cat([prefix, tree], 1)

        def call(q: Any, cache: Any) -> Any:
            return scaled_dot_product_attention(
                q, cache[0], cache[1], attn_mask=mask, enable_gqa=grouped
            )
    else:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def visible(b: Any, h: Any, query: Any, key: Any) -> Any:
            inside = torch.clamp(key - case.context, min=0)
            return (key < case.context) | tree[query, inside]

        blocks = create_block_mask(visible, None, None, case.tokens, keys, device="cuda")
        flex = torch.compile(flex_attention, dynamic=False)

        def call(q: Any, cache: Any) -> Any:
            return flex(q, cache[0], cache[1], block_mask=blocks, enable_gqa=grouped)

    def chain() -> Any:
        out = q
        for _ in range(case.calls // case.copies):
            for cache in caches:
                out = call(out, cache)
        return out

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        chain()
        chain()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    seconds = _median(graph.replay, lambda _: torch.cuda.synchronize())
    del graph, caches
    torch.cuda.empty_cache()
    return seconds / case.calls


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw time over roof of every implementation, one panel a context, batch 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["microseconds"] and row["batch"] == 1]
    contexts = sorted({row["context"] for row in rows})
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    shapes = sorted({(row["heads"], row["kv_heads"], row["tokens"]) for row in rows})
    figure, axes = pyplot.subplots(
        len(contexts), 1, figsize=(11, 2.6 * len(contexts) + 0.6), squeeze=False, sharex=True
    )
    for axis, context in zip(axes[:, 0], contexts, strict=True):
        for place, name in enumerate(names):
            found = {
                (row["heads"], row["kv_heads"], row["tokens"]): row["microseconds"]
                for row in rows
                if row["context"] == context and row["implementation"] == name
            }
            x = [
                index + (place - (len(names) - 1) / 2) * 0.8 / len(names)
                for index in range(len(shapes))
            ]
            heights = [found.get(shape, 0) for shape in shapes]
            axis.bar(x, heights, 0.8 / len(names), label=name)
        roofs = {
            (row["heads"], row["kv_heads"], row["tokens"]): row["microseconds"]
            * row["percent_of_roof"]
            / 100
            for row in rows
            if row["context"] == context
        }
        for index, shape in enumerate(shapes):
            if shape in roofs:
                axis.hlines(roofs[shape], index - 0.45, index + 0.45, color="black", lw=1.2)
        axis.set_yscale("log")
        axis.set_ylabel("µs")
        axis.set_title(f"{context} cached tokens (black: roof)", fontsize=9)
    axes[-1, 0].set_xticks(
        range(len(shapes)), [f"{n}/{k}\nT={t}" for n, k, t in shapes], fontsize=8
    )
    axes[0, 0].legend(ncols=len(names), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _ours(case: Case) -> Callable[..., jax.Array]:
    length = jnp.full((case.batch,), case.context, jnp.int32)

    def call(q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
        return attention.speculative_attention(q, k, v, length, tree_k, tree_v, mask)

    return call


def _cudnn(case: Case) -> Callable[..., jax.Array]:
    """CuDNN over the prefix alone: less work than ours, since it takes no mask at this speed."""

    def call(q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    return call


def _xla_masked(case: Case) -> Callable[..., jax.Array]:
    """XLA with materialised scores over the prefix and the first nodes' worth of it, masked.

    The tree part is played by the last ``tokens`` slots, so that nothing is concatenated.
    """

    def call(q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
        seen = jnp.ones((case.batch, case.tokens, case.context - case.tokens), bool)
        whole = jnp.concatenate([seen, mask], axis=2)[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=whole, implementation="xla")

    return call


def _chain(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Call once per cache, each call's output being the next one's queries."""
    inner = jax.jit(call)

    def program(q: Any, caches: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
        for _ in range(math.ceil(8 / len(caches))):
            for k, v in caches:
                q = inner(q, k, v, tree_k, tree_v, mask)
        return q

    return program


def _compile_tile(case: Case, tiles: tuple[PrefixTile | MosaicTile, TreeTile]) -> Any:
    """The compiled program of one pair of tiles, or why there is none."""
    from longspec_jax.ops import tree_pallas

    def build(case: Case) -> Callable[..., jax.Array]:
        length = jnp.full((case.batch,), case.context, jnp.int32)

        def call(q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
            return tree_pallas.speculative_attention(
                q, k, v, length, tree_k, tree_v, mask, prefix=tiles[0], tree=tiles[1]
            )

        return call

    return _compile(case, build, "head-major")


def _compile(case: Case, build: Callable[[Case], Callable[..., jax.Array]], layout: str) -> Any:
    """The compiled program of a case, or why there is none; allocates nothing."""
    try:
        return jax.jit(_chain(build(case))).lower(*_abstract_operands(case, layout)).compile()
    except Exception as error:  # A call that does not compile is a result, too.
        return (str(error).splitlines() or [type(error).__name__])[0][:160]


def _abstract_operands(case: Case, layout: str) -> tuple[Any, ...]:
    """The shapes of :func:`_operands`."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(case.dtype))
    cache = shape((case.batch, *_cache_sizes(case, layout), case.head_dim))
    rows = (case.batch, case.tokens)
    tree = shape((*rows, case.kv_heads, case.head_dim))
    mask = jax.ShapeDtypeStruct((*rows, case.tokens), jnp.bool_)
    q = shape((*rows, case.heads, case.head_dim))
    return q, [(cache, cache)] * case.copies, tree, tree, mask


def _cache_sizes(case: Case, layout: str) -> tuple[int, int]:
    """The two middle axes of a cache."""
    sizes = (case.kv_heads, case.context)
    return sizes if layout == "head-major" else sizes[::-1]


@functools.lru_cache(maxsize=1)
def _caches(shape: tuple[int, ...], dtype: str, copies: int) -> list[tuple[jax.Array, jax.Array]]:
    """Random caches; kept for the next case, which often has the same shape."""
    draw_one = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(dtype)))
    keys = jax.random.split(jax.random.key(2), 2 * copies)
    return [(draw_one(keys[2 * i]), draw_one(keys[2 * i + 1])) for i in range(copies)]


def _operands(case: Case, layout: str = "head-major") -> tuple[Any, ...]:
    """Random queries, distinct caches, tree keys and values, and a tree mask."""
    sizes = _cache_sizes(case, layout)
    if _caches.cache_info().currsize and _LAST.get("shape") != (case.batch, *sizes):
        _caches.cache_clear()
    _LAST["shape"] = (case.batch, *sizes)
    caches = _caches((case.batch, *sizes, case.head_dim), case.dtype, case.copies)
    keys = jax.random.split(jax.random.key(3), 3)
    rows = (case.batch, case.tokens)
    dtype = jnp.dtype(case.dtype)
    q = jax.random.normal(keys[0], (*rows, case.heads, case.head_dim), dtype)
    tree_k = jax.random.normal(keys[1], (*rows, case.kv_heads, case.head_dim), dtype)
    tree_v = jax.random.normal(keys[2], (*rows, case.kv_heads, case.head_dim), dtype)
    mask = jnp.asarray(np.broadcast_to(_tree_mask(case.tokens), (*rows, case.tokens)))
    return q, caches, tree_k, tree_v, mask


_LAST: dict[str, Any] = {}
"""The layout of the caches in memory, which are dropped before others are drawn."""


def _tree_mask(tokens: int) -> np.ndarray:
    """Ancestors of a random tree, each node included."""
    rng = np.random.default_rng(0)
    mask = np.eye(tokens, dtype=bool)
    for node in range(1, tokens):
        mask[node] |= mask[rng.integers(max(0, node - 16), node)]
    return mask


def _seconds(call: Callable[[], Any]) -> float:
    """Median seconds of a compiled jax program."""
    return _median(call, jax.block_until_ready)


def _median(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Median seconds of a call, over repetitions of many executions queued back to back."""
    wait(call())
    begin = time.perf_counter()
    wait(call())
    queued = max(2, math.ceil(QUEUED_SECONDS / (time.perf_counter() - begin)))
    seconds = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        for _ in range(queued):
            result = call()
        wait(result)
        seconds.append((time.perf_counter() - begin) / queued)
    return statistics.median(seconds)


def _row(name: str, case: Case, roof: Roof, seconds: float | None, **more: Any) -> dict[str, Any]:
    row = {"implementation": name, **dataclasses.asdict(case), "microseconds": None, **more}
    if seconds is not None:
        row |= {
            "microseconds": round(seconds * 1e6, 2),
            "tb_per_s": round(case.bytes / seconds / 1e12, 3),
            "tflop_per_s": round(case.operations / seconds / 1e12, 1),
            "percent_of_roof": round(100 * roof.seconds(case) / seconds, 1),
        }
    return row


def _line(row: dict[str, Any]) -> str:
    shape = (
        f"{row['implementation']:11s} B={row['batch']} S={row['context']:6d} "
        f"{row['heads']}/{row['kv_heads']} T={row['tokens']:3d}"
    )
    if row["microseconds"] is None:
        return f"{shape}  -  {row['refusal']}"
    tiles = ""
    if "prefix_tile" in row:
        prefix, tree = row["prefix_tile"].values(), row["tree_tile"].values()
        tiles = "  " + " ".join(map(str, prefix)) + " | " + " ".join(map(str, tree))
    return (
        f"{shape} {row['microseconds']:9.1f} us {row['tb_per_s']:6.2f} TB/s "
        f"{row['tflop_per_s']:6.1f} TFLOP/s {row['percent_of_roof']:5.1f} %{tiles}"
    )


def _split(convert: Callable[[str], Any], text: str) -> list[Any]:
    return [convert(part) for part in text.split(",")]
