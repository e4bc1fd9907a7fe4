"""Prefix attention on Hopper GPUs: FlashDecoding as a Pallas kernel for Mosaic GPU.

With grouped heads a tree of some 70 nodes makes the prefix compute-bound: 276 packed rows read each
key and value. This kernel keeps the tensor cores busy as FlashAttention-3 does: one warpgroup
fetches keys and values with the copy engine while the others, 64 packed rows each, take turns, one
in its softmax while the other multiplies. Partial results have the layout of the Triton kernel's,
with the rows padded to whole warpgroups.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries
from longspec_jax.ops import hardware
from longspec_jax.ops.attention.online_softmax import LOG2_E
from longspec_jax.ops.attention.packing import refuse_unsupported
from longspec_jax.ops.attention.tiles import MosaicTile
from longspec_jax.ops.hardware import WARPGROUP_ROWS

_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def split_attention(
    q: Queries,
    k: CacheSlots,
    v: CacheSlots,
    length: Lengths,
    *,
    scale: float | None = None,
    tile: MosaicTile,
) -> tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]]:
    """Partial results of every split, unmerged, each with its natural log-sum-exp."""
    batch, tokens, heads, width = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    refuse_unsupported(q, kv_heads)
    _refuse_unsupported(width, slots, q.dtype, tile)
    groups = heads // kv_heads
    packed = tokens * groups
    padded = pl.cdiv(packed, WARPGROUP_ROWS) * WARPGROUP_ROWS
    rows = q.reshape(batch, tokens, kv_heads, groups, width).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, kv_heads, packed, width)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padded - packed), (0, 0)))
    splits = pl.cdiv(slots, tile.split)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    groups_of_rows = tile.warpgroups
    row_tiles = pl.cdiv(padded // WARPGROUP_ROWS, groups_of_rows)
    items = row_tiles * splits * kv_heads * batch

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, q.dtype, transforms=swizzled)

    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            tile=tile,
            items=items,
            row_tiles=row_tiles,
            padded=padded,
            splits=splits,
            kv_heads=kv_heads,
            slots=slots,
            scale=(width**-0.5 if scale is None else scale) * LOG2_E,
        ),
        out_type=(
            jax.ShapeDtypeStruct((batch, splits, kv_heads, padded, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, splits, kv_heads, padded), jnp.float32),
        ),
        scratch_types=dict(
            q_smem=shared(groups_of_rows, WARPGROUP_ROWS, width),
            k_smem=shared(tile.stages, tile.slots, width),
            v_smem=shared(tile.stages, tile.slots, width),
            lse_smem=plgpu.SMEM((groups_of_rows, WARPGROUP_ROWS), jnp.float32),
            q_ready=plgpu.Barrier(num_barriers=groups_of_rows),
            k_ready=plgpu.Barrier(num_barriers=tile.stages),
            v_ready=plgpu.Barrier(num_barriers=tile.stages),
            k_free=plgpu.Barrier(num_arrivals=groups_of_rows, num_barriers=tile.stages),
            v_free=plgpu.Barrier(num_arrivals=groups_of_rows, num_barriers=tile.stages),
            turn=plgpu.Barrier(num_arrivals=groups_of_rows),
            clean=plgpu.Barrier(num_arrivals=groups_of_rows),
        ),
        grid=(min(tile.programs, items),),
        grid_names=("program",),
        num_threads=groups_of_rows + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(length.astype(jnp.int32), rows, k, v)


def _refuse_unsupported(width: int, slots: int, dtype: Any, tile: MosaicTile) -> None:
    """Raise for what this kernel cannot do; the sentence names the value and the rule."""
    if not hardware.mosaic_is_supported():
        raise NotImplementedError(
            f"the Mosaic GPU kernel needs jax 0.11 or newer and this is {jax.__version__}"
        )
    if width not in (64, 128):
        raise NotImplementedError(f"head width {width} is neither 64 nor 128")
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"{dtype} is neither bfloat16 nor float16")
    if slots < tile.slots or slots % 8:
        raise NotImplementedError(
            f"capacity {slots} is not a multiple of 8 of at least one step of {tile.slots} slots"
        )


def _kernel(
    length_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    q_smem: Any,
    k_smem: Any,
    v_smem: Any,
    lse_smem: Any,
    q_ready: Any,
    k_ready: Any,
    v_ready: Any,
    k_free: Any,
    v_free: Any,
    turn: Any,
    clean: Any,
    tile: MosaicTile,
    items: int,
    row_tiles: int,
    padded: int,
    splits: int,
    kv_heads: int,
    slots: int,
    scale: float,
) -> None:
    """A program that stays: a warpgroup that fetches, and some that attend, item after item.

    An item is one row tile of one key/value head against one split. While the last rows of an
    item are written the keys of the next are already on their way. Items that share a split are
    neighbours, so that its keys and values come from memory once; the rotation by one per round
    gives every program its share of the last, lighter row tile.
    """
    program = jax.lax.axis_index("program")
    programs = min(tile.programs, items)
    warpgroup = jax.lax.axis_index("warpgroup")
    width = k_ref.shape[3]
    alternate = tile.warpgroups == 2

    def each_item(visit: Any) -> None:
        """Call ``visit(item)`` for every item of this program that holds a slot its row sees."""

        def step(turn_number: jax.Array, past: jax.Array) -> jax.Array:
            index = turn_number * programs + jax.lax.rem(program + turn_number, programs)
            rest = jax.lax.div(index, row_tiles)
            head = jax.lax.div(rest, splits)
            batch = jnp.minimum(jax.lax.div(head, kv_heads), length_ref.shape[0] - 1)
            split = jax.lax.rem(rest, splits)
            lower = split * tile.split
            upper = jnp.minimum(jnp.minimum(length_ref[batch], slots), lower + tile.split)
            seen = jnp.where(index < items, jnp.maximum(upper - lower, 0), 0)
            item = _Item(
                batch=batch,
                kv_head=jax.lax.rem(head, kv_heads),
                split=split,
                row=jax.lax.rem(index, row_tiles) * (tile.warpgroups * WARPGROUP_ROWS),
                lower=lower,
                seen=seen,
                whole=jax.lax.div(seen, tile.slots),
                steps=jax.lax.div(seen + (tile.slots - 1), tile.slots),
                past=past,
            )
            pl.when(seen > 0)(lambda: visit(item))
            return past + item.steps

        jax.lax.fori_loop(0, pl.cdiv(items, programs), step, jnp.int32(0))

    def ring(item: _Item, step: jax.Array | int) -> jax.Array:
        """The stage of an item's step: the ring goes on from item to item."""
        return jax.lax.rem(item.past + step, tile.stages)

    def take_turn() -> None:
        if alternate:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    def attend(item: _Item) -> None:
        first_row = item.row + warpgroup * WARPGROUP_ROWS
        queries = q_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(
            q_ref.at[item.batch, item.kv_head, pl.ds(first_row, WARPGROUP_ROWS)],
            queries,
            q_ready.at[warpgroup],
        )
        plgpu.barrier_wait(q_ready.at[warpgroup])
        column = plgpu.Layout.WGMMA.reduce(1)
        top = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), column)
        total = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), column)
        acc = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
        plgpu.barrier_wait(k_ready.at[ring(item, 0)])
        if alternate:
            pl.when(warpgroup == 1)(take_turn)

        def visit(step: jax.Array, state: Any, edge: bool) -> Any:
            acc, top, total = state
            stage = ring(item, step)

            def multiply_keys(scores_ref: Any) -> jax.Array:
                plgpu.wgmma(scores_ref, queries, k_smem.at[stage].transpose((1, 0)))
                take_turn()
                return scores_ref[...]

            scores = pl.run_scoped(multiply_keys, _ACC((WARPGROUP_ROWS, tile.slots), jnp.float32))
            plgpu.barrier_arrive(k_free.at[stage])
            if edge:
                slot = plgpu.broadcasted_iota(
                    jnp.int32, (WARPGROUP_ROWS, tile.slots), 1, layout=plgpu.Layout.WGMMA
                )
                scores = jnp.where(slot + step * tile.slots < item.seen, scores, -jnp.inf)
            # Every visited block holds a slot the row sees, so this maximum is finite.
            new_top = jnp.maximum(top, scores.max(axis=1) * scale)
            keep = jnp.exp2(top - new_top)
            weights = jnp.exp2(
                scores * scale - jax.lax.broadcast_in_dim(new_top, scores.shape, [0])
            )
            acc *= jax.lax.broadcast_in_dim(keep, acc.shape, [0])
            total = total * keep + weights.sum(axis=1)
            half = weights.astype(v_smem.dtype)
            acc, total, new_top, half = jax.lax.optimization_barrier((acc, total, new_top, half))
            if alternate:
                plgpu.barrier_arrive(turn)  # This warpgroup's softmax is done.
            plgpu.barrier_wait(v_ready.at[stage])
            if edge:
                _silence(v_smem.at[stage], item.seen - step * tile.slots, warpgroup)
                plgpu.barrier_arrive(clean)
                plgpu.barrier_wait(clean)
            if alternate:
                plgpu.barrier_wait(turn)  # The tensor cores are free.

            def multiply_values(acc_ref: Any) -> None:
                plgpu.wgmma(acc_ref, half, v_smem.at[stage])

                @pl.when(step + 1 < item.steps)
                def _() -> None:
                    plgpu.barrier_wait(k_ready.at[ring(item, step + 1)])

            acc = pl.run_state(multiply_values)(_ACC.init(acc))
            plgpu.barrier_arrive(v_free.at[stage])
            return acc, new_top, total

        state = (acc, top, total)
        state = jax.lax.fori_loop(0, item.whole, functools.partial(visit, edge=False), state)
        state = jax.lax.fori_loop(
            item.whole, item.steps, functools.partial(visit, edge=True), state
        )
        acc, top, total = state
        if alternate:
            pl.when(warpgroup == 0)(take_turn)
        acc *= jax.lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
        lse_smem[warpgroup] = top / LOG2_E + jnp.log(total)
        plgpu.commit_smem()
        place = (item.batch, item.split, item.kv_head, pl.ds(first_row, WARPGROUP_ROWS))
        plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[place])
        out_ref[place] = acc
        plgpu.wait_smem_to_gmem(0)

    def stand_by(item: _Item) -> None:
        """Keep the barriers turning where the last row tile has fewer rows than warpgroups."""
        if alternate:
            pl.when(warpgroup == 1)(take_turn)

        def visit(step: jax.Array, _: None, edge: bool) -> None:
            stage = ring(item, step)
            # Without these waits it would run ahead and release blocks that others still read.
            plgpu.barrier_wait(k_ready.at[stage])
            take_turn()
            plgpu.barrier_arrive(k_free.at[stage])
            plgpu.barrier_wait(v_ready.at[stage])
            if edge:
                plgpu.barrier_arrive(clean)
                plgpu.barrier_wait(clean)
            take_turn()
            plgpu.barrier_arrive(v_free.at[stage])

        jax.lax.fori_loop(0, item.whole, functools.partial(visit, edge=False), None)
        jax.lax.fori_loop(item.whole, item.steps, functools.partial(visit, edge=True), None)
        if alternate:
            pl.when(warpgroup == 0)(take_turn)

    def attend_or_stand_by(item: _Item) -> None:
        busy = item.row + warpgroup * WARPGROUP_ROWS < padded
        pl.when(busy)(lambda: attend(item))
        pl.when(jnp.logical_not(busy))(lambda: stand_by(item))

    def fetch(item: _Item) -> None:
        @pl.loop(0, item.steps)
        def _(step: jax.Array) -> None:
            stage = ring(item, step)
            used = item.past + step >= tile.stages
            block = (item.batch, item.kv_head, pl.ds(item.lower + step * tile.slots, tile.slots))
            pl.when(used)(lambda: plgpu.barrier_wait(k_free.at[stage]))
            plgpu.copy_gmem_to_smem(k_ref.at[block], k_smem.at[stage], k_ready.at[stage])
            pl.when(used)(lambda: plgpu.barrier_wait(v_free.at[stage]))
            plgpu.copy_gmem_to_smem(v_ref.at[block], v_smem.at[stage], v_ready.at[stage])

    registers = {1: None, 2: (232, 40), 3: (160, 32)}[tile.warpgroups]

    @pl.when(warpgroup < tile.warpgroups)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")
        each_item(attend_or_stand_by)

    @pl.when(warpgroup == tile.warpgroups)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        each_item(fetch)


@dataclasses.dataclass(frozen=True)
class _Item:
    """A piece of work: one row tile of one key/value head against one split.

    ``seen`` slots from ``lower`` on take ``whole`` unmasked and ``steps`` steps in all, after the
    ``past`` steps of the program's earlier items.
    """

    batch: jax.Array
    kv_head: jax.Array
    split: jax.Array
    row: jax.Array
    lower: jax.Array
    seen: jax.Array
    whole: jax.Array
    steps: jax.Array
    past: jax.Array


def _silence(values: Any, count: jax.Array, warpgroup: jax.Array) -> None:
    """Zero the rows from ``count`` on: memory beyond the length may be NaN, and 0 NaN is NaN."""

    @pl.when(warpgroup == 0)
    def _() -> None:
        # From jax 0.11 on, which this kernel needs, load takes no index.
        block = plgpu.load(values, layout=plgpu.Layout.WGMMA)  # pyright: ignore[reportCallIssue]
        row = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
        values[...] = jnp.where(row < count, block, jnp.zeros_like(block))
        plgpu.commit_smem()
