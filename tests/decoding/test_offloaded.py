"""A cache in the host's memory: what is read, what is written, and how much is moved at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.decoding import cache as cache_lib
from longspec_jax.decoding import offloaded
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.offloaded import OffloadedCache
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.retrieval.selection import SinksAndRecent
from longspec_jax.ops.placement import on_host
from tests.kit import each_row, random_target, tiny_target_config

LAYERS, BATCH, CAPACITY = 5, 2, 11
CONFIG = tiny_target_config(num_layers=LAYERS)
QUERIES = jnp.ones((BATCH, 1, 1, 1))
LENGTHS = jnp.asarray([7, 3], jnp.int32)


def drawn(seed: int, *shape: int) -> tuple[jax.Array, ...]:
    """One array for every layer."""
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    return tuple(jax.random.normal(key, shape) for key in keys)


def both_caches() -> tuple[KVCache, OffloadedCache]:
    """The same numbers on the device and in the host's memory."""
    rows = (BATCH, CAPACITY, CONFIG.num_kv_heads, CONFIG.head_width)
    fresh = drawn(0, *rows), drawn(1, *rows)
    start = jnp.zeros(BATCH, jnp.int32)
    caches = (lib.allocate(CONFIG, BATCH, CAPACITY) for lib in (cache_lib, offloaded))
    plain, host = (cache.append(*fresh, start) for cache in caches)
    assert isinstance(host, OffloadedCache)
    return plain, host


def read_all(cache: KVCache, queries: jax.Array) -> list[jax.Array]:
    """A pass whose queries depend on what was read of the layer before."""
    read, seen = cache.reading(LENGTHS), []
    for layer in range(LAYERS):
        queries, prefix = read(layer, queries)
        seen.append(queries * prefix.keys.sum() + prefix.values.sum())
        queries = seen[-1]
    return seen


def test_a_layer_sets_out_when_the_one_before_the_last_has_been_read() -> None:
    """Two are on the device at a time: all moves but the first layer's wait for queries.

    They wait only if the queries after the barrier are used, too: the compiler drops the rest.
    """
    assert_moves_wait(jax.make_jaxpr(read_all)(both_caches()[1], QUERIES).eqns)


def test_a_partial_forward_at_spans_moves_layers_as_a_whole_pass_does() -> None:
    """One after the other: where a selection is read in place, as when it is all there is."""
    params, nodes = random_target(CONFIG), jnp.zeros((BATCH, 3), jnp.int32)
    mask = jnp.broadcast_to(jnp.tri(3, dtype=bool), (BATCH, 3, 3))

    def partial_forward(cache: KVCache) -> jax.Array:
        seen, fresh = SinksAndRecent(1, 4)(LENGTHS), cache.uncommitted(len(LENGTHS), 3, "float32")
        target = TargetModel(CONFIG)
        return target.partial_forward(
            params, cache, nodes, nodes, seen, fresh, mask, 0, LENGTHS
        ).logits

    plain, host = both_caches()
    assert_moves_wait(jax.make_jaxpr(partial_forward)(host).eqns)
    np.testing.assert_allclose(
        jax.jit(partial_forward)(host), jax.jit(partial_forward)(plain), rtol=1e-5, atol=1e-5
    )


def assert_moves_wait(equations: Any) -> None:
    """Each layer's keys and values wait for the queries of the layer before; but for the first."""
    made = {id(out): eqn for eqn in equations for out in eqn.outvars}
    used = {id(value) for eqn in equations for value in eqn.invars}
    moves = [eqn for eqn in equations if eqn.primitive.name == "device_put"]
    moved = [value for eqn in moves for value in eqn.invars]
    assert len(moved) == 2 * (LAYERS - 1)
    barriers = [made[id(value)] for value in moved if id(value) in made]
    assert len(barriers) == 2 * (LAYERS - 2)
    for barrier in barriers:
        assert barrier.primitive.name == "optimization_barrier"
        assert all(id(out) in used for out in barrier.outvars)
    waited = [barrier.invars[0] for barrier in barriers[::2]]
    assert len({id(queries) for queries in waited}) == LAYERS - 2


@each_row("layers", [1, 2, 5])
def test_bytes_are_known_beforehand(layers: int) -> None:
    config = tiny_target_config(num_layers=layers)
    cache = offloaded.allocate(config, BATCH, CAPACITY)
    leaves = jax.tree.leaves(cache)
    held = offloaded.cache_bytes(config, BATCH, CAPACITY)
    assert held.host == sum(leaf.nbytes for leaf in leaves if on_host(leaf))
    layer = 2 * leaves[0].nbytes
    assert held.device == (1 + min(2, layers - 1)) * layer
    assert held.host + layer == cache_lib.cache_bytes(config, BATCH, CAPACITY)
