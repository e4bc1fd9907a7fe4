"""The experts of a layer in a GGUF file, as Hugging Face's folders have them."""

from collections.abc import Mapping

from longspec_jax.config.layers import MAX_EXPERTS
from longspec_jax.weights.checkpoint import Tensor
from longspec_jax.weights.gguf import layouts
from longspec_jax.weights.gguf.blocks import decoded, packed
from longspec_jax.weights.gguf.file import StoredTensor


def each_expert(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Experts of Qwen's, which Hugging Face has one by one."""
    return {
        f"mlp.experts.{index}.{name}_proj.weight": layouts.part(decoded(stored), index)
        for name in ("gate", "up", "down")
        if (stored := tensors.get(f"ffn_{name}_exps.weight")) is not None
        # One too many is refused, and small experts of a file may be millions.
        for index in range(min(stored.shape[0], MAX_EXPERTS + 1) if len(stored.shape) == 3 else 0)
    }


def all_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """gpt-oss's experts, stacked, gate and up by turns; those of MXFP4 in their own bits."""
    found: dict[str, Tensor] = {}
    for kind, named in (("weight", ""), ("bias", "_bias")):
        each = [tensors.get(f"ffn_{name}_exps.{kind}") for name in ("gate", "up", "down")]
        if None in each:
            continue  # Reported as missing.
        gate, up, down = (stored for stored in each if stored is not None)
        if gate.shape != up.shape:
            continue
        ours = f"mlp.experts.{{}}{named}".format
        if kind == "weight" and is_mxfp4(tensors):
            for change, suffix in ((layouts.blocks, "blocks"), (layouts.block_scales, "scales")):
                halves = (change(packed(stored)) for stored in (gate, up))
                found[f"{ours('gate_up_proj')}_{suffix}"] = layouts.by_turns(*halves, axis=1)
                found[f"{ours('down_proj')}_{suffix}"] = change(packed(down))
            continue
        one, other, last = map(decoded, (gate, up, down))
        if kind == "weight":
            one, other, last = map(layouts.inputs_first, (one, other, last))
        found[ours("gate_up_proj")] = layouts.by_turns(one, other, axis=-1)
        found[ours("down_proj")] = last
    return found


def is_mxfp4(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether the matrices of all experts are of MXFP4, and there are some."""
    kinds = {stored.type.name for name, stored in tensors.items() if name.endswith("_exps.weight")}
    return kinds == {"MXFP4"}
