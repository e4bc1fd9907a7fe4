"""Random weights of a target as a quantised checkpoint stores them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.config.target import TargetConfig
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.sharding import path_name
from longspec_jax.weights.gguf.matrices import Form

from .arguments import EXPERTS, GGUF, GROUPS, Q4_K_M


@functools.partial(jax.jit, static_argnames=("stored", "out_axes", "inputs", "scale"))
def random_matrix(
    key: jax.Array, *, stored: str, out_axes: tuple[int, ...], inputs: int, scale: float
) -> QuantisedMatrix:
    """Random codes, of one scale.

    Args:
      key: of the draw.
      stored: one of :data:`.arguments.GROUPS` or :data:`.arguments.GGUF`.
      out_axes: sizes of the produced axes.
      inputs: size of the contraction.
      scale: of the weights, about.
    """
    if stored in GGUF:
        return _random_gguf(key, Form.of(GGUF[stored]), out_axes, inputs, scale)
    width = inputs // 2 if stored == "w4a16" else inputs
    # Of 8-bit floats, half of the exponents: no code is NaN.
    codes = jax.random.bits(key, (*out_axes, width), jnp.uint8)
    if stored != "w4a16":
        codes = jax.lax.bitcast_convert_type(codes & 0xBF, jnp.float8_e4m3fn)
    group = GROUPS[stored]
    groups = -(-inputs // group) if group else 1
    return QuantisedMatrix(
        codes, jnp.full((*out_axes, groups), scale / 4, jnp.float32), group=group
    )


def _random_gguf(
    key: jax.Array, form: Form, out_axes: tuple[int, ...], inputs: int, scale: float
) -> QuantisedMatrix:
    """Random codes of a form of GGUF's, whose offsets are half of the codes."""
    scale /= 4 if form.narrow else 64
    numbers = {"scale": scale, "offset": -7.5 * scale, "unit": scale, "offset_unit": -scale}
    if form.counted:
        numbers |= {"scale": 1, "offset": 8}
    arrays = {
        name: jnp.full((*out_axes, field.width), numbers[name], field.dtype)
        for name, field in form.fields(inputs).items()
        if name != "codes"
    }
    codes = jax.random.bits(key, (*out_axes, form.fields(inputs)["codes"].width), jnp.uint8)
    codes = codes if form.narrow else jax.lax.bitcast_convert_type(codes, jnp.int8)
    return form.matrix(arrays | {"codes": codes})


def _in_mixture(names: list[str]) -> str:
    """How a kernel is stored in :data:`.arguments.Q4_K_M`."""
    finer = int(names[0].removeprefix("layers_")) % 2 == 1
    if finer and "qkv" in names:
        return "q4_k_q6_k"
    return "q6_k" if finer and "down" in names else "q4_k"


def is_quantised(path: Any) -> bool:
    """Whether a quantised checkpoint is loaded with this parameter in its own bits."""
    names = path_name(path).split("/")
    return names[-1] == "kernel" and "recurrence" not in names


def quantised_leaf(
    path: Any, leaf: jax.ShapeDtypeStruct, key: jax.Array, stored: str, scale: float
) -> Any:
    """The matrix in place of a layer's ``kernel``; None for what stays in 16 bits.

    The last projection of attention contracts heads and their widths; all others one axis. Of
    experts in 4-bit floats they are the matrices.
    """
    names = path_name(path).split("/")
    if stored == EXPERTS:
        if names[-1] not in ("expert_gate_up", "expert_down"):
            return None
        return _random_floats(key, shape=leaf.shape, scale=scale)
    if stored == Q4_K_M and names == ["head"]:
        vocabulary, inputs = leaf.shape
        return random_matrix(key, stored="q6_k", out_axes=(vocabulary,), inputs=inputs, scale=scale)
    if not is_quantised(path):
        return None
    if stored == Q4_K_M:
        stored = _in_mixture(names)
    contracted = 2 if path_name(path).endswith("out/kernel") else 1
    inputs, out_axes = math.prod(leaf.shape[:contracted]), tuple(leaf.shape[contracted:])
    return random_matrix(key, stored=stored, out_axes=out_axes, inputs=inputs, scale=scale)


@functools.partial(jax.jit, static_argnames=("shape", "scale"))
def _random_floats(key: jax.Array, *, shape: tuple[int, ...], scale: float) -> QuantisedMatrix:
    """Random 4-bit floats, whose magnitudes are 2.2 on the average."""
    codes = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), jnp.uint8)
    power = 2.0 ** round(math.log2(scale / 2.2))
    scales = jnp.full((*shape[:-1], shape[-1] // 32), power, jnp.float32)
    return QuantisedMatrix(codes, scales, group=32, floating=True)


def refuse_experts(config: TargetConfig, stored: str) -> None:
    """Raise for targets whose experts no such format is measured of."""
    if config.is_sparse != (stored == EXPERTS):
        raise ValueError(
            f"--weights={stored}: sparse targets are measured whole or with experts in {EXPERTS}, "
            "others in the other formats"
        )
