"""Weights of 8 or 4 bits, as they are stored, and the matrix that they stand for."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Float, Float16, Int, Int8, PyTree

from longspec_jax.axes import Array, Leaf

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit floats of MXFP4, by their lower three bits; the fourth is the sign."""
MIDDLE = 8
"""The zero of unsigned 4-bit codes that have no zero points of their own."""
FINE = 16, 32
"""Inputs of groups so small that kernels apply their scales to codes, in float32."""
UNIT = 128
"""Inputs that share a unit, of which their groups' scales are multiples."""


class QuantisedWeights:
    """Weights of 8 or 4 bits, in the order of their inputs or in that of a kernel."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """``[*out, C]``."""
        raise NotImplementedError

    @property
    def out_axes(self) -> tuple[int, ...]:
        """Sizes of the produced axes."""
        return self.sizes[:-1]

    @property
    def inputs(self) -> int:
        """The size ``C`` of the contraction."""
        return self.sizes[-1]

    @property
    def label(self) -> str:
        """The kind of codes, as reports name it."""
        raise NotImplementedError

    def plain(self) -> "QuantisedMatrix":
        """The same weights in the order of their inputs."""
        raise NotImplementedError

    def kernel(self, dtype: DTypeLike) -> Float[Array, "C ..."]:
        """The dequantised weights as a whole layer has them: inputs first, in their own order."""
        return self.plain().kernel(dtype)


@struct.dataclass
class QuantisedMatrix(QuantisedWeights):
    """Weights of a linear map from ``C`` inputs to outputs of one or more axes, 8 or 4 bits each.

    Every output has a scale for each *group* of its inputs: one group, or groups of 16 to 128.
    A scale a tensor, or one for 128 x 128 weights, is repeated for each output. A weight is
    ``(code - zero) * scale + offset`` in float32, rounded once to the dtype it is wanted in.

    Scales and offsets may be *counted*: small integers, times a unit of :data:`UNIT` inputs. These
    products are exact in float32. So GGUF's K types take the bytes of their file, nearly.
    """

    codes: Leaf[Array]
    """``float8_e4m3fn[*out, C]`` or ``int8[*out, C]``; or 4-bit codes ``uint8[*out, C / 2]``, of
    which the lower four bits of a byte are the earlier input."""
    scale: Leaf[Array]
    """``float32[*out, G]``, or ``int8`` where there are units."""
    zero: Leaf[Int8[Array, "*out G"]] | None = None
    """What is subtracted from integer codes. Absent it is 0, and :data:`MIDDLE` for 4 bits without
    offsets."""
    order: Leaf[Int[Array, " C"]] | None = None
    """The input that every code multiplies, where inputs are sorted by group (act-order)."""
    group: int = struct.field(pytree_node=False, default=0)
    """Inputs that share a scale; of all inputs if 0. The last group may be smaller."""
    floating: bool = struct.field(pytree_node=False, default=False)
    """Whether 4-bit codes are floats (:data:`E2M1`)."""
    offset: Leaf[Array] | None = None
    """What is added to the product, as ``scale`` (GGUF). Goes without ``zero``."""
    unit: Leaf[Float16[Array, "*out U"]] | None = None
    """Of scales."""
    offset_unit: Leaf[Float16[Array, "*out U"]] | None = None
    """Of offsets."""

    @classmethod
    def rounded(cls, whole: Float[Array, "*out C"]) -> "QuantisedMatrix":
        """Weights in 8-bit integers, each output with a scale of its own.

        A scale is a 127th of the output's largest weight; an output of zeros stays zero.
        """
        return cls(*_rounded(whole))

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.codes.dtype == jnp.uint8

    @property
    def sizes(self) -> tuple[int, ...]:
        """``[*out, C]``."""
        *out, stored = self.codes.shape
        return *out, stored * (2 if self.packed else 1)

    @property
    def label(self) -> str:
        """The kind of codes, as reports name it."""
        return label_of(self.codes.dtype, self.floating)

    @property
    def middle(self) -> int:
        """What is subtracted from integer codes that have no zero points."""
        return MIDDLE if self.packed and not self.floating and self.offset is None else 0

    @property
    def fine(self) -> bool:
        """Whether groups are :data:`FINE`, of integers without zero points."""
        whole = self.zero is None and not self.floating
        return whole and self.group in FINE and self.codes.dtype in (jnp.int8, jnp.uint8)

    @property
    def groups(self) -> int:
        """Number of groups ``G``."""
        return self.scale.shape[-1]

    def flat(self) -> "QuantisedMatrix":
        """The same weights with one axis of outputs, ``[N, C]``, as kernels take them."""

        def rows(each: Array) -> Array:
            return each.reshape(-1, each.shape[-1])

        by_output = jax.tree.map(rows, dataclasses.replace(self, order=None))
        return dataclasses.replace(by_output, order=self.order)

    def dequantised(self, dtype: DTypeLike) -> Float[Array, "*out C"]:
        """The weights in a floating dtype, in the order of the codes."""
        codes = self._widened()
        if self.zero is not None:
            codes -= self._of_inputs(self.zero.astype(jnp.float32))
        else:
            codes -= self.middle
        weights = codes * self._of_inputs(self._counted(self.scale, self.unit))
        if self.offset is not None:
            weights += self._of_inputs(self._counted(self.offset, self.offset_unit))
        return weights.astype(dtype)

    def plain(self) -> "QuantisedMatrix":
        """Itself."""
        return self

    def kernel(self, dtype: DTypeLike) -> Float[Array, "C ..."]:
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

    def _counted(self, numbers: Array, unit: Array | None) -> Array:
        """Scales or offsets of groups as float32 numbers."""
        if unit is None:
            return numbers
        units = jnp.repeat(unit.astype(jnp.float32), UNIT // self.group, axis=-1)
        return numbers.astype(jnp.float32) * units[..., : self.groups]

    def _of_inputs(self, of_groups: Array) -> Array:
        """Numbers of groups ``[*out, G]`` as numbers of inputs, ``[*out, C]`` or ``[*out, 1]``."""
        if of_groups.shape[-1] == 1:
            return of_groups
        return jnp.repeat(of_groups, self.group, axis=-1)[..., : self.inputs]


@jax.jit  # As one program it holds no float32 copy of the weights.
def _rounded(whole: Array) -> tuple[Array, Array]:
    wide = whole.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=-1, keepdims=True) / 127
    codes = jnp.round(wide / jnp.where(scale > 0, scale, 1))
    return codes.astype(jnp.int8), scale


def quantised_matrices(params: PyTree) -> list[QuantisedWeights]:
    """All quantised weights of a tree of parameters."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantisedWeights))
    return [leaf for leaf in leaves if isinstance(leaf, QuantisedWeights)]


def has_unpacked(params: PyTree) -> bool:
    """Whether some quantised weights of a tree of parameters are in the order of their inputs."""
    return any(isinstance(each, QuantisedMatrix) for each in quantised_matrices(params))


def label_of(codes: Any, floating: bool = False) -> str:
    """The kind of codes of a dtype, as reports name it."""
    if codes == jnp.uint8:
        return "mxfp4" if floating else "int4"
    return "fp8" if codes == jnp.float8_e4m3fn else "int8"
