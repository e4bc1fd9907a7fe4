"""What a draft reads of the frozen target, computed in the step or stored beforehand.

In 8 bits every stretch of up to 128 channels of a head or of a hidden state has a scale of its own:
hidden states have a few channels that are far larger than the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from longspec_jax.axes import Array
from longspec_jax.config.target import TargetConfig

from .step import Batch
from .target import TargetView, plain_positions, run_target

GROUP = 128
"""Most channels of one scale in 8 bits."""
SCALE = "_scale"
"""Behind the name of codes: that of their scales."""


@dataclass(frozen=True)
class Reads:
    """What a kind of draft reads of the target's forward over a row at plain positions."""

    hidden: bool = False
    """The final hidden states."""
    keys_values: bool = False
    """Keys and values of the layer that drafts read."""
    kept: tuple[int, ...] = ()
    """Layers whose residual stream it reads, -1 for the embedding."""

    def words(self, target: TargetConfig) -> str:
        """What is read, for messages."""
        parts = [f"keys and values of layer {target.read_layer}"] * self.keys_values
        parts += ["final hidden states"] * self.hidden
        layers = ", ".join(map(str, self.kept))
        return " and ".join(parts + [f"hidden states after layers {layers}"] * bool(self.kept))


def target_view(
    config: TargetConfig,
    params: PyTree,
    batch: Batch,
    positions: Array,
    mlp_chunk: int = 0,
    keep: tuple[int, ...] = (),
) -> TargetView:
    """What a draft reads, without a gradient: stored with the batch, or of the target's forward.

    Args:
      config: of the target.
      params: its parameters.
      batch: one micro-batch ``[B, T]``. What was not stored is None in its view.
      positions: of its tokens.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all.
      keep: layers whose residual stream is read.
    """
    if batch.view is None:
        view = run_target(config, params, batch.tokens, positions, mlp_chunk, keep)
        return jax.lax.stop_gradient(view)
    parts = _whole(batch.view, config.dtype)
    kept = {layer: parts[f"kept_{layer}"] for layer in keep}
    return TargetView(parts["hidden"], parts["keys"], parts["values"], kept)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def parts_of_rows(
    config: TargetConfig, reads: Reads, int8: bool, mlp_chunk: int, params: PyTree, tokens: Array
) -> dict[str, Array]:
    """What is stored of rows ``[B, T]``, every part ``[B, T, ...]``; the view of a batch.

    Args:
      config: of the target.
      reads: what of its forward.
      int8: in 8 bits with float32 scales; otherwise as the forward computes it.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all.
      params: the target's parameters.
      tokens: of the rows.
    """
    rows, length = tokens.shape
    positions = plain_positions((1, rows), length)[0]
    view = run_target(config, params, tokens, positions, mlp_chunk, reads.kept)
    parts = {"hidden": view.hidden} if reads.hidden else {}
    parts |= {"keys": view.keys, "values": view.values} if reads.keys_values else {}
    parts |= {f"kept_{layer}": view.kept[layer] for layer in reads.kept}
    return _codes(parts) if int8 else parts


def _codes(parts: Mapping[str, Array]) -> dict[str, Array]:
    """Every part in 8 bits, and its scales."""
    found = {}
    for name, part in parts.items():
        groups = part.shape[-1] // math.gcd(part.shape[-1], GROUP)
        grouped = part.astype(jnp.float32).reshape(*part.shape[:-1], groups, -1)
        scale = jnp.max(jnp.abs(grouped), axis=-1) / 127
        steps = grouped / jnp.where(scale > 0, scale, 1.0)[..., None]
        found[name] = jnp.round(steps).astype(jnp.int8).reshape(part.shape)
        found[name + SCALE] = scale
    return found


def _whole(parts: Mapping[str, Array], dtype: str) -> dict[str, Any]:
    """Every part as the forward computes it, or nearly so; None for what was not stored."""
    found: dict[str, Any] = dict.fromkeys(("hidden", "keys", "values"))
    for name, part in parts.items():
        if name.endswith(SCALE):
            continue
        if (scale := parts.get(name + SCALE)) is not None:
            grouped = part.astype(jnp.float32).reshape(*scale.shape, -1)
            part = (grouped * scale[..., None]).reshape(part.shape).astype(jnp.dtype(dtype))
        found[name] = part
    return found
