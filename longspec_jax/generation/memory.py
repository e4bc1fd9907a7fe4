"""Device memory that a call needs, computed before anything is allocated."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from longspec_jax.checks import shown_bytes
from longspec_jax.config.target import TargetConfig
from longspec_jax.decoding.adjustments import ADJUSTMENT_BYTES
from longspec_jax.decoding.cache import layer_slots, slot_bytes, states_bytes
from longspec_jax.decoding.rows import RowShardings
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.generation.models import Models
from longspec_jax.ops.attention.attention_xla import BLOCK
from longspec_jax.ops.hardware import HOPPER, WARPGROUP_ROWS, compute_capability
from longspec_jax.ops.matmul.experts import computed_rows
from longspec_jax.ops.matmul.quantised_weights import has_unpacked, quantised_matrices
from longspec_jax.ops.placement import tree_bytes
from longspec_jax.ops.recurrence import delta_rule
from longspec_jax.ops.recurrence.recurrence import SEGMENT

WIDEST_KERNEL = 256
"""Width of heads above which every GPU's attention is XLA's."""
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable: how much of the host's memory jax uses for a GPU, in GiB."""
PINNED_GIB = 64
"""The limit if the variable is not set."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a call takes on each device: weights and caches exactly, the rest estimated."""

    batch: int
    capacity: int
    """Cache slots of a row."""
    target_bytes: int
    """Weights of the target."""
    draft_bytes: int
    """Weights of the draft, without the tables that it shares with the target."""
    cache_bytes: int
    """The target's keys, values and states on the device. Most grow with the context."""
    draft_state_bytes: int
    """The draft's own state. A LongSpec draft's does not grow with the context; with retrieval it
    also holds summaries of the cache's blocks."""
    working_bytes: int
    """Activations of a prefill chunk or logits of a tree, whichever is larger, estimated; with
    partial verification also the part of the cache that it copies."""
    host_cache_bytes: int = 0
    """The target's keys and values in the host's memory, if the cache is offloaded."""
    ring_bytes: int = 0
    """Of the cache on the device, what layers with a window or a state hold. It does not grow with
    the context."""
    saved_bytes: int = 0
    """By which the cache is smaller than if these layers held every token."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that the call allocates besides the loaded weights."""
        return self.cache_bytes + self.draft_state_bytes + self.working_bytes


def plan_memory(
    models: Models,
    drafters: Sequence[Drafter],
    draft: PyTree,
    batches: Sequence[int],
    capacity: int,
    chunk: int,
    adjusted: bool = False,
) -> MemoryPlan:
    """The memory that a call takes on each of its devices, computed only from shapes.

    Args:
      drafters: those that it may run; they share one state.
      batches: rows of the batches that exist at once.
      adjusted: whether rows may have biases and penalties.
    """
    config, target, params = models.target_config, models.target, models.target_params
    nodes = max(drafter.tree.num_nodes for drafter in drafters)
    gathered = max(drafter.gathered_slots(capacity) for drafter in drafters)
    chunk_bytes = _layer_numbers(config, chunk) * jnp.dtype(config.dtype).itemsize
    # Logits, noise, perturbed scores and one compared copy, float32; two more of adjusted logits,
    # and the row's tables of biases and tokens.
    copies, tables = (6, ADJUSTMENT_BYTES * config.vocab_size) if adjusted else (4, 0)
    # Without a kernel for them, quantised weights are dequantised one kernel at a time, in float32.
    # An LM head that a kernel reads is multiplied by only a few rows.
    matrices = quantised_matrices(
        {name: part for name, part in params.items() if name != "head" or has_unpacked(part)}
    )
    widened = 4 * max((math.prod(each.out_axes) * each.inputs for each in matrices), default=0)
    chunk_bytes += score_bytes(target, chunk, capacity)
    verified = 4 * copies * nodes * config.vocab_size + split_bytes(target, nodes)
    working_row = max(chunk_bytes, verified) + tables
    cache = host = state = rings = saved = 0
    # The kernel of an LM head takes a copy with rows in whole groups of 8.
    vocabulary = config.vocab_size // target.width_shares
    uneven = target.batch_invariant and vocabulary % 8 > 0
    head_bytes = jnp.dtype(config.dtype).itemsize * vocabulary * config.model_width
    working = widened + uneven * head_bytes
    full, own_slots = config.full_layers, layer_slots(config, capacity, target.ring_step)
    ends = [
        (own, slot_bytes(config, config.layer(layer)))
        for layer, own in enumerate(own_slots)
        if layer not in full and config.source(layer) == layer
    ]
    for batch in batches:
        begin = partial(drafters[0].begin, batch=batch, capacity=capacity)
        begun = jax.eval_shape(begin, Params(params, draft))
        shards, held = RowShardings.for_params(params, batch), target.cache_bytes(batch, capacity)
        cache += held.device // shards.cache_shards
        host += held.host
        state += tree_bytes(begun) // shards.row_shards
        working += batch * working_row // shards.row_shards
        working += batch * gathered * len(full) * slot_bytes(config) // shards.cache_shards
        end = sum(own * slot for own, slot in ends) + states_bytes(config)
        rings += batch * end // shards.cache_shards
        whole = sum(capacity * slot for _, slot in ends)
        saved += batch * max(0, whole - end) // shards.cache_shards
    own = [each.own_params for each in models.drafts] if draft is not None else []
    return MemoryPlan(
        batch=sum(batches),
        capacity=capacity,
        target_bytes=device_bytes(params),
        draft_bytes=device_bytes(own),
        cache_bytes=cache,
        draft_state_bytes=state,
        working_bytes=working,
        host_cache_bytes=host,
        ring_bytes=rings,
        saved_bytes=saved,
    )


def _layer_numbers(config: TargetConfig, tokens: int) -> int:
    """Activations of the widest layer over the tokens of a prefill chunk."""
    width, most = config.model_width, 3 * config.mlp_width * tokens
    given = config.num_layers * (config.layer_inputs or 0)
    for kind in config.kinds:
        most = max(most, 3 * (kind.mlp_width or 0) * tokens)
        if (recurrence := kind.recurrence) is not None:
            # Twice what the convolution sees, and in float32 what the blocks of a chunk solve.
            heads, block = recurrence.value_heads, 2 * delta_rule.BLOCK
            solved = 4 * (recurrence.key_width + recurrence.value_width) + block
            own = 4 * recurrence.key_heads * recurrence.inputs_width + 2 * heads * solved
            most = max(most, own * min(tokens, SEGMENT))
        if (experts := kind.experts) is not None:
            rows = computed_rows(tokens, experts.chosen, experts.count)
            own = rows * (2 * width + 3 * experts.width) + tokens * experts.chosen * width
            own += 3 * tokens * (experts.shared or 0)
            most = max(most, own)
    return most + (6 * width + given) * tokens


def score_bytes(target: TargetModel, tokens: int, capacity: int) -> int:
    """Scores that XLA's attention of a prefill chunk holds at once, in float32.

    The chunk's queries meet a block of the cache, and then the chunk itself. Kernels hold none.
    """
    config = target.config
    widest = max(config.heads(config.layer(layer)).head_width for layer in range(config.num_layers))
    by_name = target.attention in ("xla", "reference")
    if jax.default_backend() == "gpu" and not by_name and widest <= WIDEST_KERNEL:
        return 0
    return 4 * config.num_heads * tokens * max(min(BLOCK, capacity), tokens)


def split_bytes(target: TargetModel, nodes: int) -> int:
    """What the splits of a row's prefix leave behind, where kernels without Hopper's add them up.

    Of every split a partial result of each node's heads, and its maximum and sum.
    """
    config = target.config
    if not target.batch_invariant or (compute_capability() or HOPPER)[0] == HOPPER[0]:
        return 0
    from longspec_jax.ops.attention import path_ampere

    rows = -(-nodes * config.num_groups // WARPGROUP_ROWS) * WARPGROUP_ROWS
    splits = path_ampere.splits_of(config.num_kv_heads)
    return 4 * splits * config.num_kv_heads * rows * (config.head_width + 2)


def device_bytes(tree: PyTree) -> int:
    """Bytes that a pytree's arrays take on each device of their sharding."""
    leaves = jax.tree.leaves(tree)
    shards = (math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    return sum(size * leaf.dtype.itemsize for size, leaf in zip(shards, leaves, strict=True))


def free_bytes(mesh: Mesh | None = None) -> int | None:
    """Bytes that each device of the mesh, or the default one, has left; None if unknown."""
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    if jax.default_backend() == "cpu":  # Its devices share the host's memory, and do not say.
        free = free_host_bytes()
        return None if free is None else free // len(devices)
    known = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in stats for stats in known):
        return None
    return min(stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in known)


def free_pinned_bytes() -> int | None:
    """Bytes of the host's memory that a cache may take, by jax's limit too; None if unknown."""
    free = free_host_bytes()
    if jax.default_backend() != "gpu":
        return free
    limit = int(os.environ.get(PINNED_LIMIT, PINNED_GIB)) << 30
    return limit if free is None else min(free, limit)


def free_host_bytes() -> int | None:
    """Available bytes of main memory, by the system's estimate and the container's limit."""
    bounds, group = [], Path("/sys/fs/cgroup")
    try:
        bounds.append(1024 * _entry(Path("/proc/meminfo"), "MemAvailable:"))
    except (OSError, ValueError):
        pass
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        # Cached files count as used, but the system frees their memory when it is needed.
        bounds.append(limit - used + _entry(group / "memory.stat", "inactive_file"))
    except (OSError, ValueError):
        pass  # No container, or one without a limit.
    return min(bounds) if bounds else None


def _entry(file: Path, name: str) -> int:
    """The number after a name in a file of names and numbers, one a line."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    raise ValueError(f"{file} has no {name}")


def check_fits(plan: MemoryPlan, mesh: Mesh | None = None, *, offload: bool = False) -> None:
    """Refuse a call that does not fit on the devices, or whose offloaded cache not on the host.

    Raises:
      MemoryError: says the bytes, and what to change.
    """
    free = free_bytes(mesh)
    if free is not None and plan.needed_bytes > free:
        raise MemoryError(
            f"{plan.batch} row(s) of {plan.capacity} cache slots need "
            f"{shown_bytes(plan.needed_bytes)} ({shown_bytes(plan.cache_bytes)} cache, "
            f"{shown_bytes(plan.draft_state_bytes)} draft state, about "
            f"{shown_bytes(plan.working_bytes)} working memory) besides the weights, and "
            f"{shown_bytes(free)} are free. {_remedy(plan, free)}"
        )
    free = free_pinned_bytes() if offload else None
    if free is not None and plan.host_cache_bytes > free:
        slots = free // -(-plan.host_cache_bytes // plan.capacity)
        raise MemoryError(
            f"offload: {plan.batch} row(s) of {plan.capacity} cache slots need "
            f"{shown_bytes(plan.host_cache_bytes)} of the host's memory, and {shown_bytes(free)} "
            f"are available, enough for some {slots} tokens per row. Use fewer rows or a shorter "
            f"context. If the host has more memory, raise {PINNED_LIMIT} (in GiB, {PINNED_GIB} if "
            "unset), the limit of jax for a GPU"
        )


def _remedy(plan: MemoryPlan, free: int) -> str:
    """What to change about a call that does not fit: first of all its context, if one would."""
    most = max(0, free - plan.draft_state_bytes - plan.working_bytes - plan.ring_bytes)
    fitting = most // max(1, -(-(plan.cache_bytes - plan.ring_bytes) // plan.capacity))
    step = max(256, 1 << max(0, fitting.bit_length() - 4))  # Capacities come in such steps.
    fits = fitting // step * step
    # One more row is being prefilled alongside those in the slots.
    slots, fewer = plan.batch * free // plan.needed_bytes - 1, ""
    if plan.batch > 1:
        fewer = (
            f"decode fewer rows at once (max_num_seqs={slots}), "
            if slots > 0
            else "use fewer rows, "
        )
    if fits:
        return (
            f"The largest context that fits is {fits} tokens per row, prompt and new tokens "
            f"together; shorten the prompt or max_new_tokens, {fewer}or spread over more devices"
        )
    return (
        "No context fits next to the draft state and the working memory; pass a smaller "
        f"prefill_chunk or tree, {fewer}free memory on the device, or spread over more devices"
    )
