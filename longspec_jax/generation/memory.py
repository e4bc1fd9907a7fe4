"""Device memory that a call needs, computed before anything is allocated."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from longspec_jax.checks import shown_bytes
from longspec_jax.config import TargetConfig
from longspec_jax.ops.placement import free_device_bytes

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
    """The target's keys and values on the device. They grow with the context."""
    draft_state_bytes: int
    """The draft's own state. A LongSpec draft's does not grow with the context; with retrieval it
    also holds summaries of the cache's blocks."""
    working_bytes: int
    """Activations of a prefill chunk or logits of a tree, whichever is larger, estimated; with
    partial verification also the part of the cache that it copies."""
    host_cache_bytes: int = 0
    """The target's keys and values in the host's memory, if the cache is offloaded."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that the call allocates beside the loaded weights."""
        return self.cache_bytes + self.draft_state_bytes + self.working_bytes


def device_bytes(tree: Any) -> int:
    """Bytes that a pytree's arrays take on each device of their sharding."""
    leaves = jax.tree.leaves(tree)
    shards = (math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    return sum(size * leaf.dtype.itemsize for size, leaf in zip(shards, leaves, strict=True))


def working_bytes(config: TargetConfig, batch: int, chunk: int, nodes: int) -> int:
    """Estimated bytes of the activations and logits that are alive at once."""
    width = 3 * config.mlp_width + 6 * config.model_width
    activations = batch * chunk * width * jnp.dtype(config.dtype).itemsize
    # Logits, noise, perturbed scores and one sorted or compared copy, float32.
    logits = 4 * 4 * batch * nodes * config.vocab_size
    return max(activations, logits)


def free_bytes(mesh: Mesh | None = None) -> int | None:
    """Bytes that every device can still allocate; None if unknown.

    Args:
      mesh: the devices; those of this process count. The default device if absent.
    """
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    on_device = free_device_bytes(devices)
    if on_device is not None:
        return on_device
    free = _free_host_bytes() if jax.default_backend() == "cpu" else None
    return None if free is None else free // len(devices)


def free_pinned_bytes() -> int | None:
    """Bytes of the host's memory that a cache may take; None if unknown.

    For a GPU jax has a limit of its own, which an environment variable sets.
    """
    free = _free_host_bytes()
    if jax.default_backend() != "gpu":
        return free
    limit = int(os.environ.get(PINNED_LIMIT, PINNED_GIB)) << 30
    return limit if free is None else min(free, limit)


def _free_host_bytes() -> int | None:
    """Available bytes of main memory, by the system's estimate and the container's limit."""
    bounds = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [available] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        bounds.append(int(available) * 1024)
    except (OSError, ValueError):
        pass
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        # Cached files count as used, but the system frees their memory when it is needed.
        lines = (group / "memory.stat").read_text().splitlines()
        [cached] = [line.split()[1] for line in lines if line.startswith("inactive_file ")]
        bounds.append(limit - used + int(cached))
    except (OSError, ValueError):
        pass  # No container, or one without a limit.
    return min(bounds) if bounds else None


def largest_context(plan: MemoryPlan, free: int) -> int:
    """Cache slots of the largest bucketed capacity that fits beside the plan's other needs."""
    fixed = plan.draft_state_bytes + plan.working_bytes
    slots = max(0, free - fixed) // -(-plan.cache_bytes // plan.capacity)
    step = max(256, 1 << max(0, slots.bit_length() - 4))
    return slots // step * step


def check_fits(plan: MemoryPlan, free: int | None) -> None:
    """Raise if a call does not fit on the device, and name the largest context that would.

    Raises:
      MemoryError: says the bytes, and what to change.
    """
    if free is None or plan.needed_bytes <= free:
        return
    raise MemoryError(
        f"{plan.batch} row(s) of {plan.capacity} cache slots need {shown_bytes(plan.needed_bytes)} "
        f"({shown_bytes(plan.cache_bytes)} cache, {shown_bytes(plan.draft_state_bytes)} draft "
        f"state, about {shown_bytes(plan.working_bytes)} working memory) beside the weights, and "
        f"{shown_bytes(free)} are free. {_remedy(plan, largest_context(plan, free), free)}"
    )


def check_host_fits(plan: MemoryPlan, free: int | None) -> None:
    """Raise if an offloaded cache does not fit into the host's memory.

    Raises:
      MemoryError: says the bytes, and what to change.
    """
    if free is None or plan.host_cache_bytes <= free:
        return
    slots = free // -(-plan.host_cache_bytes // plan.capacity)
    raise MemoryError(
        f"offload: {plan.batch} row(s) of {plan.capacity} cache slots need "
        f"{shown_bytes(plan.host_cache_bytes)} of the host's memory, and {shown_bytes(free)} are "
        f"available, enough for some {slots} tokens per row. Use fewer rows or a shorter context. "
        f"If the host has more memory, raise {PINNED_LIMIT} (in GiB, {PINNED_GIB} if unset), the "
        "limit of jax for a GPU"
    )


def _remedy(plan: MemoryPlan, fits: int, free: int) -> str:
    """What to change about a call that does not fit."""
    # One more row is being prefilled beside those in the slots.
    slots, fewer = plan.batch * free // plan.needed_bytes - 1, ""
    if plan.batch > 1:
        fewer = (
            f"decode fewer rows at once (row_slots={slots}), " if slots > 0 else "use fewer rows, "
        )
    if fits:
        return (
            f"The largest context that fits is {fits} tokens per row, prompt and new tokens "
            f"together; shorten the prompt or max_new_tokens, {fewer}or spread over more devices"
        )
    return (
        "No context fits beside the draft state and the working memory; pass a smaller "
        f"prefill_chunk or tree, {fewer}free memory on the device, or spread over more devices"
    )
