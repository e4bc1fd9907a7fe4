"""A language model that is a lookup table over its whole history, and drafters for it.

Logits at a token depend on a hash of every visible token and its position, so one wrong slot, mask
bit or position changes them. The cache holds token ids as "keys" and their positions as
"values", which sends them through the real cache code; a token's query is its id.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.target import Prefilled, TargetModel, Verification
from longspec_jax.drafters.base import (
    NOTHING,
    Drafter,
    Features,
    Needs,
    Params,
    PartialForward,
    Uncommitted,
)
from longspec_jax.drafters.tree import add_level, of_all_nodes, root_tree, within_budget
from longspec_jax.ops.selection.continuations import best_continuations


def random_table(seed: int, rows: int, vocabulary: int, sharpness: float = 2.0) -> jax.Array:
    """Logits ``[rows, V]``, one row for every value of the history's hash."""
    return sharpness * jax.random.normal(jax.random.key(seed), (rows, vocabulary))


def token_hash(tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """What one token contributes to the hash of a history."""
    return (tokens.astype(jnp.int32) + 1) * (positions * 7 + 3)


@dataclass(frozen=True)
class LookupTarget(TargetModel):
    """``logits = table[hash(visible tokens, positions) % rows]``; the parameters are the table."""

    config: Any
    """The size of the vocabulary."""

    @property
    def vocab_size(self):
        return self.config

    @property
    def has_bounded_layers(self):
        return False

    @property
    def dtype(self):
        return "float32"

    def allocate(self, batch, capacity):
        # Unwritten memory may hold anything.
        keys, values = (jnp.full((batch, 1, capacity, 2), jnp.nan) for _ in range(2))
        return KVCache((keys,), (values,))

    def prefill_chunk(self, params, cache, tokens, start, last, needs=NOTHING):
        rows, places = _rows(tokens), _rows(start[:, None] + jnp.arange(tokens.shape[1]))
        cache = cache.append((rows,), (places,), start)
        history = self._history(cache.layer(0, start + last + 1))
        return Prefilled(params[history % params.shape[0]], cache, _features(rows, needs))

    def unembed(self, params, hidden):
        raise NotImplementedError

    def reach(self, length):
        return None

    def verify(self, params, cache, tokens, positions, mask, length, levels, needs=NOTHING):
        past, rows = self._history(cache.layer(0, length)), _rows(tokens)
        own = jnp.where(mask, token_hash(tokens, positions)[:, None, :], 0).sum(axis=2)
        logits = params[(past[:, None] + own) % params.shape[0]]
        places = jnp.broadcast_to(_rows(positions), rows.shape)
        return Verification(logits, (rows,), (places,), _features(rows, needs))

    def partial_forward(
        self, params, cache, tokens, positions, selection, fresh, mask, at, length, needs=NOTHING
    ):
        # Part by part, as attention goes: what lies in two of them would count twice.
        _, prefixes = selection.reading(cache)(0, _rows(tokens))
        past = jnp.stack(list(map(self._history, prefixes))).sum(axis=0)
        # The hash of a token and its position takes the place of keys and values.
        hashed = _rows(token_hash(tokens, positions))
        rows = fresh.keys[0].at[:, at : at + tokens.shape[1]].set(hashed)
        own = jnp.where(mask, rows[:, None, :, 0, 0].astype(jnp.int32), 0).sum(axis=2)
        logits = params[(past[:, None] + own) % params.shape[0]]
        return PartialForward(
            logits, Uncommitted((rows,), (rows,)), _features(_rows(tokens), needs)
        )

    def _history(self, prefix):
        prefix = prefix.of_batch()
        tokens, places = prefix.keys[:, 0, :, 0], prefix.values[:, 0, :, 0]
        slot = jnp.arange(tokens.shape[1])
        seen = slot < prefix.length[:, None]
        if prefix.start is not None:
            seen &= slot >= prefix.start[:, None]
        tokens, places = (jnp.where(seen, row, 0).astype(jnp.int32) for row in (tokens, places))
        return jnp.where(seen, token_hash(tokens, places), 0).sum(axis=1)


def _rows(numbers: jax.Array) -> jax.Array:
    """Numbers of tokens, as keys, values or queries of one head, which have an even width."""
    return numbers[:, :, None, None].astype(jnp.float32).repeat(2, axis=3)


def _features(rows: jax.Array, needs: Needs) -> Features:
    found = {layer: rows for layer in needs.queries}
    return Features({}, found, {layer: rows for layer in needs.keys})


@dataclass(frozen=True)
class LookupDrafter(Drafter):
    """Beam search over its own table: the target's (perfect), another (random), or its negative."""

    tree: TreeConfig
    needs: Needs = Needs()
    name: str = "lookup"

    def begin(self, params, batch, capacity):
        return jnp.zeros((batch,), jnp.int32)

    def extend(self, params, state, committed):
        step = jnp.arange(committed.tokens.shape[1])
        fresh = token_hash(committed.tokens, committed.start[:, None] + step)
        return state + jnp.where(step < committed.count[:, None], fresh, 0).sum(axis=1)

    def propose(self, params, state, view, noise):
        table = params.draft
        tree = root_tree(view.pending, self.tree)
        total, totals = jnp.zeros((view.pending.shape[0], 1), jnp.float32), []
        history = state[:, None] + token_hash(view.pending, view.position)[:, None]
        first, width = 0, 1
        for depth, children in enumerate(self.tree.widths):
            scores = noise.scores(table[history % table.shape[0]], depth)
            total, parents, tokens = best_continuations(scores, total, children)
            tree = add_level(tree, first + width, tokens, first + parents)
            positions = view.position[:, None] + depth + 1
            history = jnp.take_along_axis(history, parents, axis=1) + token_hash(tokens, positions)
            totals.append(total)
            first, width = first + width, children
        if totals:
            tree = replace(tree, totals=of_all_nodes(totals))
        return within_budget(tree, totals, self.tree)


@dataclass(frozen=True)
class ConstantDrafter(Drafter):
    """Adversarial: every node carries the same token, so siblings are duplicates of each other."""

    tree: TreeConfig
    needs: Needs = NOTHING
    name: str = "lookup"

    def propose(self, params, state, view, noise):
        tree = root_tree(view.pending, self.tree)
        first, width = 0, 1
        for children in self.tree.widths:
            shape = (view.pending.shape[0], children)
            parents = jnp.broadcast_to(first + jnp.arange(children) % width, shape)
            tree = add_level(tree, first + width, jnp.full(shape, 2, jnp.int32), parents)
            first, width = first + width, children
        return tree


def table_params(target: jax.Array, draft: jax.Array | None = None) -> Any:
    """Parameters of both models as the engine takes them."""
    return Params(target, target if draft is None else draft)
