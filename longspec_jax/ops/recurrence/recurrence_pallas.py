"""Gated DeltaNet over the nodes of trees, as Pallas kernels for Triton.

Two launches a layer: :func:`tree_recurrence` convolves and normalises, with a program for each node
and key head, and then runs the delta rule, with a program for some columns of a value head's state.
These depend on nothing but the same columns of the values, so no two programs share a sum. A
program takes the nodes one by one (:mod:`longspec_jax.ops.recurrence.visits`) with the state of a
node's parent in registers; no state of a node is ever written. :func:`commit_paths` puts what the
accepted nodes wrote into the states of many layers at once, in place.

A state is the one before its token times the decay, plus the key's product with the update, in this
order and rounded twice, wherever it is made: after the parent, anew along a path, or in a commit.
A plain step is a tree of one node. So a token's bits depend only on its own path.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.recurrence.delta_rule import NORM_EPS
from longspec_jax.ops.recurrence.operands import RecurrentRows, RecurrentState, RecurrentTokens
from longspec_jax.ops.recurrence.visits import ANEW, CHILD, Visits
from longspec_jax.ops.triton_launch import triton_call

COLUMNS, WARPS = 8, 1
"""Columns of a state that a program keeps in registers, and its warps: a sum over the keys stays in
one warp, and four programs share a multiprocessor."""
COMMITTED, COMMITTING_WARPS = 32, 4
"""The same of a commit, which adds nothing up across the keys."""
LAYERS = 8
"""Layers of one launch of a commit: each is a branch of the kernel, whose compilation takes longer
than in proportion."""


@partitioned(
    "b t k w, b t k p, b t k p, k w c, b k p x y, b k c w, b t l, b t, b t, b t -> b t k x, "
    "b t k p y, b t k p y"
)
@launcher("interpret")
def tree_recurrence(
    tokens: RecurrentTokens,
    taps: Array,
    state: RecurrentState,
    visits: Visits,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Keys ``[B, T, J, X]`` and updates of the nodes, and what they read, ``[B, T, J, P, Y]``."""
    batch, nodes = tokens.inputs.shape[:2]
    _, heads, shared, width, value = state.memory.shape

    def float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, nodes, heads, *shape), jnp.float32)

    head = float32(width)
    keys, *visited = triton_call(
        functools.partial(_prepare_kernel, width=width),
        grid=(heads, nodes, batch),
        out_shape=[head, head, head, float32(shared * value), float32()] + [float32(shared)] * 2,
        warps=1,
        stages=1,
        interpret=interpret,
        name="recurrent_inputs",
    )(
        visits.order,
        visits.path,
        visits.count,
        tokens.inputs,
        state.inputs,
        taps,
        tokens.log_decay,
        tokens.strength,
    )
    updates, out = triton_call(
        functools.partial(_rule_kernel, interpret=interpret),
        grid=(pl.cdiv(value, COLUMNS), heads * shared, batch),
        out_shape=[float32(shared, value)] * 2,
        warps=WARPS,
        stages=1,
        interpret=interpret,
        name="delta_rule",
    )(
        visits.order,
        visits.link,
        visits.path,
        visits.count,
        jnp.full(1, nodes, jnp.int32),
        state.memory,
        *visited,
        keys,
        tokens.log_decay,
    )
    return keys, updates, out


def _prepare_kernel(
    order_ref: Ref,
    path_ref: Ref,
    count_ref: Ref,
    inputs_ref: Ref,
    kept_ref: Ref,
    taps_ref: Ref,
    log_decay_ref: Ref,
    strength_ref: Ref,
    node_keys_ref: Ref,
    queries_ref: Ref,
    keys_ref: Ref,
    values_ref: Ref,
    alike_ref: Ref,
    visited_decay_ref: Ref,
    visited_strength_ref: Ref,
    *,
    width: int,
) -> None:
    """One key head of the node in one place of the order: all but its key is written there."""
    head, place, batch = (pl.program_id(axis) for axis in range(3))
    node = order_ref[batch, place]
    last, kept, taps = count_ref[batch, node] - 1, kept_ref.shape[2], taps_ref.shape[2]

    def convolved(first: int, columns: int) -> Array:
        """What the convolution makes of some columns; zeros after them."""
        column = jnp.arange(pl.next_power_of_2(columns))
        within, total = column < columns, jnp.zeros(column.shape, jnp.float32)
        for tap in range(taps):
            at = last - (taps - 1 - tap)
            token, before = path_ref[batch, node, jnp.maximum(at, 0)], jnp.maximum(kept + at, 0)
            new = inputs_ref.at[batch, token, head, first + column]
            old = kept_ref.at[batch, head, jnp.minimum(before, kept - 1), first + column]
            new = pltriton.load(new, mask=within & (at >= 0), other=0.0)
            old = pltriton.load(old, mask=within & (at < 0), other=0.0)
            weight = pltriton.load(
                taps_ref.at[head, first + column, tap], mask=within, other=0.0
            ).astype(jnp.float32)
            total += jnp.where(at >= 0, new, old).astype(jnp.float32) * weight
        return (total / (1 + jnp.exp(-total))).astype(inputs_ref.dtype).astype(jnp.float32)

    def normalised(x: Array) -> Array:
        return x * jax.lax.rsqrt((x * x).sum() + NORM_EPS)

    x = jnp.arange(pl.next_power_of_2(width))
    query = normalised(convolved(0, width)) * width**-0.5
    key = normalised(convolved(width, width))
    pltriton.store(node_keys_ref.at[batch, node, head, x], key, mask=x < width)
    at = batch, place, head
    pltriton.store(queries_ref.at[*at, x], query, mask=x < width)
    pltriton.store(keys_ref.at[*at, x], key, mask=x < width)
    alike_ref[at] = (query * key).sum()
    columns = values_ref.shape[3]
    y = jnp.arange(pl.next_power_of_2(columns))
    pltriton.store(values_ref.at[*at, y], convolved(2 * width, columns), mask=y < columns)
    shared = log_decay_ref.shape[3]
    p = jnp.arange(pl.next_power_of_2(shared))
    gates = (log_decay_ref, visited_decay_ref), (strength_ref, visited_strength_ref)
    for source, target in gates:
        gate = pltriton.load(source.at[batch, node, head, p], mask=p < shared, other=0.0)
        pltriton.store(target.at[*at, p], gate, mask=p < shared)


def _rule_kernel(
    order_ref: Ref,
    link_ref: Ref,
    path_ref: Ref,
    count_ref: Ref,
    nodes_ref: Ref,
    memory_ref: Ref,
    queries_ref: Ref,
    keys_ref: Ref,
    values_ref: Ref,
    alike_ref: Ref,
    decay_ref: Ref,
    strength_ref: Ref,
    node_keys_ref: Ref,
    node_decay_ref: Ref,
    updates_ref: Ref,
    out_ref: Ref,
    *,
    interpret: bool,
) -> None:
    """All nodes of a row, in some columns of a value head."""
    _, _, shared, width, value = memory_ref.shape
    tile, of_head, batch = (pl.program_id(axis) for axis in range(3))
    head, share = of_head // shared, of_head % shared
    x, y = jnp.arange(pl.next_power_of_2(width)), tile * COLUMNS + jnp.arange(COLUMNS)
    own = y < value
    # A tree of one node is a loop like any other: its body is compiled to the same instructions.
    nodes = nodes_ref[0]

    def fetched(place: Array) -> tuple[Array, ...]:
        """What the node in this place of the order is made of."""
        at = batch, place, head
        q, k = (
            pltriton.load(ref.at[*at, x], mask=x < width, other=0.0)
            for ref in (queries_ref, keys_ref)
        )
        v = pltriton.load(values_ref.at[*at, share * value + y], mask=own, other=0.0)
        gates = decay_ref[*at, share], strength_ref[*at, share], alike_ref[at]
        return q, k, v, *gates, order_ref[batch, place], link_ref[batch, place]

    def anew(node: Array) -> Array:
        """The state of a node's parent, from the one before the root."""
        memory = pltriton.load(
            memory_ref.at[batch, head, share, x[:, None], y[None]],
            mask=(x < width)[:, None] & own[None],
            other=0.0,
        )
        if not interpret:
            pltriton.debug_barrier()  # Other threads wrote what is read.
        rows, own_head = (node_keys_ref, updates_ref, node_decay_ref), (batch, head, share)
        count, path = count_ref[batch, node] - 1, lambda step: path_ref[batch, node, step]
        return _state_after(memory, count, path, rows, own_head, (x, y), interpret)

    def visit(place: Array, carried: tuple) -> tuple:
        memory, last, (q, k, v, log_decay, strength, alike, node, link) = carried
        ahead = fetched(jnp.minimum(place + 1, nodes - 1))
        memory = jax.lax.cond(
            link == CHILD,
            lambda: _written(memory, last[0], last[1], last[2], interpret),
            lambda: jax.lax.cond(link == ANEW, lambda: anew(node), lambda: memory),
        )
        decay = jnp.exp(jnp.full(COLUMNS, log_decay))
        known, read = ((vector[:, None] * memory).sum(axis=0) for vector in (k, q))
        update = _update(v, decay, known, jnp.full(COLUMNS, strength), interpret)
        out = _sum(decay, read, jnp.full(COLUMNS, alike), update, interpret)
        at = batch, node, head, share, y
        pltriton.store(updates_ref.at[*at], update, mask=own)
        pltriton.store(out_ref.at[*at], out, mask=own)
        return memory, (decay, k, update), ahead

    zeros = jnp.zeros((x.size, COLUMNS), jnp.float32)
    last = jnp.zeros(COLUMNS), jnp.zeros(x.size), jnp.zeros(COLUMNS)
    jax.lax.fori_loop(0, nodes, visit, (zeros, last, fetched(jnp.int32(0))))


@partitioned("b t k p y, b t k w, y -> b t k y")
@launcher("eps", "interpret")
def gated_norm(
    read: Array, gates: Array, scale: Array, *, eps: float, interpret: bool = False
) -> Array:
    """See :func:`longspec_jax.ops.recurrence.recurrence.gated_norm`."""
    batch, tokens, heads, shared, width = read.shape

    def kernel(read_ref: Ref, gates_ref: Ref, scale_ref: Ref, out_ref: Ref) -> None:
        of_head, token, row = (pl.program_id(axis) for axis in range(3))
        head, share = of_head // shared, of_head % shared
        y = jnp.arange(pl.next_power_of_2(width))
        own, behind = y < width, gates_ref.shape[3] - (shared - share) * width
        x = pltriton.load(read_ref.at[row, token, head, share, y], mask=own, other=0.0)
        gate = pltriton.load(gates_ref.at[row, token, head, behind + y], mask=own, other=0.0)
        weights = pltriton.load(scale_ref.at[y], mask=own, other=0.0)
        gate = gate.astype(jnp.float32)
        out = x * jax.lax.rsqrt((x * x).sum() / width + eps) * weights
        out *= gate / (1 + jnp.exp(-gate))
        pltriton.store(out_ref.at[row, token, of_head, y], out.astype(out_ref.dtype), mask=own)

    return triton_call(
        kernel,
        grid=(heads * shared, tokens, batch),
        out_shape=jax.ShapeDtypeStruct((batch, tokens, heads * shared, width), gates.dtype),
        warps=1,
        stages=1,
        interpret=interpret,
        name="gated_norm",
    )(read, gates, scale)


def commit_paths(
    states: Sequence[RecurrentState],
    rows: Sequence[RecurrentRows],
    path: Array,
    count: Array,
    cache_rows: Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[RecurrentState, ...]:
    """See :func:`longspec_jax.ops.recurrence.recurrence.commit_paths`."""
    committed: list[RecurrentState] = []
    for first in range(0, len(states), LAYERS):
        some = slice(first, first + LAYERS)
        held, written = states[some], rows[some]
        memories, inputs = _commit(
            [state.memory for state in held],
            [state.inputs for state in held],
            [row.inputs for row in written],
            [row.keys for row in written],
            [row.updates for row in written],
            [row.log_decay for row in written],
            path,
            count,
            cache_rows,
            interpret=interpret,
        )
        committed += map(RecurrentState, memories, inputs)
    return tuple(committed)


@partitioned("b k p x y, b k c w, b t k w, b t k x, b t k p y, b t k p, b h, b, b -> b k ...")
@launcher("interpret")
def _commit(
    memories: Sequence[Array],
    inputs: Sequence[Array],
    fresh: Sequence[Array],
    keys: Sequence[Array],
    updates: Sequence[Array],
    log_decay: Sequence[Array],
    path: Array,
    count: Array,
    cache_rows: Array | None,
    *,
    interpret: bool,
) -> tuple[Sequence[Array], Sequence[Array]]:
    """One launch: a program for each row, some columns of a value head, and layer."""
    layers, batch = len(memories), path.shape[0]
    _, heads, shared, _, value = memories[0].shape
    numbers = [path, count] if cache_rows is None else [path, count, cache_rows]
    held = [*memories, *inputs]
    given = [*fresh, *keys, *updates, *log_decay]
    written = triton_call(
        functools.partial(_commit_kernel, layers=layers, interpret=interpret),
        grid=(pl.cdiv(value, COMMITTED), heads * shared, batch * layers),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in held],
        input_output_aliases={
            len(numbers) + len(given) + index: index for index in range(len(held))
        },
        warps=COMMITTING_WARPS,
        stages=1,
        interpret=interpret,
        name="commit_paths",
    )(*(each.astype(jnp.int32) for each in numbers), *given, *held)
    return written[:layers], written[layers:]


def _commit_kernel(path_ref: Ref, count_ref: Ref, *refs: Ref, layers: int, interpret: bool) -> None:
    """Some columns of a head's state in one layer, and for the first of them its inputs."""
    *row_refs, refs = (*refs[: -8 * layers], refs[-8 * layers :])
    parts = [refs[first : first + layers] for first in range(0, 8 * layers, layers)]
    tile, of_head, of_layer = (pl.program_id(axis) for axis in range(3))
    batch, layer = of_layer // layers, of_layer % layers
    row, count = row_refs[0][batch] if row_refs else batch, count_ref[batch]

    def commit(index: int) -> None:
        fresh_ref, *rows, old_memory_ref, old_ref, memory_ref, kept_ref = (
            part[index] for part in parts
        )
        _, _, shared, width, value = memory_ref.shape
        head, share = of_head // shared, of_head % shared
        x, y = jnp.arange(pl.next_power_of_2(width)), tile * COMMITTED + jnp.arange(COMMITTED)
        at = row, head, share, x[:, None], y[None]
        mask = (x < width)[:, None] & (y < value)[None]
        memory = pltriton.load(old_memory_ref.at[*at], mask=mask, other=0.0)
        own_head, accepted = (batch, head, share), lambda step: path_ref[batch, step]
        memory = _state_after(memory, count, accepted, rows, own_head, (x, y), interpret)
        pltriton.store(memory_ref.at[*at], memory, mask=mask)

        @pl.when((tile == 0) & (share == 0))
        def _() -> None:
            kept, columns = kept_ref.shape[2:]
            slot, w = jnp.arange(pl.next_power_of_2(kept)), jnp.arange(pl.next_power_of_2(columns))
            exists, within = (slot < kept)[:, None], (w < columns)[None]
            source = count - kept + slot
            new = pltriton.load(
                path_ref.at[batch, jnp.maximum(source, 0)],
                mask=(source >= 0) & (slot < kept),
                other=0,
            )
            is_new = (source >= 0)[:, None]
            new = fresh_ref.at[batch, new[:, None], head, w[None]]
            new = pltriton.load(new, mask=exists & within & is_new, other=0.0)
            old = old_ref.at[row, head, jnp.clip(count + slot, 0, kept - 1)[:, None], w[None]]
            old = pltriton.load(old, mask=exists & within & ~is_new, other=0.0)
            if not interpret:
                pltriton.debug_barrier()  # All have read before one writes.
            target = kept_ref.at[row, head, slot[:, None], w[None]]
            pltriton.store(target, jnp.where(is_new, new, old), mask=exists & within)

    for index in range(layers):
        pl.when((layer == index) & (count > 0))(functools.partial(commit, index))


def _state_after(
    memory: Array,
    count: Array,
    token_at: Callable[[Array], Array],
    rows: Sequence[Ref],
    place: tuple[Array, Array, Array],
    columns: tuple[Array, Array],
    interpret: bool,
) -> Array:
    """A state after ``count`` tokens.

    Args:
      memory: the state before them.
      count: of the tokens.
      token_at: which one comes at a step.
      rows: keys, updates and logarithms of decay of all tokens.
      place: the row, the key head, and the value head among its own.
      columns: of the state: the keys' and the values'.
      interpret: whether there is no kernel.
    """
    (keys_ref, updates_ref, decay_ref), (batch, head, share), (x, y) = rows, place, columns
    width, value = keys_ref.shape[3], updates_ref.shape[4]

    def step(index: Array, memory: Array) -> Array:
        token = token_at(index)
        k = pltriton.load(keys_ref.at[batch, token, head, x], mask=x < width, other=0.0)
        update = updates_ref.at[batch, token, head, share, y]
        u = pltriton.load(update, mask=y < value, other=0.0)
        decay = jnp.exp(jnp.full(y.shape, decay_ref[batch, token, head, share]))
        return _written(memory, decay, k, u, interpret)

    return jax.lax.fori_loop(0, count, step, memory)


def _written(memory: Array, decay: Array, k: Array, update: Array, interpret: bool) -> Array:
    """A state after a token: ``S decay``, rounded, and ``k u`` added, rounded once."""
    parts = memory, decay[None], k[:, None], update[None]
    one, by, other, times = (jnp.broadcast_to(part, memory.shape) for part in parts)
    return _sum(one, by, other, times, interpret)


def _update(v: Array, decay: Array, known: Array, strength: Array, interpret: bool) -> Array:
    """``strength (v - decay known)``, every step rounded by itself."""
    if interpret:
        return strength * (v - decay * known)
    code = "mul.rn.f32 t, $2, $3; sub.rn.f32 t, $1, t; mul.rn.f32 $0, t, $4;"
    return _rounded(code, v, decay, known, strength)


def _sum(one: Array, by: Array, other: Array, times: Array, interpret: bool) -> Array:
    """``one by + other times``, the first product rounded by itself."""
    if interpret:
        return one * by + other * times
    return _rounded("mul.rn.f32 t, $1, $2; fma.rn.f32 $0, $3, $4, t;", one, by, other, times)


def _rounded(code: str, *parts: Array) -> Array:
    """Arithmetic that no compiler may contract; see :func:`longspec_jax.ops.mosaic.row_product`."""
    (result,) = pltriton.elementwise_inline_asm(
        f"{{ .reg .f32 t; {code} }}",
        args=parts,
        constraints="=f" + ",f" * len(parts),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(parts[0].shape, jnp.float32)],
    )
    return result
