"""A mixture of experts: the router's choice, and the MLPs of the chosen experts.

The weights are stored with the contracted axis last, so that the first matmul of all experts is one
plain matmul of ``[rows, D]`` by ``[2 E F, D]``. On a Hopper GPU a kernel of our own reads the
weights of every chosen expert once (:mod:`longspec_jax.ops.matmul.experts_grouping`). Elsewhere,
and for the many rows of a prompt, XLA computes the MLPs in one of three forms:

- *chosen*: the weights of each row's experts are gathered. A gathered matrix is read, written and
  read again, so this form serves up to ``E / 3`` pairs of a row and an expert: plain decoding.
- *all*: every expert computes every row, and the chosen results are taken. Up to 64 rows cost the
  matrix units less than reading the weights, and the rows of a tree choose nearly all experts.
- *grouped*: the pairs are sorted by expert, and every expert computes a block of its rows in each
  of as many passes as the most loaded expert needs. No pair is dropped.

``jax.lax.ragged_dot`` would be the library's way for the last one. On CPUs and GPUs jax expands it
to a masked copy of the rows for each expert (jax 0.10 to 0.12), which is E times the work.

A row's result does not depend on other rows: each matmul contracts only the row, and its
experts are added up in float32 in the order of its own choice. Between XLA's forms it differs by
the rounding of matmuls of other shapes, as that of a dense MLP does between one row and many. The
kernel has one order of summation for any number of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array, Leaf
from longspec_jax.ops.dispatch import op
from longspec_jax.ops.layer import added
from longspec_jax.ops.matmul.experts_grouping import expert_mlps_mosaic
from longspec_jax.ops.matmul.few_rows import (
    bounded_gate,
    gate,
    gelu_gate,
    head_matmul_xla,
    matmul_precision,
)
from longspec_jax.ops.matmul.ordered import HEAD_MATMUL
from longspec_jax.ops.matmul.quantised import in_turn
from longspec_jax.ops.matmul.quantised_weights import QuantisedWeights
from longspec_jax.ops.partitioned import one_device, partitioned, with_sharding

COPIED = 3
"""How many times a gathered matrix passes through memory."""
ALL_ROWS = 64
"""Most rows that every expert computes: the height of a GPU's matrix instruction."""
SLACK = 2
"""Rows that an expert computes in a pass, as a multiple of its even share."""

_ordered_logits = partitioned("b t d, n d -> b t n")(HEAD_MATMUL)
"""A router's logits, all of them on every device."""


@dataclass(frozen=True)
class ExpertWeights:
    """The MLPs of all experts of a layer; a pytree."""

    gate_up: Leaf[Float[Array, "E 2 F D"]] | QuantisedWeights
    """Gate and up of every expert; packed ones as ``2 E`` matrices."""
    down: Leaf[Float[Array, "E D F"]] | QuantisedWeights
    gate_up_bias: Leaf[Float[Array, "E 2 F"]] | None = None
    down_bias: Leaf[Float[Array, "E D"]] | None = None
    gelu: bool = field(default=False, metadata={"pytree_node": False})
    """Whether the gate is a GELU by its tanh formula, not a SiLU."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, their outputs, and what is between their matmuls: ``E``, ``D`` and ``F``."""
        down: Any = self.down
        if isinstance(down, QuantisedWeights):
            count, outputs = down.out_axes
            return count, outputs, down.inputs
        return down.shape

    def plain(self) -> "ExpertWeights":
        """Quantised weights in the order of their inputs, an axis for gate and up."""
        gate_up, down = self.gate_up, self.down
        if isinstance(gate_up, QuantisedWeights) and isinstance(down, QuantisedWeights):
            count, _, inner = self.sizes
            gate_up, down = gate_up.plain(), down.plain()
            gate_up = jax.tree.map(lambda each: each.reshape(count, 2, inner, -1), gate_up)
        return replace(self, gate_up=gate_up, down=down)

    def whole(self, x: Array) -> Any:
        """Plain weights as arrays, dequantised to the dtype of the rows that need them."""
        if not isinstance(self.gate_up, QuantisedWeights):
            return self
        gate_up, down = (in_turn(x, each)[1] for each in (self.gate_up, self.down))
        gate_up, down = gate_up.dequantised(x.dtype), down.dequantised(x.dtype)
        return replace(self, gate_up=gate_up, down=down)


jax.tree_util.register_dataclass(
    ExpertWeights, ["gate_up", "down", "gate_up_bias", "down_bias"], ["gelu"]
)


def choose_experts(
    x: Float[Array, "*rows D"],
    router: Float[Array, "D E"],
    bias: Float[Array, " E"] | None = None,
    *,
    chosen: int,
    renormalised: bool = True,
    ordered: bool = False,
) -> tuple[Int[Array, "*rows k"], Float[Array, "*rows k"]]:
    """The experts of every row, best first, and their weights, all computed in float32.

    Args:
      x: the rows.
      router: a column for each expert.
      bias: added to the logits.
      chosen: experts of a row. Of equal logits the expert of the lower number is chosen.
      renormalised: whether a row's weights add up to 1: a softmax over the chosen logits.
        Otherwise they are those of a softmax over all logits.
      ordered: whether a row's logits must have the same bits alongside any others, where there is a
        kernel for it: that of LM heads.
    """
    logits = _ordered_logits(x, router.T) if ordered else head_matmul_xla(x, router.T)
    if bias is not None:
        logits += bias.astype(jnp.float32)
    best, experts = jax.lax.top_k(logits, chosen)
    if renormalised:
        parts = jnp.exp(best - best[..., :1])
        # One after the other, as in the sum of what the experts yield.
        return experts, parts / sum(parts[..., i, None] for i in range(chosen))
    return experts, jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def expert_mlp(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T k"],
    shares: Float[Array, "B T k"],
    weights: ExpertWeights,
    limit: float | None = None,
) -> Float[Array, "B T D"]:
    """The weighted sum of what its experts make of every row.

    On a mesh the experts are cut over ``tp``. Every device computes the experts that it holds for
    its share of the batch rows, and the results are added up. Not differentiable where the kernel
    runs, nor in reverse for more than 64 rows.

    Args:
      x: rows.
      experts: the experts of each, no two alike.
      shares: their weights, float32.
      weights: of all experts.
      limit: largest size of gate and up in gpt-oss's gate
        ``(up + 1) * gate * sigmoid(1.702 gate)``; None for ``up * silu(gate)``, or a GELU where
        ``weights`` has one.

    Returns:
      The sums in the dtype of ``x``.
    """
    held = jnp.arange(weights.sizes[0])
    parts = _held_experts(x, experts, shares, held, weights, limit=limit)
    return (parts[0] if parts.shape[0] == 1 else parts.sum(axis=0)).astype(x.dtype)


def expert_mlp_partials(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T k"],
    shares: Float[Array, "B T k"],
    weights: ExpertWeights,
    limit: float | None = None,
) -> Float[Array, "k B T D"]:
    """The outputs of each chosen expert, in float32. The caller adds them up in their order.

    So a row has the same bits with any others, where the kernel runs: a compiler that multiplies
    and adds in one program may round once or twice. On a mesh the devices gather what all others'
    experts yield, of which all but one say 0.
    """
    if one_device():
        flat = experts.reshape(-1, experts.shape[-1])
        out = EXPERT_MLPS(x.reshape(len(flat), -1), flat, weights, limit, ordered=True)
        out = out.reshape(*experts.shape, -1).astype(jnp.float32)
    else:
        held = jnp.arange(weights.sizes[0])
        [parts] = with_sharding("s b t c d", _held_results(x, experts, held, weights, limit=limit))
        out = added(parts)
    return jnp.moveaxis(out * shares[..., None], 2, 0)


@partitioned("b t d, b t c, b t c, e, e u w d, e d w, e u w, e d -> e b t d")
def _held_experts(
    x: Array,
    experts: Array,
    shares: Array,
    held: Array,
    weights: ExpertWeights,
    *,
    limit: float | None,
) -> Array:
    """What the experts of one device add, float32 ``[1, B, T, D]``; ``held`` are their numbers."""
    out, present = _results(x, experts, held, weights, limit)
    # One after the other: the order in which a reduction adds may depend on its shape.
    kept = jnp.where(present, shares.reshape(present.shape), 0)
    total = jnp.zeros((len(out), x.shape[-1]), jnp.float32)
    for choice in range(present.shape[1]):
        total += kept[:, choice, None] * out[:, choice].astype(jnp.float32)
    return total.reshape(1, *x.shape)


@partitioned("b t d, b t c, e, e u w d, e d w, e u w, e d -> e b t c d")
def _held_results(
    x: Array, experts: Array, held: Array, weights: ExpertWeights, *, limit: float | None
) -> Array:
    """What the experts of one device yield, ``[1, B, T, k, D]``; 0 for those of others."""
    out, present = _results(x, experts, held, weights, limit, ordered=True)
    return jnp.where(present[..., None], out, 0).reshape(1, *experts.shape, -1)


def _results(
    x: Array,
    experts: Array,
    held: Array,
    weights: ExpertWeights,
    limit: float | None,
    *,
    ordered: bool = False,
) -> tuple[Array, Array]:
    """What each row's experts yield, ``[rows, k, D]``, and which of them are held."""
    rows = x.reshape(-1, x.shape[-1])
    local = experts.reshape(len(rows), -1) - held[0]
    present = (local >= 0) & (local < len(held))
    local = jnp.where(present, local, len(held))
    return EXPERT_MLPS(rows, local, weights, limit, ordered=ordered), present


def expert_mlps_xla(
    x: Array, experts: Array, weights: ExpertWeights, limit: float | None, *, ordered: bool = False
) -> Array:
    """What each of its experts makes of every row, ``[rows, k, D]``, in plain JAX."""
    rows, chosen = experts.shape
    form = _form(rows, chosen, weights.sizes[0])
    return form(x, experts, weights.plain(), limit)


EXPERT_MLPS = op(expert_mlps_xla)
EXPERT_MLPS.kernel("mosaic")(expert_mlps_mosaic)


def _form(rows: int, chosen: int, experts: int) -> Callable[..., Array]:
    """The form of the MLPs, by the number of rows, their choices and the experts."""
    if COPIED * rows * chosen <= experts:
        return _chosen
    return _all if rows <= ALL_ROWS else _grouped


def computed_rows(rows: int, chosen: int, experts: int) -> int:
    """Rows of all experts that exist at once, some of which may be padding."""
    form = _form(rows, chosen, experts)
    if form is _chosen:
        return rows * chosen
    return experts * (rows if form is _all else _block_rows(rows, chosen, experts))


def _block_rows(rows: int, chosen: int, experts: int) -> int:
    """Rows that an expert computes in a pass of the grouped form."""
    share = -(-SLACK * rows * chosen // experts)
    return min(rows, max(ALL_ROWS, share + -share % 8))


def _chosen(x: Array, experts: Array, weights: PyTree, limit: float | None) -> Array:
    """``[rows, k, D]``: each pair with its own copy of the weights."""
    flat = experts.reshape(-1)
    own = jax.tree.map(lambda each: jnp.take(each, flat, axis=0, mode="clip"), weights)
    pairs = jnp.repeat(x, experts.shape[1], axis=0)[:, None]
    return _blocks(pairs, own.whole(x), limit).reshape(*experts.shape, -1)


def _all(x: Array, experts: Array, weights: PyTree, limit: float | None) -> Array:
    """``[rows, k, D]``: taken of the results of all experts."""
    over, weights = (((1,), (3,)), ((), ())), weights.whole(x)
    precision = matmul_precision(x.dtype)
    inner = jax.lax.dot_general(x, weights.gate_up, over, precision=precision)
    if weights.gate_up_bias is not None:
        inner += weights.gate_up_bias
    out = _out(_gated(inner, weights, limit).swapaxes(0, 1), weights)
    return out.at[experts, jnp.arange(len(x))[:, None]].get(mode="clip")


def _grouped(x: Array, experts: Array, weights: PyTree, limit: float | None) -> Array:
    """``[rows, k, D]``: blocks of the rows of every expert, in passes."""
    weights = weights.whole(x)
    count, pairs = weights.down.shape[0], experts.size
    size = _block_rows(len(x), experts.shape[1], count)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    loads = jnp.bincount(flat, length=count + 1)[:count]  # Absent experts come last.
    first = jnp.cumsum(loads) - loads
    # Of each pair, which of its expert's pairs it is.
    sorted_at = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32))
    place = sorted_at - first.at[flat].get(mode="clip").astype(jnp.int32)

    def step(turn: Array, out: Array) -> Array:
        places = first[:, None] + turn * size + jnp.arange(size)
        rows = order.at[places].get(mode="clip") // experts.shape[1]
        results = _blocks(x[rows], weights, limit)
        inside = place - turn * size
        own = results.at[flat, inside].get(mode="clip")
        return jnp.where(((inside >= 0) & (inside < size))[:, None], own, out)

    out = jnp.zeros((pairs, x.shape[1]), x.dtype)
    turns = -(-jnp.max(loads) // size)
    return jax.lax.fori_loop(0, turns, step, out).reshape(*experts.shape, -1)


def _blocks(x: Array, weights: PyTree, limit: float | None) -> Array:
    """``[e, c, D]`` of a block of rows ``[e, c, D]`` for each of as many experts."""
    over = ((2,), (3,)), ((0,), (0,))
    inner = jax.lax.dot_general(x, weights.gate_up, over, precision=matmul_precision(x.dtype))
    if weights.gate_up_bias is not None:
        inner += weights.gate_up_bias[:, None]
    return _out(_gated(inner, weights, limit), weights)


def _out(inner: Array, weights: PyTree) -> Array:
    """``[e, c, D]`` of gated values ``[e, c, F]``."""
    over = ((2,), (2,)), ((0,), (0,))
    out = jax.lax.dot_general(inner, weights.down, over, precision=matmul_precision(inner.dtype))
    return out if weights.down_bias is None else out + weights.down_bias[:, None]


def _gated(gate_up: Array, weights: ExpertWeights, limit: float | None) -> Array:
    """The gated values ``[..., F]`` of ``[..., 2, F]``."""
    if weights.gelu:
        return gelu_gate(gate_up)
    return gate(gate_up) if limit is None else bounded_gate(gate_up, limit)
