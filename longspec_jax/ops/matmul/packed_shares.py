"""Packing the quantised weights of a model: on one device, or on a mesh every device its share.

The codes of a packed row are in the kernel's order, which no mesh can cut. So each device packs the
part of a matrix that ``tp`` has given it. Either an axis of outputs is cut (heads, the width of an
MLP, a vocabulary), and results stay where they are made; or the inputs are (the output of
attention, the second matmul of an MLP), and every device has a part of each result.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

from longspec_jax.ops import hardware
from longspec_jax.ops.matmul.packed import LARGEST_FINE, LARGEST_SCALE, PackedMatrix, pack
from longspec_jax.ops.matmul.quantised_weights import UNIT, QuantisedMatrix, QuantisedWeights

AT_ONCE = 4
"""Matrices that are packed at the same time."""
_MAKING = Lock()


@struct.dataclass
class PackedShares(QuantisedWeights):
    """A matrix of which every device of ``tp`` has packed its share."""

    share: PackedMatrix
    """The sizes are those of one share. Arrays have one more axis in front, which ``tp`` cuts."""
    cut: int = struct.field(pytree_node=False)
    """The axis of ``[*out, C]`` that is cut; the last one is that of the inputs."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """``[*out, C]``."""
        shares = self.share.codes.shape[0]
        sizes = enumerate(self.share.shape)
        return tuple(size * (shares if axis == self.cut else 1) for axis, size in sizes)

    @property
    def label(self) -> str:
        """The kind of codes, as reports name it."""
        return self.share.label

    @property
    def cuts_inputs(self) -> bool:
        """Whether every device has a part of each result."""
        return self.cut == len(self.share.out_axes)

    @property
    def own(self) -> PackedMatrix:
        """The share of this device, inside of it."""
        return jax.tree.map(lambda leaf: leaf[0], self.share)

    def plain(self) -> QuantisedMatrix:
        """The same weights in the order of their inputs, on their mesh or on the one in use."""
        share = self.share
        sharding: Any = None if isinstance(share.codes, Tracer) else share.codes.sharding
        return jax.shard_map(
            lambda weights: weights.own.plain(),
            mesh=None if sharding is None else sharding.mesh,
            in_specs=P("tp"),
            out_specs=_specs(share, self.cut, len(share.shape), grouped=share.group > 0),
            check_vma=False,
        )(self)


def packed_params(params: PyTree, dtype: DTypeLike) -> Any:
    """Parameters with every matrix packed that the kernel of this machine reads.

    A matrix takes the place of the one it was made of, which is deleted: there is never a second
    copy of the model. A few are packed at a time, since every shape needs a program of its own.

    Args:
      params: a tree of arrays and matrices, on one device or spread over a mesh.
      dtype: of the activations.
    """
    if jnp.dtype(dtype).itemsize != 2:
        return params

    def packed(leaf: Any) -> Any:
        if not isinstance(leaf, QuantisedMatrix):
            return leaf
        try:
            hardware.require_hopper("the kernel for quantised weights")
            if leaf.floating and leaf.scale.max() > LARGEST_SCALE:
                raise NotImplementedError("the kernel multiplies such scales by 2^126")
            if leaf.fine and leaf.unit is None and jnp.abs(leaf.scale).max() > LARGEST_FINE:
                raise NotImplementedError("the kernel multiplies such scales by 2^24")
            spread = isinstance(leaf.codes.sharding, NamedSharding)
            packed = (pack_shares if spread else _pack)(leaf, jnp.dtype(dtype))
        except NotImplementedError:
            return leaf
        jax.block_until_ready(packed)
        for array in jax.tree.leaves(leaf):
            array.delete()
        return packed

    leaves, tree = jax.tree.flatten(params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return tree.unflatten(pool.map(packed, leaves))


def pack_shares(matrix: QuantisedMatrix, dtype: DTypeLike) -> PackedShares:
    """Pack the share of every device, as the mesh has cut the codes.

    Args:
      matrix: weights that are spread over a mesh.
      dtype: of the activations.

    Raises:
      NotImplementedError: if the kernel cannot read such shares.
    """
    sharding: Any = matrix.codes.sharding
    mesh, spec = sharding.mesh, tuple(sharding.spec)
    if mesh.shape["fsdp"] > 1 or mesh.shape["tp"] > 1 and "tp" not in spec:
        raise NotImplementedError("weights on a mesh are packed if tp cuts them, and no other axis")
    if matrix.floating:
        raise NotImplementedError("experts in 4-bit floats are packed only on one device")
    cut = spec.index("tp") if mesh.shape["tp"] > 1 else 0  # One share may be of any axis.
    grouped = matrix.groups > 1
    if cut == len(matrix.out_axes):
        if matrix.order is not None:
            raise NotImplementedError("inputs in another order belong to no share")
        own = matrix.inputs // mesh.shape["tp"]
        if grouped and (own % matrix.group or own == matrix.group):
            raise NotImplementedError("a share of the inputs is not several whole groups")
        if matrix.unit is not None and own % UNIT:
            raise NotImplementedError("a share of the inputs is not whole units")
    specs: Any = _specs(matrix, cut, matrix.codes.ndim, grouped=grouped)
    with _MAKING:  # Matrices are packed by several threads.
        packing = _packing(mesh, specs, dtype)
    return PackedShares(packing(matrix), cut)


@functools.cache
def _packing(mesh: Mesh, specs: Any, dtype: DTypeLike) -> Callable[..., PackedMatrix]:
    """Packs shares that lie like this: one program for all layers."""

    def share(matrix: QuantisedMatrix) -> PackedMatrix:
        return jax.tree.map(lambda leaf: leaf[None], pack(matrix, dtype))

    return jax.jit(
        jax.shard_map(share, mesh=mesh, in_specs=(specs,), out_specs=P("tp"), check_vma=False)
    )


def _specs(
    weights: QuantisedMatrix | PackedMatrix, cut: int, axes: int, *, grouped: bool
) -> QuantisedMatrix:
    """How ``tp`` cuts a matrix in the order of its inputs: an axis of the codes ``[*out, C]``.

    If it is that of the inputs, scales are cut where an output has several.
    """
    codes = P(*("tp" if axis == cut else None for axis in range(axes)))
    scale = codes if grouped or cut < axes - 1 else P()
    leaves: Any = {
        "codes": codes,
        "scale": scale,
        "zero": None if weights.zero is None else scale,
        "order": None if weights.order is None else P(),
        "offset": None if weights.offset is None else scale,
        "unit": None if weights.unit is None else scale,
        "offset_unit": None if weights.offset_unit is None else scale,
    }
    return QuantisedMatrix(**leaves, group=weights.group, floating=weights.floating)


_pack = jax.jit(pack, static_argnames="dtype")
