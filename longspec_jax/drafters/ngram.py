"""Prompt lookup: what followed the last few tokens where they stood before in the same row.

It has no weights and serves any target. Answers quote long prompts, code repeats its names, and a
reasoning model repeats itself: there comparing the row's tokens with its last eight finds a
continuation (Saxena, "Prompt Lookup Decoding", 2023). Several places may match. Their continuations
are merged into one tree, in which a path scores higher the longer its context matched and the more
places agree on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.tree import Tree, grow, plant, within_budget
from longspec_jax.ops.slicing import along

CONTEXT = 8
"""Tokens of the suffix that are compared at most."""
RISE = 3.0
"""Factor on the weight of a place per additional matched token."""


@struct.dataclass
class NgramState:
    """The row's own tokens."""

    tokens: Leaf[Int[Array, "B S"]]
    """4 bytes per slot of the cache, whose keys and values take thousands."""

    @classmethod
    def begin(cls, batch: int, capacity: int) -> "NgramState":
        """No tokens yet."""
        return cls(jnp.zeros((batch, capacity), jnp.int32))

    def extended(self, committed: Committed) -> "NgramState":
        """With more tokens at their positions."""
        offsets = jnp.arange(committed.tokens.shape[1])
        positions = committed.start[:, None] + offsets
        # Tokens beyond the count go to a slot that does not exist, and are dropped.
        slots = jnp.where(offsets < committed.count[:, None], positions, self.tokens.shape[1])
        write = jax.vmap(lambda row, at, fresh: row.at[at].set(fresh, mode="drop"))
        return NgramState(write(self.tokens, slots, committed.tokens))

    def text(self, pending: Int[Array, " B"], position: Lengths) -> Int[Array, "B S"]:
        """The tokens with the pending one behind them."""
        rows = jnp.arange(pending.shape[0])
        return self.tokens.at[rows, position].set(pending, mode="drop")


@dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Proposes the continuations of the earlier places that match the row's end best."""

    tree: TreeConfig
    name: str = field(default="ngram", init=False)

    def __post_init__(self) -> None:
        if self.tree.threshold is not None:
            raise ValueError(
                f"tree {self.tree}: {self.name} has no probabilities to estimate the gain of a "
                f"level from (+{self.tree.threshold:g}); write {replace(self.tree, threshold=None)}"
            )

    @property
    def needs(self) -> Needs:
        """All tokens, and nothing computed of them."""
        return Needs()

    def begin(self, params: Params, batch: int, capacity: int) -> NgramState:
        """No tokens yet."""
        return NgramState.begin(batch, capacity)

    def extend(self, params: Params, state: NgramState, committed: Committed) -> NgramState:
        """Write the tokens at their positions."""
        return state.extended(committed)

    def propose(self, params: Params, state: NgramState, view: View, noise: SamplingNoise) -> Tree:
        """The tree of the best places' continuations."""
        tree = plant(view.pending, self.tree)
        if not self.tree.widths:
            return tree
        text = state.text(view.pending, view.position)
        matched = match_lengths(text, view.position)
        places, matched = best_places(matched, max(self.tree.widths))
        # Where nothing is written yet, the period before it goes on.
        period = jnp.maximum(view.position[:, None] - places, 1)
        continuations = continuations_of(text, places, period, self.tree.num_levels)
        same = agreements(continuations)
        return merged(tree, self.tree, continuations, same, _scores(same, matched))


@dataclass(frozen=True)
class NgramDraft(Draft):
    """Prompt lookup as a draft; it has no parameters and fits every target."""

    name: str = field(default="ngram", init=False)

    @property
    def default_trees(self) -> DefaultTrees:
        """Several continuations; few nodes of them are verified where nodes cost time."""
        few, some, many = (TreeConfig((8,) * 8, budget) for budget in (6, 16, 64))
        return DefaultTrees((few,), (some,), (many,))

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> NgramDrafter:
        """The drafter that fills this tree."""
        return NgramDrafter(tree)


def match_lengths(text: Int[Array, "B S"], last: Lengths) -> Int[Array, "B S"]:
    """How many tokens up to every position equal those up to ``last[b]``, at most :data:`CONTEXT`.

    Args:
      text: tokens of each row; garbage behind ``last[b]``.
      last: position of each row's last token.

    Returns:
      The length of the match that ends at each position; 0 from ``last[b]`` on.
    """
    earlier = jnp.arange(text.shape[1]) < last[:, None]
    return matches(text, last_tokens(text, last, CONTEXT), earlier)


def last_tokens(text: Int[Array, "B S"], last: Lengths, count: int) -> Int[Array, "B count"]:
    """The tokens of each row up to ``last[b]``, the last one first; -2 before the first one."""
    positions = last[:, None] - jnp.arange(count)
    return jnp.where(positions < 0, -2, along(jnp.maximum(positions, 0), text))


def matches(
    text: Int[Array, "B S"], ending: Int[Array, "B n"], places: Bool[Array, "B S"]
) -> Int[Array, "B S"]:
    """How many tokens up to each of some places equal an ending; 0 at all others.

    Args:
      text: tokens of each row.
      ending: the tokens that are compared, the last one first.
      places: where to compare.
    """
    alive, length = places, jnp.zeros(text.shape, jnp.int32)
    for back in range(ending.shape[1]):
        # A token that lies ``back`` before each position; before the first there is none.
        before = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, : text.shape[1]]
        alive &= before == ending[:, back, None]
        length += alive
    return length


def best_places(
    matched: Int[Array, "B S"], count: int
) -> tuple[Int[Array, "B C"], Int[Array, "B C"]]:
    """The places with the longest matches, the latest first, and how many tokens match at each."""
    slots = matched.shape[1]
    _, places = jax.lax.top_k(matched * slots + jnp.arange(slots), min(count, slots))
    return places, jnp.take_along_axis(matched, places, axis=1)


def continuations_of(
    text: Int[Array, "B S"], places: Int[Array, "B C"], period: Int[Array, "B C"], levels: int
) -> Int[Array, "B C levels"]:
    """The tokens behind every place; of them the first ``period`` again and again."""
    steps = jnp.arange(levels) % period[:, :, None]
    return along((places + 1)[:, :, None] + steps, text)


def agreements(continuations: Int[Array, "B C levels"]) -> list[Bool[Array, "B C C"]]:
    """Of every level, which places agree on the path down to it."""
    batch, places, levels = continuations.shape
    same, found = jnp.ones((batch, places, places), bool), []
    for depth in range(levels):
        token = continuations[:, :, depth]
        same &= token[:, :, None] == token[:, None, :]
        found.append(same)
    return found


def _scores(
    same: Sequence[Bool[Array, "B C C"]], matched: Int[Array, "B C"]
) -> list[Float[Array, "B C"]]:
    """Of every level, the logarithm of the summed weight of all places that agree on a path."""
    found, length = matched > 0, matched.astype(jnp.float32)
    # A place weighs more the longer it matched, and less with every step.
    weight, fading = jnp.where(found, RISE**length, 0.0), length / (length + 1)
    scores = []
    for agree in same:
        weight = weight * fading
        agreed = jnp.where(agree, weight[:, None, :], 0.0).sum(axis=2)
        scores.append(jnp.where(found, jnp.log(agreed), -jnp.inf))
    return scores


def merged(
    tree: Tree,
    shape: TreeConfig,
    continuations: Int[Array, "B C levels"],
    same: Sequence[Bool[Array, "B C C"]],
    scores: Sequence[Float[Array, "B C"]],
) -> Tree:
    """The trie of the continuations, of each level its best nodes.

    A node that repeats another, or whose parent is not in the tree, gets no parent, so no path
    reaches it.

    Args:
      tree: the root.
      shape: of the tree.
      continuations: of every place.
      same: of every level, which places agree on the path down to it.
      scores: of every level, what each place's path is worth, never more than a level above; -inf
        for one that is none.
    """
    batch, places = scores[0].shape
    node = jnp.zeros((batch, places), jnp.int32)
    alive = jnp.ones((batch, places), bool)
    first, parents, totals = 1, [jnp.full((batch, 1), -1)], []
    for depth, width in enumerate(shape.widths):
        token, agree = continuations[:, :, depth], same[depth]
        score = jnp.where(alive & _is_first(agree), scores[depth], -jnp.inf)
        score = jnp.pad(score, ((0, 0), (0, max(width - places, 0))), constant_values=-jnp.inf)
        total, chosen = jax.lax.top_k(score, width)
        kept, chosen = jnp.isfinite(total), jnp.minimum(chosen, places - 1)
        above = jnp.take_along_axis(node, chosen, axis=1)
        tree = grow(tree, first, jnp.take_along_axis(token, chosen, axis=1), above)
        parents.append(jnp.where(kept, above, -1))
        totals.append(total)
        # Every place goes on from the node that holds its path so far.
        joined = jnp.take_along_axis(agree, chosen[:, :, None], axis=1) & kept[:, :, None]
        alive = joined.any(axis=1)
        node = first + jnp.argmax(joined, axis=1).astype(jnp.int32)
        first += width
    tree = replace(tree, parents=jnp.concatenate(parents, axis=1).astype(jnp.int32))
    return within_budget(tree, totals, shape)


def _is_first(same: Bool[Array, "B C C"]) -> Bool[Array, "B C"]:
    """Whether no earlier place has the same path."""
    places = jnp.arange(same.shape[1])
    return jnp.argmax(same, axis=2) == places
