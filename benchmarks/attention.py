"""How fast attention of tree nodes to a long prefix is, next to the alternatives and the rooflines.

Every case is one layer of a decode step: ``tokens`` queries attend to ``context`` cached slots and,
under a random tree mask, to each other. For each case many calls on distinct caches, together
larger than the GPU's second-level cache, run inside one compiled program in which every call waits
for the one before; several executions of the program are queued back to back. The time of a call is
the median over repetitions of that total divided by the number of calls, so that launch overhead
is excluded alike for our kernels and for the alternatives.

The roofline of a case is ``max(bytes / bandwidth, operations / rate)``: bytes are queries, keys,
values and output once each, operations those of the two matmuls. Bandwidth and rate are measured in
the same run.

A candidate that cannot be built or compiled gives the reason instead of a time.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.cli import counted, settled
from longspec_jax.ops.attention import dispatch
from longspec_jax.ops.attention.operands import Fresh, Prefix

from .models import check_memory
from .report import Report, Row, refusal, run_header
from .timing import Roofline, jax_seconds, measure_roofline

SHOWN = (
    "implementation batch context heads kv_heads tokens microseconds tb_per_s tflop_per_s "
    "percent_of_roof refusal"
).split()
HEAD_WIDTH = 128
HEAD_MAJOR, TOKEN_MAJOR = "head-major", "token-major"
"""The two layouts of a cache: ``[B, K, S, H]``, the engine's, and ``[B, S, K, H]``."""


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
    def turns(self) -> int:
        """Times a program goes round the caches; enough calls to hide its launch."""
        return math.ceil(8 / self.copies)

    @property
    def calls(self) -> int:
        """Calls in one program."""
        return self.copies * self.turns

    def cache_shape(self, layout: str) -> tuple[int, ...]:
        """Shape of the keys, or the values, of one cache."""
        sizes = (self.kv_heads, self.context)
        return (self.batch, *(sizes if layout == HEAD_MAJOR else sizes[::-1]), self.head_dim)

    def row(self, implementation: str, roofline: Roofline, outcome: float | str) -> Row:
        """The result of one implementation: the seconds of a call, or why there are none."""
        row: Row = {"implementation": implementation, **dataclasses.asdict(self)}
        if isinstance(outcome, str):
            return row | {"microseconds": None, "refusal": outcome}
        roof = roofline.seconds(self.bytes, self.operations)
        return row | {
            "microseconds": round(outcome * 1e6, 2),
            "tb_per_s": round(self.bytes / outcome / 1e12, 3),
            "tflop_per_s": round(self.operations / outcome / 1e12, 1),
            "percent_of_roof": round(100 * roof / outcome, 1),
        }


def operands_of(case: Case, layout: str) -> tuple[Any, ...]:
    """``(q, caches, tree_k, tree_v, mask)``: queries, distinct caches, tree rows, tree mask."""
    keys = jax.random.split(jax.random.key(3), 3)
    rows, dtype = (case.batch, case.tokens), jnp.dtype(case.dtype)
    q = jax.random.normal(keys[0], (*rows, case.heads, case.head_dim), dtype)
    tree_k = jax.random.normal(keys[1], (*rows, case.kv_heads, case.head_dim), dtype)
    tree_v = jax.random.normal(keys[2], (*rows, case.kv_heads, case.head_dim), dtype)
    mask = jnp.asarray(np.broadcast_to(tree_mask(case.tokens), (*rows, case.tokens)))
    caches = caches_of(case.cache_shape(layout), case.dtype, case.copies)
    return q, caches, tree_k, tree_v, mask


def caches_of(shape: tuple[int, ...], dtype: str, copies: int) -> list[tuple[jax.Array, jax.Array]]:
    """Distinct random caches of keys and values."""
    fill = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(dtype)))
    keys = jax.random.split(jax.random.key(2), (copies, 2))
    return [(fill(key[0]), fill(key[1])) for key in keys]


def tree_mask(tokens: int) -> np.ndarray:
    """``[T, T]`` ancestors of a random tree's nodes, each node included."""
    rng = np.random.default_rng(0)
    mask = np.eye(tokens, dtype=bool)
    for node in range(1, tokens):
        mask[node] |= mask[rng.integers(max(0, node - 16), node)]
    return mask


Call = Callable[..., jax.Array]
"""``(q, k, v, tree_k, tree_v, mask) -> out``, all in the shapes of a case."""


def _ours(
    implementation: str | None, q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any
) -> jax.Array:
    """The project's op, by its automatic choice if no implementation is named."""
    length = jnp.full((k.shape[0],), k.shape[2], jnp.int32)
    prefix, fresh = Prefix(k, v, length), Fresh(tree_k, tree_v, mask)
    return dispatch.speculative_attention(q, prefix, fresh, implementation=implementation)


def _cudnn(q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
    """CuDNN over only the prefix: less work than ours, since it takes no mask at this speed."""
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def _xla_masked(q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
    """XLA with materialised scores over the prefix, masked.

    The tree part is played by the last slots, so that nothing is concatenated.
    """
    batch, tokens = q.shape[:2]
    seen = jnp.ones((batch, tokens, k.shape[1] - tokens), bool)
    whole = jnp.concatenate([seen, mask], axis=2)[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=whole, implementation="xla")


CANDIDATES: dict[str, tuple[Call, str]] = {
    "ours": (functools.partial(_ours, None), HEAD_MAJOR),
    **{
        name: (functools.partial(_ours, name), HEAD_MAJOR)
        for name in ("pallas", "mosaic", "triton", "xla")
    },
    "cudnn": (_cudnn, TOKEN_MAJOR),
    "xla-masked": (_xla_masked, TOKEN_MAJOR),
}
"""Implementations, and the layout of their cache. ``ours`` is the automatic choice; the four names
after it are the dispatch's."""


def compiled(name: str, case: Case) -> Any:
    """The compiled program of a candidate and a case, or why there is none; allocates nothing."""
    call, layout = CANDIDATES[name]
    try:
        program = jax.jit(_chain(case, call))
        abstract = jax.eval_shape(lambda: operands_of(case, layout))
        return program.lower(*abstract).compile()
    except Exception as error:  # A call that does not compile is a result, too.
        return refusal(error)


def _chain(case: Case, call: Call) -> Callable[..., jax.Array]:
    """Call once per cache and turn, each call's output being the next one's queries."""
    inner = jax.jit(call)

    def program(q: Any, caches: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
        for _ in range(case.turns):
            for k, v in caches:
                q = inner(q, k, v, tree_k, tree_v, mask)
        return q

    return program


def main(arguments: argparse.Namespace) -> None:
    """Measure, print a table, and write the files."""
    arguments = settled(arguments, jax.default_backend() == "cpu")
    cases = [
        Case(
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=HEAD_WIDTH,
            context=context,
            batch=batch,
            dtype=arguments.dtype,
        )
        for batch in arguments.batch
        for context in arguments.context
        for heads, kv_heads in arguments.heads
        for tokens in arguments.tokens
    ]
    for case in cases:
        words = f"{case.copies} caches of {case.context} tokens in {counted(case.batch, 'row')}"
        check_memory(words, case.copies * case.cache_bytes)
    roofline = measure_roofline()
    method = (__doc__ or "").split("\n\n", 1)[1]
    header = run_header(jax.devices()[0].device_kind, method, **roofline.fields)
    with Report(header, arguments.json, SHOWN) as report:
        for row in compare(cases, roofline, arguments.implementation):
            report.add(row)


def compare(
    cases: Sequence[Case], roofline: Roofline, implementations: Sequence[str]
) -> Iterable[Row]:
    """Time every implementation on every case; one that cannot run yields the reason.

    Cases of one batch and context are compiled together, on all cores, before one is timed:
    compilation next to a measurement would disturb it.
    """
    for (batch, context), group in itertools.groupby(
        cases, lambda case: (case.batch, case.context)
    ):
        work = list(itertools.product(implementations, group))
        # A kernel that does not come back is then the one after the last line printed.
        print(f"batch {batch}, {context} cached tokens: compiling {len(work)} programs", flush=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            programs = [*pool.map(lambda each: compiled(*each), work)]
        for (name, case), program in zip(work, programs, strict=True):
            yield case.row(name, roofline, seconds(name, case, program))


def seconds(name: str, case: Case, program: Any) -> float | str:
    """Seconds of one call of a compiled program, or why there are none."""
    if isinstance(program, str):
        return program
    try:
        arrays = operands_of(case, CANDIDATES[name][1])
        return jax_seconds(lambda: program(*arrays)) / case.calls
    except Exception as error:  # An alternative that fails is a result, too.
        return refusal(error)
