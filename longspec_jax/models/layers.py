"""Building blocks shared by target and draft: RMS norm, rotary embedding, projections, SwiGLU.

Precision follows one rule: parameters and activations in the configured dtype; norms and rotary
angles in float32. Projections keep their head axes, so that tensor parallelism is one
PartitionSpec and no reshape is left to the caller.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from longspec_jax.axes import Array
from longspec_jax.config.layers import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    Rotary,
    YarnRopeScaling,
)
from longspec_jax.ops.layer import residual_norm, rms_norm
from longspec_jax.ops.matmul import few_rows, outputs_first
from longspec_jax.ops.matmul.chunked_mlp import chunked_mlp
from longspec_jax.ops.matmul.few_rows import gelu_gate
from longspec_jax.ops.matmul.ordered import matmul as ordered_matmul
from longspec_jax.ops.matmul.outputs_first import CHOOSE, OutputsFirst
from longspec_jax.ops.matmul.quantised import quantised_matmul
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix, QuantisedWeights
from longspec_jax.ops.partitioned import row_shares

INITIAL_SCALE = 0.02
P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)


def applied(
    method: Callable[Concatenate[M, P], R],
    module: M,
    params: PyTree,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """What a method of a module's class returns with these parameters, as flax's ``apply``.

    The arguments and the result have the method's types, which ``apply`` forgets.
    """
    found: Any = module.apply({"params": params}, *args, method=method, **kwargs)
    return found


def parameter(
    module: nn.Module,
    name: str,
    initial: Callable[..., Array],
    shape: Sequence[int],
    dtype: jnp.dtype,
) -> Array:
    """A parameter of a module: the stored one, or a new one while the module is initialised.

    ``module.param`` would trace the initialiser in every trace, to compare shapes: a tenth of the
    time that it takes to trace a round.

    Raises:
      ValueError: the stored one has another shape.
    """
    if not module.has_variable("params", name):
        return module.param(name, initial, tuple(shape), dtype)
    stored = module.get_variable("params", name)
    codes, *_ = jax.tree.leaves(stored)  # Of a quantised one they come first.
    if jnp.shape(codes) != tuple(shape):
        raise ValueError(
            f"the stored {name} has the shape {jnp.shape(codes)}, the configuration says "
            f"{tuple(shape)}; use the weights of this configuration"
        )
    return stored


class RMSNorm(nn.Module):
    """``x / rms(x) * scale`` over the last axis, computed in float32."""

    eps: float
    dtype: jnp.dtype
    offset: bool = False
    """Whether it multiplies by ``1 + scale``."""

    def __call__(self, x: Array) -> Array:
        """Normalise ``[..., width]``; returns the configured dtype."""
        return rms_norm(jnp.asarray(x), self.weights(x.shape[-1]), self.eps).astype(self.dtype)

    def add(self, x: Array, delta: Array | None) -> tuple[Array, Array]:
        """Add a sublayer's output, split-K partials ``[S, ..., width]`` or none.

        Returns:
          The stream with the output added, and its norm.
        """
        return residual_norm(x, delta, self.weights(x.shape[-1]), self.eps)

    @nn.compact
    def weights(self, *shape: int) -> Array:
        """What is multiplied by, of a shape; in float32 if it is ``1 + scale``."""
        if self.offset:
            stored = parameter(self, "scale", nn.initializers.zeros, shape, self.dtype)
            return 1 + stored.astype(jnp.float32)
        return parameter(self, "scale", nn.initializers.ones, shape, self.dtype)


STORED = QuantisedWeights, OutputsFirst
"""What a kernel may be instead of an array with its inputs first."""


class Projection(nn.Module):
    """A linear map from the last axes of the input to new axes, optionally with a bias.

    Where the parameters hold a :class:`QuantisedWeights` or :class:`OutputsFirst` as ``kernel``, it
    is multiplied as it is stored. So a model of quantised and whole layers needs no configuration
    of its own.
    """

    ordered: ClassVar[bool] = False
    """Whether rows have the same bits whatever rows are next to them, where a kernel serves."""
    in_axes: Sequence[int]
    """Sizes of the contracted axes, the last of the input."""
    out_axes: Sequence[int]
    """Sizes of the produced axes."""
    dtype: jnp.dtype
    bias: bool = False

    def __call__(self, x: Array) -> Array:
        """Map ``[..., *in_axes]`` to ``[..., *out_axes]``."""
        kernel, bias = self._stored()
        return multiply(self._flat(x), kernel, bias, ordered=self.ordered)

    def partials(self, x: Array) -> Array:
        """Split-K partials ``[S, ..., out]`` of the mapped input; one axis out, no bias."""
        kernel, _ = self._stored()
        return multiply(self._flat(x), kernel, ordered=self.ordered, split=True)

    def gated(self, x: Array) -> Array:
        """The second half of the mapped input, ``[..., 2, F]``, times the silu of the first."""
        kernel, _ = self._stored()
        return multiply(self._flat(x), kernel, ordered=self.ordered, gated=True)

    def weights(self) -> tuple[Array, Array | None]:
        """The kernel ``[prod(in_axes), *out_axes]``, and the bias ``[*out_axes]`` or none.

        Quantised weights are dequantised.
        """
        kernel, bias = self._stored()
        return kernel.kernel(self.dtype) if isinstance(kernel, STORED) else kernel, bias

    @nn.compact
    def _stored(self) -> tuple[Any, Array | None]:
        """The kernel as it is stored, and the bias."""
        kernel, bias = self.get_variable("params", "kernel"), None
        if not isinstance(kernel, STORED):
            shape = (*self.in_axes, *self.out_axes)
            normal = nn.initializers.normal(INITIAL_SCALE)
            kernel = parameter(self, "kernel", normal, shape, self.dtype)
            kernel = kernel.reshape(-1, *self.out_axes)
        if self.bias:
            bias = parameter(self, "bias", nn.initializers.zeros, self.out_axes, self.dtype)
        return kernel, bias

    def _flat(self, x: Array) -> Array:
        return x.reshape(*x.shape[: x.ndim - len(self.in_axes)], -1)


class OrderedProjection(Projection):
    """A :class:`Projection` whose rows have the same bits whatever rows are next to them."""

    ordered: ClassVar[bool] = True


def multiply(
    x: Array,
    kernel: Array | OutputsFirst | QuantisedWeights,
    bias: Array | None = None,
    *,
    ordered: bool,
    gated: bool = False,
    split: bool = False,
) -> Array:
    """As :func:`longspec_jax.ops.matmul.few_rows.matmul`, by the op of weights stored like this."""
    if isinstance(kernel, QuantisedWeights):
        return quantised_matmul(x, kernel, bias, ordered=ordered, gated=gated, split=split)
    if isinstance(kernel, OutputsFirst):
        return outputs_first.matmul(x, kernel, bias, gated, split)
    whole = ordered_matmul if ordered else few_rows.matmul
    return whole(x, kernel, bias, gated, split)


def rounded(layer: PyTree, name: str = "") -> PyTree:
    """Parameters of a layer with the weights of its projections in 8 bits.

    Quantised ones stay as they are, and experts and what chooses among them whole.

    Args:
      layer: a tree of parameters; modules whose names end in ``out`` contract two axes, heads and
        their width, all others one.
      name: of the module that they belong to.
    """
    if "kernel" not in layer:
        return {
            key: rounded(value, key) if isinstance(value, Mapping) else value
            for key, value in layer.items()
        }
    kernel, contracted = layer["kernel"], 2 if name.endswith("out") else 1
    if isinstance(kernel, STORED) or name in CHOOSE:
        return layer
    flat = kernel.reshape(-1, *kernel.shape[contracted:])
    return {**layer, "kernel": QuantisedMatrix.rounded(jnp.moveaxis(flat, 0, -1))}


class SwiGLU(nn.Module):
    """``down(silu(gate) * up)`` with gate and up in one projection ``[D, 2, F]``; or with GELU."""

    width: int
    hidden: int
    dtype: jnp.dtype
    projection: Callable[..., Any] = Projection
    """Class of the projections."""
    chunk: int = 0
    """Most tokens of a device whose gates exist at once, for training on long rows; 0: all."""
    gelu: bool = False
    """Whether the gate is a GELU by its tanh formula."""

    def setup(self) -> None:
        """Declare the submodules."""
        self.gate_up = self.projection((self.width,), (2, self.hidden), self.dtype)
        self.down = self.projection((self.hidden,), (self.width,), self.dtype)

    def __call__(self, x: Array) -> Array:
        """Map ``[..., D]`` to split-K partials ``[S, ..., D]`` of the result."""
        if self.chunk and x.shape[0] * x.shape[1] > self.chunk * row_shares(x.shape[0]):
            kernels = self.gate_up.weights()[0], self.down.weights()[0]
            return chunked_mlp(x, *kernels, chunk=self.chunk, gelu=self.gelu)[None]
        if self.gelu:
            return self.down.partials(gelu_gate(self.gate_up(x)))
        return self.down.partials(self.gate_up.gated(x))


class GroupedQKV(nn.Module):
    """Query, key and value heads in one projection, grouped by key/value head: ``[D, K, G+2, H]``.

    The grouping keeps a key/value head and its queries together, so that the one fused
    projection still shards over key/value heads.
    """

    width: int
    num_kv_heads: int
    num_groups: int
    head_width: int
    dtype: jnp.dtype
    bias: bool
    projection: Callable[..., Any] = Projection
    """Class of the projection."""
    own: int = 2
    """Projections besides the queries': of keys and values, of both together, or none."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Map ``[B, T, D]`` to ``[B, T, K, G + 2, H]``: a head's queries, its key and its value.

        Without projections of their own these are copies, of the key or of a query.
        """
        heads = (self.num_kv_heads, self.num_groups + self.own, self.head_width)
        qkv = self.projection((self.width,), heads, self.dtype, self.bias, name="fused")(x)
        if self.own == 2:
            return qkv
        copies = [qkv[..., -1:, :]] * (2 - self.own)
        return jnp.concatenate([qkv, *copies], axis=3)


def rotary_angles(positions: Array, head_width: int, rotary: Rotary | None) -> tuple[Array, Array]:
    """Cosine and sine of the rotary angles, float32 ``[B, T, H / 2]``, for positions ``[B, T]``.

    The pair ``i`` of a head is its dimensions ``i`` and ``i + H / 2``. Pairs that do not rotate are
    the last ones, with cosine 1 and sine 0, which change no bit of them. Without a rotation these
    are all.
    """
    if rotary is None:
        shape = (*positions.shape, head_width // 2)
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    frequencies = jnp.asarray(rotary_frequencies(head_width, rotary))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(rotary.scaling, YarnRopeScaling | LongRopeScaling):
        factor = np.float32(rotary.scaling.attention_factor)
        rotates = np.arange(head_width // 2) < (rotary.width or head_width) // 2
        cos, sin = cos * np.where(rotates, factor, np.float32(1)), sin * factor
    return cos, sin


def rotary_frequencies(head_width: int, rotary: Rotary) -> np.ndarray:
    """Radians per position of every pair, float32 ``[H / 2]``, scaling applied.

    The pairs that do not rotate have 0. Rounded to float32 after every step, as in torch, with
    which the models were trained: at position 100000 a last-bit difference in a frequency is
    already visible in the angle.
    """
    width = rotary.width or head_width
    frequencies = _scaled_frequencies(rotary.block or head_width, rotary)[: width // 2]
    return np.pad(frequencies, (0, (head_width - width) // 2))


def _scaled_frequencies(width: int, rotary: Rotary) -> np.ndarray:
    """Frequencies of the rotated pairs, float32 ``[width / 2]``."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    # The float32 power of NumPy is off by one bit for a fifth of the frequencies, torch's rarely:
    # rounding the float64 power is closest to it.
    powers = np.float64(np.float32(rotary.theta)) ** exponents.astype(np.float64)
    frequencies = np.float32(1.0) / powers.astype(np.float32)
    match rotary.scaling:
        case None | ProportionalRopeScaling():
            return frequencies
        case LinearRopeScaling(factor):
            return (frequencies / np.float32(factor)).astype(np.float32)
        case Llama3RopeScaling(factor, low, high, original):
            wavelengths = 2 * np.pi / frequencies
            ramp = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
            scaled = (1 - ramp) * frequencies / factor + ramp * frequencies
            return scaled.astype(np.float32)
        case YarnRopeScaling() as yarn:
            stretched = np.float32(1) / (np.float32(yarn.factor) * powers.astype(np.float32))
            kept = np.float32(1) - yarn_ramp(width, rotary.theta, yarn)
            return stretched * (1 - kept) + frequencies * kept
        case LongRopeScaling() as long:
            factors = np.asarray(long.factors, np.float32)
            return np.float32(1) / (factors * powers.astype(np.float32))


def yarn_ramp(width: int, theta: float, yarn: YarnRopeScaling) -> np.ndarray:
    """How much every pair is stretched, float32 ``[width / 2]`` from 0 (not at all) to 1."""
    low, high = (
        width
        * math.log(yarn.original_max_positions / (turns * 2 * math.pi))
        / (2 * math.log(theta))
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    ramp = (np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(ramp, 0, 1)
