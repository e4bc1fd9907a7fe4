"""The memory plan of a call, made of shapes alone."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from longspec_jax.decoding.cache import cache_bytes
from longspec_jax.decoding.home import Home
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.generation.job import Shape
from longspec_jax.generation.memory import MemoryPlan, device_bytes, working_bytes
from longspec_jax.ops.placement import tree_bytes


def plan_of(
    target: CachedTarget,
    drafters: Sequence[Drafter],
    params: Params,
    own: Any,
    batches: Sequence[int],
    shape: Shape,
) -> MemoryPlan:
    """What a call takes on each of its devices.

    Args:
      target: the static part of the target.
      drafters: those that the call may run; they share one state.
      params: of the target, and of the draft unless the call decodes plainly.
      own: what the drafts hold beside the target.
      batches: rows of the batches that exist at once.
      shape: of the call.
    """
    nodes = max(drafter.tree.num_nodes for drafter in drafters)
    gathered = max(drafter.gathered_slots(shape.capacity) for drafter in drafters)
    cache = host = state = working = 0
    for batch in batches:
        home = Home.beside(params.target, batch)
        begin = partial(drafters[0].begin, batch=batch, capacity=shape.capacity)
        held = target.cache_bytes(batch, shape.capacity)
        cache += held.device // home.cache_shares
        host += held.host
        state += tree_bytes(jax.eval_shape(begin, params)) // home.row_shares
        working += working_bytes(target.config, batch, shape.chunk, nodes) // home.row_shares
        working += cache_bytes(target.config, batch, gathered) // home.cache_shares
    return MemoryPlan(
        batch=sum(batches),
        capacity=shape.capacity,
        target_bytes=device_bytes(params.target),
        draft_bytes=0 if params.draft is None else device_bytes(own),
        cache_bytes=cache,
        draft_state_bytes=state,
        working_bytes=working,
        host_cache_bytes=host,
    )
