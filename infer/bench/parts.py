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
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.target import CachedTarget, Verification
from longspec_jax.drafters.base import NOTHING, Needs, Params
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from longspec_jax.drafters.tree import AcceptedPath, Tree, plant
from longspec_jax.models.target import Target
from longspec_jax.ops.attention.dispatch import prefix_attention, speculative_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.selection.continuations import best_continuations

from .models import random_features

Part = Callable[[Params, Rows], Any]
"""A program over a round's inputs that repeats one part of it."""


def draft(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """Growing the tree; the next turn's root is the last node of this one."""

    def program(params: Params, rows: Rows) -> Tree:
        def turn(_: Array, tree: Tree) -> Tree:
            now = _after(rows, tree.tokens[:, -1])
            noise = engine.sampling_noise(target, drafter, now)
            return engine.propose_tree(target, drafter, params, now, noise)

        return jax.lax.fori_loop(0, turns, turn, some_tree(drafter.tree, rows))

    return program


def verify(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """The target pass with LM head and draws; the next turn's nodes are this one's draws."""

    def program(params: Params, rows: Rows) -> Array:
        tree = some_tree(drafter.tree, rows)

        def turn(_: Array, draws: Array) -> Array:
            now = _after(rows, draws[:, -1])
            noise = engine.sampling_noise(target, drafter, now)
            planted = dataclasses.replace(tree, tokens=draws)
            return engine.verify_tree(target, drafter, params, now, planted, noise)[1]

        return jax.lax.fori_loop(0, turns, turn, tree.tokens)

    return program


def commit(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """Appending a path to cache and draft state; the rows are donated."""
    levels = drafter.tree.num_levels

    def program(params: Params, rows: Rows) -> Rows:
        batch, config = rows.pending.shape[0], target.config
        shape = (batch, drafter.tree.num_nodes, config.num_kv_heads, config.head_width)
        fresh = tuple(jnp.ones(shape, jnp.dtype(config.dtype)) for _ in range(config.num_layers))
        features = random_features(config, drafter.needs, *shape[:2])
        verified = Verification(jnp.zeros((batch, 1, 1)), fresh, fresh, features)
        path = jnp.broadcast_to(jnp.arange(levels + 1), (batch, levels + 1))

        def turn(_: Array, now: Rows) -> Rows:
            tokens = jnp.broadcast_to(now.pending[:, None], path.shape)
            count = jnp.ones((batch,), jnp.int32)
            return engine.commit_accepted(
                drafter, params, now, verified, AcceptedPath(path, tokens, count)
            )[0]

        return jax.lax.fori_loop(0, turns, turn, rows)

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

    def program(params: Params, rows: Rows) -> Array:
        tree = some_tree(drafter.tree, rows)
        shape = (rows.pending.shape[0], drafter.tree.num_nodes)
        dtype = jnp.dtype(config.dtype)
        q = jnp.ones((*shape, config.num_heads, config.head_width), dtype)
        k = jnp.ones((*shape, config.num_kv_heads, config.head_width), dtype)

        def turn(_: Array, q: Array) -> Array:
            for keys, values in zip(rows.cache.keys, rows.cache.values, strict=True):
                prefix, fresh = Prefix(keys, values, rows.length), Fresh(k, k, tree.mask)
                q = speculative_attention(q, prefix, fresh, implementation=target.attention)
            return q

        return jax.lax.fori_loop(0, turns, turn, q)

    return program


def draft_cross(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """One level's attention to the target's last layer."""
    config = target.config

    def program(params: Params, rows: Rows) -> Array:
        shape = (rows.pending.shape[0], max(drafter.tree.widths))
        q = jnp.ones((*shape, config.num_heads, config.head_width), jnp.dtype(config.dtype))

        def turn(_: Array, q: Array) -> Array:
            prefix = rows.cache.layer(-1, rows.length)
            partial = prefix_attention(q, prefix, implementation=target.attention)
            return partial.out.astype(q.dtype)

        return jax.lax.fori_loop(0, turns, turn, q)

    return program


def draft_head(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """One level's LM head alone."""

    def program(params: Params, rows: Rows) -> Array:
        def turn(_: Array, hidden: Array) -> Array:
            logits = params.draft.logits(hidden)
            return hidden + logits.max(axis=-1, keepdims=True).astype(hidden.dtype)

        return jax.lax.fori_loop(0, turns, turn, some_hidden(target, drafter, rows))

    return program


def draft_choice(target: CachedTarget, drafter: LongSpecDrafter, turns: int) -> Part:
    """One level's LM head and choice of the best continuations."""
    width = max(drafter.tree.widths)

    def program(params: Params, rows: Rows) -> Any:
        noise = engine.sampling_noise(target, drafter, rows)

        def turn(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            hidden, total = carry[:2]
            logits = params.draft.logits(hidden)
            scores = noise.scores(logits, 0)
            best, parents, tokens = best_continuations(scores, total, width)
            chosen = best[:, :, None] + parents[:, :, None] + tokens[:, :, None]
            return hidden + chosen.astype(hidden.dtype), best, parents, tokens

        hidden = some_hidden(target, drafter, rows)
        total = jnp.zeros(hidden.shape[:2], jnp.float32)
        none = jnp.zeros(hidden.shape[:2], jnp.int32)
        return jax.lax.fori_loop(0, turns, turn, (hidden, total, none, none))

    return program


def shallower(drafter: LongSpecDrafter, levels: int) -> LongSpecDrafter:
    """The drafter with the first levels of its tree."""
    tree = dataclasses.replace(drafter.tree, widths=drafter.tree.widths[:levels])
    return dataclasses.replace(drafter, tree=tree)


def _after(rows: Rows, tokens: Array) -> Rows:
    """The rows with other pending tokens, all of it depending on them as far as XLA can tell."""
    zero = jnp.minimum(tokens, 0)  # Tokens are not negative, which the compiler does not know.
    return dataclasses.replace(rows, pending=tokens, length=rows.length + zero)


def some_tree(shape: TreeConfig, rows: Rows) -> Tree:
    """A tree of this shape with different tokens; every node sees the first of each level above.

    A budget keeps the nodes that would be grown first.
    """
    batch, nodes = rows.pending.shape[0], shape.num_nodes
    known = shape.depths[:nodes]
    first = jnp.asarray([known.index(depth) for depth in known])
    depths, node = jnp.asarray(known), jnp.arange(nodes, dtype=jnp.int32)
    on_spine = (node == first) & (depths < depths[:, None])
    tree = plant(rows.pending, shape)
    mask = on_spine | jnp.eye(nodes, dtype=bool)
    return dataclasses.replace(
        tree,
        tokens=jnp.broadcast_to(node + 1, (batch, nodes)),
        parents=tree.parents[:, :nodes],
        mask=jnp.broadcast_to(mask, (batch, nodes, nodes)),
    )


def some_hidden(target: CachedTarget, drafter: LongSpecDrafter, rows: Rows) -> Array:
    """Hidden states of the widest level."""
    shape = (rows.pending.shape[0], max(drafter.tree.widths))
    return jnp.ones((*shape, target.config.model_width), jnp.dtype(target.config.dtype))
