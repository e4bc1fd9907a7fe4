"""What a draft reads of the frozen target, computed in the step or stored beforehand."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jaxtyping import PyTree

from longspec_jax.axes import Array
from longspec_jax.config.target import TargetConfig

from .step import Batch
from .target import TargetView, plain_positions, run_target


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
    # What was not stored is None.
    parts: dict[str, Any] = {**dict.fromkeys(("hidden", "keys", "values")), **batch.view}
    kept = {layer: parts[f"kept_{layer}"] for layer in keep}
    return TargetView(parts["hidden"], parts["keys"], parts["values"], kept)


@partial(jax.jit, static_argnums=(0, 1, 2))
def parts_of_rows(
    config: TargetConfig, reads: Reads, mlp_chunk: int, params: PyTree, tokens: Array
) -> dict[str, Array]:
    """What is stored of rows ``[B, T]``, every part ``[B, T, ...]``; the view of a batch.

    Args:
      config: of the target.
      reads: what of its forward.
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
    return parts
