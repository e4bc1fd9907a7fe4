"""Where a round's time goes: parts of it compiled on their own, with the round's own inputs.

A part runs in a loop of known length whose every turn depends on the one before, so that nothing
overlaps and nothing is hoisted out; its time is the loop's divided by the turns. Parts are the
functions the round itself is made of. They do not add up exactly: a part that is compiled alone may
be scheduled differently, and what no part covers (walk, noise, bookkeeping, the loop's condition)
is the ``rest``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.config import TreeConfig
from longspec_jax.decoding import engine
from longspec_jax.decoding.engine import Request, SpecState
from longspec_jax.decoding.target import CachedTarget, Verification
from longspec_jax.decoding.walk import Walk
from longspec_jax.drafters.base import NOTHING, Needs, Params
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from longspec_jax.drafters.tree import Tree, best_continuations, plant
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.dispatch import prefix_attention, speculative_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix

Part = Callable[[Params, Request, SpecState], Any]
"""A program over a round's inputs that repeats one part of it."""


def draft(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """Growing the tree; the next turn's root is the last node of this one."""

    def program(params: Params, request: Request, state: SpecState) -> Tree:
        def turn(_: Array, tree: Tree) -> Tree:
            now = _after(state, tree.tokens[:, -1])
            beliefs = engine.round_beliefs(target, drafter, request, now)
            return engine.propose_tree(target, drafter, params, now, beliefs)

        return jax.lax.fori_loop(0, turns, turn, some_tree(drafter.tree, state))

    return program


def verify(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """The target pass with LM head and draws; the next turn's nodes are this one's draws."""

    def program(params: Params, request: Request, state: SpecState) -> Array:
        tree = some_tree(drafter.tree, state)

        def turn(_: Array, draws: Array) -> Array:
            now = _after(state, draws[:, -1])
            beliefs = engine.round_beliefs(target, drafter, request, now)
            planted = dataclasses.replace(tree, tokens=draws)
            return engine.verify_tree(target, drafter, params, now, planted, beliefs)[1]

        return jax.lax.fori_loop(0, turns, turn, tree.tokens)

    return program


def commit(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """Appending a path to cache, draft state and output; the state is donated."""
    levels = drafter.tree.num_levels

    def program(params: Params, request: Request, state: SpecState) -> SpecState:
        batch, config = state.pending.shape[0], target.config
        shape = (batch, drafter.tree.num_nodes, config.num_kv_heads, config.head_width)
        fresh = tuple(jnp.ones(shape, jnp.dtype(config.dtype)) for _ in range(config.num_layers))
        verified = Verification(jnp.zeros((batch, 1, 1)), fresh, fresh)
        path = jnp.broadcast_to(jnp.arange(levels + 1), (batch, levels + 1))

        def turn(_: Array, now: SpecState) -> SpecState:
            tokens = jnp.broadcast_to(now.pending[:, None], path.shape)
            count = jnp.ones((batch,), jnp.int32)
            return engine.commit_walk(
                drafter, params, request, now, verified, Walk(path, tokens, count)
            )

        return jax.lax.fori_loop(0, turns, turn, state)

    return program


@dataclasses.dataclass(frozen=True)
class _Unattending(CachedTarget):
    """A target whose attention returns its queries: what is left are products and norms."""

    def verify(
        self,
        params: Any,
        cache: Any,
        tokens: Array,
        positions: Array,
        mask: Array,
        length: Array,
        needs: Needs = NOTHING,
    ) -> Verification:
        output: Any = Target(self.config).apply(
            {"params": params}, tokens, positions, lambda layer, q, k, v: q
        )
        return Verification(self._unembed(params, output.hidden), output.keys, output.values)


def verify_products(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """Verification without its attention."""
    return verify(_Unattending(target.config, target.attention), drafter, turns)


def verify_attention(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """The attention of all layers of one verification."""
    config = target.config

    def program(params: Params, request: Request, state: SpecState) -> Array:
        tree = some_tree(drafter.tree, state)
        rows = (state.pending.shape[0], drafter.tree.num_nodes)
        dtype = jnp.dtype(config.dtype)
        q = jnp.ones((*rows, config.num_heads, config.head_width), dtype)
        k = jnp.ones((*rows, config.num_kv_heads, config.head_width), dtype)

        def turn(_: Array, q: Array) -> Array:
            for keys, values in zip(state.cache.keys, state.cache.values, strict=True):
                prefix, fresh = Prefix(keys, values, state.length), Fresh(k, k, tree.mask)
                q = speculative_attention(q, prefix, fresh, implementation=target.attention)
            return q

        return jax.lax.fori_loop(0, turns, turn, q)

    return program


def draft_cross(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """One level's attention to the target's last layer."""
    config = target.config

    def program(params: Params, request: Request, state: SpecState) -> Array:
        rows = (state.pending.shape[0], max(drafter.tree.widths))
        q = jnp.ones((*rows, config.num_heads, config.head_width), jnp.dtype(config.dtype))

        def turn(_: Array, q: Array) -> Array:
            prefix = Prefix(state.cache.keys[-1], state.cache.values[-1], state.length)
            partial = prefix_attention(q, prefix, implementation=target.attention)
            return partial.out.astype(q.dtype)

        return jax.lax.fori_loop(0, turns, turn, q)

    return program


def draft_head(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """One level's LM head alone."""

    def program(params: Params, request: Request, state: SpecState) -> Array:
        def turn(_: Array, hidden: Array) -> Array:
            logits = params.draft.logits(hidden)
            return hidden + logits.max(axis=-1, keepdims=True).astype(hidden.dtype)

        return jax.lax.fori_loop(0, turns, turn, some_hidden(target, drafter, state))

    return program


def draft_choice(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """One level's LM head, log-probabilities and choice of the best continuations."""
    width = max(drafter.tree.widths)

    def program(params: Params, request: Request, state: SpecState) -> Any:
        beliefs = engine.round_beliefs(target, drafter, request, state)

        def turn(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            hidden, total = carry[:2]
            logits = params.draft.logits(hidden)
            scores = beliefs.log_probabilities(logits, 0)
            best, parents, tokens = best_continuations(total[:, :, None] + scores, width)
            chosen = best[:, :, None] + parents[:, :, None] + tokens[:, :, None]
            return hidden + chosen.astype(hidden.dtype), best, parents, tokens

        hidden = some_hidden(target, drafter, state)
        total = jnp.zeros(hidden.shape[:2], jnp.float32)
        none = jnp.zeros(hidden.shape[:2], jnp.int32)
        return jax.lax.fori_loop(0, turns, turn, (hidden, total, none, none))

    return program


def shallower(drafter: LongSpecDrafter, levels: int) -> LongSpecDrafter:
    """The drafter with the first levels of its tree."""
    tree = dataclasses.replace(drafter.tree, widths=drafter.tree.widths[:levels])
    return dataclasses.replace(drafter, tree=tree)


def _after(state: SpecState, tokens: Array) -> SpecState:
    """The state with other pending tokens, all of it depending on them as far as XLA can tell."""
    zero = jnp.minimum(tokens, 0)  # Tokens are not negative, which the compiler does not know.
    return dataclasses.replace(state, pending=tokens, length=state.length + zero)


def some_tree(shape: TreeConfig, state: SpecState) -> Tree:
    """A tree of this shape with different tokens; every node sees the first of each level above.

    A budget keeps the nodes that would be grown first.
    """
    batch, nodes = state.pending.shape[0], shape.num_nodes
    known = shape.depths[:nodes]
    first = jnp.asarray([known.index(depth) for depth in known])
    depths, node = jnp.asarray(known), jnp.arange(nodes, dtype=jnp.int32)
    on_spine = (node == first) & (depths < depths[:, None])
    tree = plant(state.pending, shape)
    mask = on_spine | jnp.eye(nodes, dtype=bool)
    return dataclasses.replace(
        tree,
        tokens=jnp.broadcast_to(node + 1, (batch, nodes)),
        parents=tree.parents[:, :nodes],
        mask=jnp.broadcast_to(mask, (batch, nodes, nodes)),
    )


def some_hidden(target: CachedTarget, drafter: LongSpecDrafter, state: SpecState) -> Array:
    """Hidden states of the widest level."""
    rows = (state.pending.shape[0], max(drafter.tree.widths))
    return jnp.ones((*rows, target.config.model_width), jnp.dtype(target.config.dtype))
