"""The device mesh and the one table of partition rules.

Mesh axes: ``data`` replicates parameters over batch shards, ``fsdp`` shards parameters and batch,
``tp`` shards heads, MLP width and vocabulary. Any of them may be 1. Parameters are matched by their
path, optimiser states and gradients have the same paths and follow.
"""

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from longspec_jax.config.names import BATCH_AXES, MESH_AXES

BATCH = P(BATCH_AXES)

RULES: tuple[tuple[str, P], ...] = (
    (r"(embedding|head|head/codes)$", P("tp", "fsdp")),  # [V, D]
    (r"head/(scale|offset|unit|offset_unit)$", P("tp", None)),
    (r"qkv/fused/kernel$", P("fsdp", "tp", None, None)),  # [D, K, G+2, H]
    (r"qkv/fused/bias$", P("tp", None, None)),  # [K, G+2, H]
    (r"cross_q/kernel$", P("fsdp", "tp", None)),  # [D, N, H]
    (r"cross_q/bias$", P("tp", None)),  # [N, H]
    (r"(attention/out|self_out|cross_out)/kernel$", P("tp", None, "fsdp")),  # [N, H, D]
    (r"recurrence/(inputs|rates)/kernel$", P("fsdp", "tp", None)),  # [D, J, W + Z] and [D, J, 2 P]
    (r"recurrence/(taps|decay|decay_bias)$", P("tp")),  # [J, W, 1, I] and [J, P]
    (r"recurrence/out/kernel$", P("tp", None, "fsdp")),  # [M, Y, D]
    (r"attention/out/bias$", P("fsdp")),  # [D]
    (r"attention/sinks$", P("tp", None)),  # [K, G]
    (r"layers_\d+/factor$", P()),  # [1]
    (r"input_(gate|projection)/kernel$", P()),  # [D, P], [P, D] and [D, L P]
    (r"fuse/kernel$", P(None, "fsdp")),  # [features D, D]
    (r"(feedback|centroids)/kernel$", P("fsdp", None)),  # [D, D] and [D, C]
    (r"block_\d+/kernel$", P("fsdp", None)),  # [D, D]
    (r"block_\d+/bias$", P(None)),  # [D]
    (r"gate_up/kernel$", P("fsdp", None, "tp")),  # [D, 2, F]
    (r"down/kernel$", P("tp", "fsdp")),  # [F, D]
    (r"qkv/fused/kernel/codes$", P("tp", None, None, "fsdp")),  # [K, G+2, H, D]
    (r"qkv/fused/kernel/(scale|zero|offset|unit|offset_unit)$", P("tp", None, None, None)),
    (r"gate_up/kernel/codes$", P(None, "tp", "fsdp")),  # [2, F, D]
    (r"gate_up/kernel/(scale|zero|offset|unit|offset_unit)$", P(None, "tp", None)),
    (r"(attention/out|self_out|cross_out|down)/kernel/codes$", P("fsdp", "tp")),  # [D, in]
    (
        r"(attention/out|self_out|cross_out|down|fuse)/kernel/(scale|zero|offset|unit|offset_unit)$",
        P("fsdp", None),
    ),
    (r"cross_q/kernel/codes$", P("tp", None, "fsdp")),  # [N, H, D]
    (r"cross_q/kernel/scale$", P("tp", None, None)),
    (r"fuse/kernel/codes$", P("fsdp", None)),  # [D, features D]
    (r"(router|shared_gate)/kernel$", P("fsdp", None)),  # [D, E] and [D, 1]
    (r"expert_gate_up$", P("tp", None, "fsdp")),  # [2 E, F, D]
    (r"expert_down$", P("tp", "fsdp", None)),  # [E, D, F]
    (r"expert_(gate_up|down)/(codes|scale)$", P("tp", None, None)),  # [2 E, F, in], [E, D, in]
    (r"(expert_gate_up_bias|expert_down_bias)$", P("tp", None)),  # [2 E, F] and [E, D]
    (r"(router/bias|expert_factor)$", P()),  # [E]
    (
        r"((^|(?<!kernel)(?<!head)(?<!expert_gate_up)(?<!expert_down)/)scale|kernel/order|(^|/)slots|mask_hidden|fuse/bias|confidence/(kernel|bias)|_conv/base)$",
        P(),
    ),
)


def make_mesh(data: int = 1, fsdp: int = 1, tp: int = 1) -> Mesh:
    """A mesh over the first ``data * fsdp * tp`` devices, its axes left to the compiler."""
    wanted, devices = data * fsdp * tp, jax.devices()
    if min(data, fsdp, tp) < 1 or wanted > len(devices):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tp={tp} needs {wanted} devices, {len(devices)} are "
            "here; every axis must be at least 1 and their product at most the device count"
        )
    return Mesh(np.asarray(devices[:wanted]).reshape(data, fsdp, tp), MESH_AXES)


def partition_spec(path: str) -> P:
    """The spec of the parameter at a ``/``-separated path; exactly one rule must match."""
    matches = [spec for pattern, spec in RULES if re.search(pattern, path)]
    if len(matches) != 1:
        raise ValueError(
            f"parameter {path!r} matches {len(matches)} partition rules, must match one"
        )
    return matches[0]


def param_shardings(mesh: Mesh, params: PyTree) -> Any:
    """A tree of ``NamedSharding`` for a tree of (possibly abstract) parameters."""

    def shard(path: tuple[Any, ...], leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
        name = path_name(path)
        spec = partition_spec(name)
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"parameter {name} {leaf.shape}: {size} does not divide over mesh axis "
                    f"{axis}={mesh.shape[axis]}; choose a mesh whose axes divide the model's shapes"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(shard, params)


def path_name(path: tuple[Any, ...]) -> str:
    """``layers_0/attention/qkv/fused/kernel`` for a key path of a parameter tree."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
