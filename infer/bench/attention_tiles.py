"""Sweeps over the tiles of our attention kernels; ``ops.attention.tiles`` is chosen from them."""

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from longspec_jax.ops.attention.tiles import (
    MosaicTile,
    PrefixTile,
    TreeTile,
    prefix_tile,
    tree_tile,
)

from .attention_candidates import Refusal, compiled, ours_with
from .attention_cases import HEAD_MAJOR, Case, Operands
from .timing import Roof, jax_seconds

Tiles = tuple[PrefixTile | MosaicTile, TreeTile]


def sweep(cases: Sequence[Case], roof: Roof) -> Iterable[dict[str, Any]]:
    """Time our kernels over candidate tiles, fastest last within each case."""
    operands = Operands()
    for case in cases:
        tiles = list(candidate_tiles(case))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            programs = list(
                pool.map(lambda pair, case=case: compiled(case, ours_with(*pair)), tiles)
            )
        rows = []
        for (prefix, tree), program in zip(tiles, programs, strict=True):
            row = functools.partial(
                case.row,
                "ours",
                roof,
                prefix_tile=dataclasses.asdict(prefix),
                tree_tile=dataclasses.asdict(tree),
            )
            if isinstance(program, Refusal):
                rows.append(row(None, refusal=program.reason))
                continue
            arrays = operands.of(case, HEAD_MAJOR)
            rows.append(row(jax_seconds(functools.partial(program, *arrays)) / case.calls))
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
        counts = (4, 8, 16, 32)
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
        rings += [(2, 64, d) for d in (3, 4, 5)] + [(2, 128, d) for d in (2, 3)]
        rings += [(3, 64, d) for d in (3, 4)]
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
