"""Matmuls with the weights of a quantised checkpoint: 8 or 4 bits, as they are stored.

One type holds every format (:class:`QuantisedMatrix`). What it stands for is the matrix of its
*dequantised* weights, ``(code - zero) * scale`` in float32, rounded once to the dtype of the
activations; activations are not quantised. A text is the same with and without speculation because
both multiply with that matrix.

In plain JAX a matmul dequantises its weights first, one layer's at a time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int, Int8

from longspec_jax.axes import Array, Leaf
from longspec_jax.ops.dispatch import Op
from longspec_jax.ops.matmul.few_rows import gate, matmul_precision
from longspec_jax.ops.partitioned import one_device

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit floats of MXFP4, by their lower three bits; the fourth is the sign."""
MIDDLE = 8
"""The zero of unsigned 4-bit codes that have no zero points of their own."""


@struct.dataclass
class QuantisedMatrix:
    """Weights of a linear map from ``C`` inputs to outputs of one or more axes, 8 or 4 bits each.

    Every output has a scale for each *group* of its inputs: one group, or groups of 32 to 128.
    A scale a tensor, or one for 128 x 128 weights, is repeated for each output.
    """

    codes: Leaf[Array]
    """``float8_e4m3fn[*out, C]`` or ``int8[*out, C]``; or 4-bit codes ``uint8[*out, C / 2]``, of
    which the lower four bits of a byte are the earlier input."""
    scale: Leaf[Float[Array, "*out G"]]
    """In float32."""
    zero: Leaf[Int8[Array, "*out G"]] | None = None
    """What is subtracted from integer codes. Absent it is 0, and :data:`MIDDLE` for 4 bits."""
    order: Leaf[Int[Array, " C"]] | None = None
    """The input that every code multiplies, where inputs are sorted by group (act-order)."""
    group: int = struct.field(pytree_node=False, default=0)
    """Inputs that share a scale; of all inputs if 0. The last group may be smaller."""
    floating: bool = struct.field(pytree_node=False, default=False)
    """Whether 4-bit codes are floats (:data:`E2M1`)."""

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.codes.dtype == jnp.uint8

    @property
    def inputs(self) -> int:
        """The size ``C`` of the contraction."""
        return self.codes.shape[-1] * (2 if self.packed else 1)

    @property
    def out_axes(self) -> tuple[int, ...]:
        """Sizes of the produced axes."""
        return self.codes.shape[:-1]

    @property
    def label(self) -> str:
        """The kind of codes, as reports name it."""
        if self.packed:
            return "mxfp4" if self.floating else "int4"
        return "fp8" if self.codes.dtype == jnp.float8_e4m3fn else "int8"

    @property
    def groups(self) -> int:
        """Number of groups ``G``."""
        return self.scale.shape[-1]

    def flat(self) -> "QuantisedMatrix":
        """The same weights with one axis of outputs, ``[N, C]``, as kernels take them."""
        rows = [
            None if each is None else each.reshape(-1, each.shape[-1])
            for each in (self.codes, self.scale, self.zero)
        ]
        return dataclasses.replace(self, codes=rows[0], scale=rows[1], zero=rows[2])

    def dequantised(self, dtype: Any) -> Float[Array, "*out C"]:
        """The weights in a floating dtype, in the order of the codes."""
        codes = self._widened()
        if self.zero is not None:
            codes -= self._of_inputs(self.zero.astype(jnp.float32))
        elif self.packed and not self.floating:
            codes -= MIDDLE
        return (codes * self._of_inputs(self.scale)).astype(dtype)

    def kernel(self, dtype: Any) -> Float[Array, "C ..."]:
        """The dequantised weights as a whole layer has them: inputs first, in their own order."""
        matrix = jnp.moveaxis(self.dequantised(dtype), -1, 0)
        return matrix if self.order is None else jnp.zeros_like(matrix).at[self.order].set(matrix)

    def _widened(self) -> Array:
        """The codes as float32 numbers ``[*out, C]``."""
        if not self.packed:
            return self.codes.astype(jnp.float32)
        pairs = jnp.stack([self.codes & 15, self.codes >> 4], axis=-1)
        codes = pairs.reshape(*self.out_axes, self.inputs)
        if not self.floating:
            return codes.astype(jnp.float32)
        return jnp.asarray([*E2M1, *(-each for each in E2M1)], jnp.float32)[codes]

    def _of_inputs(self, of_groups: Array) -> Array:
        """Numbers of groups ``[*out, G]`` as numbers of inputs, ``[*out, C]`` or ``[*out, 1]``."""
        if of_groups.shape[-1] == 1:
            return of_groups
        return jnp.repeat(of_groups, self.group, axis=-1)[..., : self.inputs]


def quantised_matrices(params: Any) -> list[QuantisedMatrix]:
    """All quantised weights of a tree of parameters."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    return [leaf for leaf in leaves if isinstance(leaf, QuantisedMatrix)]


def quantised_matmul(
    x: Float[Array, "*rows C"], weights: QuantisedMatrix, bias: Array | None = None
) -> Array:
    """``[*rows, *out]`` in the dtype of ``x``: ``x @ dequantised.T``, plus ``bias[*out]``."""
    return QUANTISED_MATMUL(x, weights, bias)


def quantised_matmul_partials(
    x: Float[Array, "*rows C"], weights: QuantisedMatrix
) -> Float[Array, "S *rows N"]:
    """Split-K partials, whose sum is the result: one of the dtype of ``x``, or several float32."""
    return QUANTISED_MATMUL_PARTIALS(x, weights)


def quantised_gated_matmul(
    x: Float[Array, "*rows C"], weights: QuantisedMatrix
) -> Float[Array, "*rows F"]:
    """``silu`` of the first of two matmuls, ``out = (2, F)``, times the second."""
    return QUANTISED_GATED_MATMUL(x, weights)


def quantised_matmul_xla(x: Array, weights: QuantisedMatrix, bias: Array | None = None) -> Array:
    """The matmul in plain JAX; differentiable in ``x``."""
    x, weights = _in_turn(x, weights)
    if weights.order is not None:
        x = jnp.take(x, weights.order, axis=-1)
    matrix = weights.dequantised(x.dtype)
    over = ((x.ndim - 1,), (matrix.ndim - 1,)), ((), ())
    out = jax.lax.dot_general(x, matrix, over, precision=matmul_precision(x.dtype))
    return out if bias is None else out + bias


def quantised_matmul_partials_xla(x: Array, weights: QuantisedMatrix) -> Array:
    """The whole result as the only partial."""
    return quantised_matmul_xla(x, weights)[None]


def quantised_gated_matmul_xla(x: Array, weights: QuantisedMatrix) -> Array:
    """The gated matmul in plain JAX."""
    return gate(quantised_matmul_xla(x, weights))


def _in_turn(x: Array, weights: QuantisedMatrix) -> tuple[Array, QuantisedMatrix]:
    """The operands, so that the weights are dequantised when the rows are there and not before.

    Else a compiler may do it for all layers at once, or before the loop over rounds: a whole model
    in 16 bits. XLA for CPUs drops barriers first and orders operations then, so the codes depend
    on a row's number being NaN and infinite, which none is. On a mesh reading that one number would
    cost a transfer.
    """
    if not one_device():
        return jax.lax.optimization_barrier((x, weights))
    first = x[(0,) * x.ndim]
    never = jax.lax.stop_gradient(jnp.isnan(first) & jnp.isinf(first))
    codes = jnp.where(never, 0, weights.codes)
    return x, dataclasses.replace(weights, codes=codes.astype(weights.codes.dtype))


QUANTISED_MATMUL = Op("quantised_matmul", {"xla": quantised_matmul_xla})
QUANTISED_MATMUL_PARTIALS = Op("quantised_matmul_partials", {"xla": quantised_matmul_partials_xla})
QUANTISED_GATED_MATMUL = Op("quantised_gated_matmul", {"xla": quantised_gated_matmul_xla})
