"""A recurrent layer between its projections: a short convolution, the gated delta rule, a norm.

Queries, keys and values of a token come of a convolution over its own inputs and those of the
tokens before it, which are its ancestors in a tree, and after the root the last committed ones.
What the token reads is normalised by heads and gated.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Lengths
from longspec_jax.ops.dispatch import differentiable_op, op
from longspec_jax.ops.hardware import require_ampere, require_decode_step
from longspec_jax.ops.layer import rms_norm
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.recurrence.delta_rule import (
    BLOCK,
    RecurrenceOperands,
    delta_rule_chunk,
    delta_rule_tree,
    normalised,
)
from longspec_jax.ops.recurrence.operands import (
    RecurrentRows,
    RecurrentState,
    RecurrentTokens,
    commit_path,
    empty_rows,
    last_inputs,
)
from longspec_jax.ops.recurrence.visits import visits
from longspec_jax.ops.slicing import along, chunk_length, cut, whole_chunks

SEGMENT = 8192
"""Tokens of a device whose queries, keys and values exist at once in float32."""
MAX_KEY_WIDTH = 256
"""A program of the kernel holds whole columns of a state in registers."""
Taps = Float[Array, "J W _"]
"""The weights of the convolution, the newest token's last."""


@partitioned(
    "b t k w, b t k p, b t k p, k w c, b k p x y, b k c w, b -> b k p x y, b k c w, b t k p y"
)
def chunk_recurrence(
    tokens: RecurrentTokens, taps: Taps, state: RecurrentState, count: Lengths
) -> tuple[RecurrentState, Float[Array, "B T J P Y"]]:
    """The state after consecutive tokens, and what they read.

    Args:
      tokens: consecutive ones of each row, after those of the state.
      taps: weights of the convolution.
      state: of the batch's rows.
      count: how many of the tokens are the row's own; the state is that after the last of them.

    Returns:
      The state, and what every token reads, float32.
    """
    rows, length = tokens.inputs.shape[:2]
    if rows * length <= SEGMENT:
        return _segment(tokens, taps, state, count)
    size = chunk_length(rows, length, SEGMENT)
    padded = jax.tree.map(lambda part: whole_chunks(part, size), tokens)

    def step(state: RecurrentState, start: Array) -> tuple[RecurrentState, Array]:
        part = jax.tree.map(lambda whole: cut(whole, start, size), padded)
        return _segment(part, taps, state, jnp.clip(count - start, 0, size))

    state, out = jax.lax.scan(step, state, jnp.arange(0, padded.inputs.shape[1], size))
    out = jnp.moveaxis(out, 0, 1)
    return state, out.reshape(rows, -1, *out.shape[3:])[:, :length]


def _segment(
    tokens: RecurrentTokens, taps: Taps, state: RecurrentState, count: Lengths
) -> tuple[RecurrentState, Array]:
    length, before = tokens.inputs.shape[1], state.inputs.swapaxes(1, 2)
    inputs = tokens.inputs[..., : before.shape[3]]
    joined = jnp.concatenate([before, inputs], axis=1)
    mixed = _convolved([joined[:, at : at + length] for at in range(taps.shape[2])], taps)
    own = (jnp.arange(length) < count[:, None])[:, :, None, None]
    gates = (jnp.where(own, part, 0.0) for part in (tokens.log_decay, tokens.strength))
    memory, out = delta_rule(state.memory, mixed, *gates)
    return RecurrentState(memory, last_inputs(state, inputs, count)), out


@differentiable_op(static=0)
def delta_rule(
    memory: Array, mixed: Array, log_decay: Array, strength: Array
) -> tuple[Array, Array]:
    """The delta rule after the convolution, over consecutive tokens; differentiable."""
    return delta_rule_chunk(memory, _operands(memory, mixed, log_decay, strength))


@delta_rule.kernel("pallas")
def _delta_rule_pallas(
    memory: Array, mixed: Array, log_decay: Array, strength: Array
) -> tuple[Array, Array]:
    require_ampere("the kernel of recurrent layers' chunks")
    (width, value), length = memory.shape[3:], mixed.shape[1]
    even = width in (16, 32, 64, 128) and value % 32 == 0 and length >= BLOCK
    if mixed.dtype != jnp.bfloat16 or not even:
        raise NotImplementedError(
            "the kernel of recurrent layers' chunks takes whole blocks in bfloat16, keys of 16 to "
            f"128 numbers and values in multiples of 32, not {length} tokens in {mixed.dtype}, "
            f"{width} and {value}"
        )
    from longspec_jax.ops.recurrence import chunk_pallas

    # Tokens of padding decay nothing and write nothing.
    tokens = (whole_chunks(part, BLOCK) for part in (mixed, log_decay, strength))
    memory, out = chunk_pallas.delta_rule_chunk(memory, *tokens)
    return memory, out[:, :length]


@op
def tree_recurrence(
    tokens: RecurrentTokens,
    taps: Taps,
    state: RecurrentState,
    mask: Bool[Array, "B T T"],
    depth: Int[Array, "B T"],
    levels: int,
) -> tuple[RecurrentRows, Float[Array, "B T J P Y"]]:
    """What the nodes of trees write, each after its own path, and what they read.

    Args:
      tokens: the nodes of each row; a node comes after its ancestors.
      taps: weights of the convolution.
      state: of the batch's rows, before the roots.
      mask: which nodes are a node or its ancestors.
      depth: of the nodes; 0 for the root.
      levels: the greatest depth.
    """
    none = empty_rows(state, len(tokens.inputs), 0)
    return _tree(tokens, taps, state, none, mask, mask[:, :, :0], depth, levels=levels)


@tree_recurrence.kernel("pallas")
def _tree_recurrence_pallas(
    tokens: RecurrentTokens,
    taps: Array,
    state: RecurrentState,
    mask: Array,
    depth: Array,
    levels: int,
) -> tuple[RecurrentRows, Array]:
    _require_kernels(state, depth.size)
    from longspec_jax.ops.recurrence import recurrence_pallas

    tree = visits(mask, levels=levels)
    keys, updates, out = recurrence_pallas.tree_recurrence(tokens, taps, state, tree)
    # Only what is written after other tokens outside the state reads the sums.
    operands = mask.astype(jnp.float32), tokens.log_decay
    total = jnp.einsum("btu,bujp->btjp", *operands, precision="highest")
    depth = jnp.broadcast_to(depth, tokens.inputs.shape[:2]).astype(jnp.int32)
    return RecurrentRows(tokens.inputs, keys, updates, tokens.log_decay, total, depth), out


@op
def commit_paths(
    states: Sequence[RecurrentState],
    rows: Sequence[RecurrentRows],
    path: Int[Array, "B h"],
    count: Lengths,
    cache_rows: Lengths | None = None,
) -> tuple[RecurrentState, ...]:
    """The states of many layers after the first ``count[b]`` nodes of a path.

    Args:
      states: of the layers, all of one shape.
      rows: what the nodes write to each.
      path: nodes from the root on; what stands after the count may be any node.
      count: how many of them are committed.
      cache_rows: the row of the states for every batch row, no two alike; its own if absent.
    """
    return tuple(
        state.put(cache_rows, commit_path(state.of_batch(cache_rows), written, path, count))
        for state, written in zip(states, rows, strict=True)
    )


@commit_paths.kernel("pallas")
def _commit_paths_pallas(
    states: Sequence[RecurrentState],
    rows: Sequence[RecurrentRows],
    path: Array,
    count: Array,
    cache_rows: Array | None = None,
) -> tuple[RecurrentState, ...]:
    _require_kernels(states[0], path.size)
    if len({(state.memory.shape, state.inputs.shape) for state in states}) > 1:
        raise NotImplementedError("one launch commits to states of one shape")
    from longspec_jax.ops.recurrence import recurrence_pallas

    return recurrence_pallas.commit_paths(states, rows, path, count, cache_rows)


def _require_kernels(state: RecurrentState, rows: int) -> None:
    """Refuse what the kernels cannot do."""
    require_decode_step("the kernel of recurrent layers", rows, state.inputs.dtype)
    refuse_wide_keys(state.memory.shape[3])


def refuse_wide_keys(width: int) -> None:
    """Raise for keys of more numbers than the kernels take."""
    if width > MAX_KEY_WIDTH:
        raise NotImplementedError(
            f"the kernel of recurrent layers takes keys of up to {MAX_KEY_WIDTH} numbers, "
            f"not {width}"
        )


def continued_recurrence(
    tokens: RecurrentTokens,
    taps: Taps,
    state: RecurrentState,
    rows: RecurrentRows,
    mask: Bool[Array, "B T U"],
    at: int,
    depth: Int[Array, "B T"],
) -> tuple[RecurrentRows, Float[Array, "B T J P Y"]]:
    """The same after tokens that are not in the state, among whose rows the new ones are written.

    Args:
      tokens: the new ones.
      taps: weights of the convolution.
      state: of the batch's rows, before all of these tokens.
      rows: what all of them write, the earlier ones' filled in.
      mask: which of them each new one sees, itself included.
      at: where the new ones begin among them.
      depth: of the new ones.
    """
    new = tokens.inputs.shape[1]
    among = (jnp.arange(mask.shape[2]) >= at) & (jnp.arange(mask.shape[2]) < at + new)
    own, seen = mask[:, :, at : at + new], mask & ~among
    fresh, out = _tree(tokens, taps, state, rows, own, seen, depth, levels=new - 1)

    def written(row: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, part, at, axis=1)

    return jax.tree.map(written, rows, fresh), out


@partitioned(
    "b t k w, b t k p, b t k p, k w c, b k p x y, b k c w, b u k w, b u k x, b u k p y, b u k p, "
    "b u k p, b u, b t t, b t u, b t -> b t k w, b t k x, b t k p y, b t k p, b t k p, b t, "
    "b t k p y"
)
def _tree(
    tokens: RecurrentTokens,
    taps: Taps,
    state: RecurrentState,
    earlier: RecurrentRows,
    mask: Bool[Array, "B T T"],
    seen: Bool[Array, "B T U"],
    depth: Int[Array, "B T"],
    *,
    levels: int,
) -> tuple[RecurrentRows, Array]:
    kept, number = state.inputs.shape[2], earlier.inputs.shape[1]
    depths = jnp.concatenate([earlier.depth, depth], axis=1)
    sees = jnp.concatenate([seen, mask], axis=2)
    inputs = tokens.inputs[..., : state.inputs.shape[3]]
    joined = jnp.concatenate([state.inputs.swapaxes(1, 2), earlier.inputs, inputs], axis=1)

    def back(steps: int) -> Array:
        """Inputs of the token that is this many steps before each."""
        there = sees & (depths[:, None] == depth[:, :, None] - steps)
        fresh, before = kept + jnp.argmax(there, axis=2), kept + depth - steps
        return along(jnp.where(depth >= steps, fresh, before), joined)

    mixed = _convolved([back(steps) for steps in reversed(range(kept + 1))], taps)
    operands = _operands(state.memory, mixed, tokens.log_decay, tokens.strength)
    behind = (earlier, seen) if number else None
    updates, total, out = delta_rule_tree(state.memory, operands, mask, levels, behind)
    depth = jnp.broadcast_to(depth, tokens.inputs.shape[:2]).astype(jnp.int32)
    rows = RecurrentRows(inputs, operands.keys, updates, operands.log_decay, total, depth)
    return rows, out


def _convolved(back: list[Array], taps: Array) -> Array:
    """The SiLU of the convolution, in the dtype of its inputs."""
    weights = jnp.moveaxis(taps.astype(jnp.float32), 2, 0)
    parts = (each.astype(jnp.float32) * weight for each, weight in zip(back, weights, strict=True))
    return jax.nn.silu(sum(parts)).astype(back[0].dtype)


def _operands(memory: Array, mixed: Array, log_decay: Array, strength: Array) -> RecurrenceOperands:
    """Queries, keys and values of what the convolution yields, in float32."""
    _, _, shared, width, value = memory.shape
    wide = mixed.astype(jnp.float32)
    queries, keys, values = jnp.split(wide, [width, 2 * width], axis=3)
    return RecurrenceOperands(
        normalised(queries) * width**-0.5,
        normalised(keys),
        values.reshape(*values.shape[:3], shared, value),
        log_decay,
        strength,
    )


@differentiable_op(static=1)
def gated_norm(
    read: Float[Array, "B T J P Y"],
    gates: Float[Array, "B T J _"],
    scale: Float[Array, " Y"],
    eps: float,
) -> Float[Array, "B T M Y"]:
    """The RMS norm of every value head, times the SiLU of its gate.

    Args:
      read: what the tokens read, float32.
      gates: of a key head's value heads; they are the last numbers of the last axis.
      scale: the norm's weights, float32.
      eps: added to the mean square.

    Returns:
      All value heads of a token, in the dtype of the gates; differentiable.
    """
    batch, tokens, heads, shared, width = read.shape
    wide = gates[..., -shared * width :].reshape(read.shape).astype(jnp.float32)
    out = rms_norm(read, scale, eps) * jax.nn.silu(wide)
    return out.reshape(batch, tokens, heads * shared, width).astype(gates.dtype)


@gated_norm.kernel("pallas")
def _gated_norm_pallas(read: Array, gates: Array, scale: Array, eps: float) -> Array:
    require_decode_step("the kernel of gated norms", read.shape[0] * read.shape[1], gates.dtype)
    from longspec_jax.ops.recurrence import recurrence_pallas

    return recurrence_pallas.gated_norm(read, gates, scale, eps=eps)
