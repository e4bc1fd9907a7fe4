"""Prompt lookup: what followed the last few tokens where they stood before in the same row.

It has no weights and serves any target. Answers quote long prompts, code repeats its names, and a
reasoning model repeats itself: there comparing the row's tokens with its last eight finds a
continuation (Saxena, "Prompt Lookup Decoding", 2023). Several places may match. Their continuations
are merged into one tree, in which a path scores higher the longer its context matched and the more
places agree on it.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.calibration import Counts, Found, Kept, classified, path_totals
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.tree import Tree, of_all_nodes, root_tree
from longspec_jax.drafters.union import union
from longspec_jax.ops.dispatch import traced_once
from longspec_jax.ops.selection.continuations import SMALL_VOCABULARY, best_continuations
from longspec_jax.ops.slicing import along

CONTEXT = 16
"""Tokens of the suffix that are compared at most."""
OWN_TEXT = Needs(recent=0, text=True)
"""The needs of a drafter that takes only tokens."""
EXACT = 1 << 24
"""Whole numbers below this are float32 numbers."""


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
        """The tokens with the pending one after them."""
        rows = jnp.arange(pending.shape[0])
        return self.tokens.at[rows, position].set(pending, mode="drop")


@struct.dataclass
class LookupState:
    """The row's own text, and how often what was looked up in it was right."""

    row: NgramState
    counts: Counts
    found: Kept
    """In the latest round; the row's text shows what of it was right."""

    @property
    def tokens(self) -> Int[Array, "B S"]:
        """The row's own tokens."""
        return self.row.tokens


class OwnTextDrafter(Drafter):
    """A drafter whose state is only the row's own text."""

    @cached_property
    def needs(self) -> Needs:
        """All tokens, and nothing computed of them."""
        return OWN_TEXT

    def begin(self, params: Params, batch: int, capacity: int) -> NgramState:
        """No tokens yet."""
        return NgramState.begin(batch, capacity)

    def extend(self, params: Params, state: NgramState, committed: Committed) -> NgramState:
        """Write the tokens at their positions."""
        return state.extended(committed)


@dataclass(frozen=True)
class NgramDrafter(Drafter):
    """Proposes the continuations of the earlier places that match the row's end best."""

    tree: TreeConfig
    looks_up: ClassVar[bool] = True
    name: str = field(default="ngram", init=False)

    def __post_init__(self) -> None:
        check_no_threshold(self.name, self.tree)

    @cached_property
    def needs(self) -> Needs:
        """All tokens, and nothing computed of them."""
        return OWN_TEXT

    def begin(self, params: Params, batch: int, capacity: int) -> LookupState:
        """No tokens yet."""
        row = NgramState.begin(batch, capacity)
        return LookupState(row, Counts.begin(batch), Kept.nothing(batch))

    def extend(self, params: Params, state: LookupState, committed: Committed) -> LookupState:
        """Write the tokens at their positions."""
        return replace(state, row=state.row.extended(committed))

    def before_round(self, params: Params, state: LookupState, view: View) -> LookupState:
        """Count what was right of the latest round's places, and look up those of this one."""
        if not self.tree.num_levels:
            return state
        text = state.row.text(view.pending, view.position)
        counts = state.counts.after(state.found, text, view.position)
        found = self.find(text, view.position).kept(view.position + 1)
        return replace(state, counts=counts, found=found)

    def propose(self, params: Params, state: LookupState, view: View, noise: SamplingNoise) -> Tree:
        """The tree of the best places' continuations."""
        if not self.tree.num_levels:
            return root_tree(view.pending, self.tree)
        tree = self.offer(params, state, view, noise)
        return union({0: tree}, self.tree.num_levels, self.tree.num_nodes)

    def offer(self, params: Params, state: LookupState, view: View, noise: SamplingNoise) -> Tree:
        """The continuations of all places, side by side."""
        # The compiler finds that this was looked up before the round. Inside a hierarchy it was
        # not: a partial round's tokens are after the row's.
        found = self.find(state.row.text(view.pending, view.position), view.position)
        likely = noise.chances(state.counts.likely(found.classes), found.tokens)
        return side_by_side(view.pending, found.tokens, path_totals(likely), self.tree)

    @traced_once("self")
    def find(self, text: Int[Array, "B S"], last: Lengths) -> Found:
        """What followed the places that match best.

        Args:
          text: tokens of each row; garbage after ``last[b]``.
          last: position of each row's last token.
        """
        places, matched = best_places(match_lengths(text, last), self._places)
        # Where nothing is written yet, the period before it goes on.
        period = jnp.maximum(last[:, None] - places, 1)
        tokens = continuations_of(text, places, period, self.tree.num_levels)
        known = jnp.broadcast_to((matched > 0)[:, :, None], tokens.shape)
        return classified(tokens, known, matched)

    @property
    def _places(self) -> int:
        return max(self.tree.widths, default=0)


@dataclass(frozen=True)
class NgramDraft(Draft):
    """Prompt lookup as a draft; it has no parameters and fits every target."""

    looks_up: ClassVar[bool] = True
    name: str = field(default="ngram", init=False)

    @property
    def default_trees(self) -> DefaultTrees:
        """Several continuations; few nodes of them are verified where nodes cost time.

        On a GPU they are as long as a tree may be. With 16 nodes, prose of Qwen2.5-Coder that
        repeats itself yields 12.75 tokens a round by 15 levels, 8.23 by 8, and code 3.70 and 3.36
        (``docs/results/default_choice_h100.json``).
        """
        few, some, many = (8,) * 8, (8,) * 15, (8,) * 16
        return DefaultTrees((TreeConfig(few, 8),), (TreeConfig(some, 16),), (TreeConfig(many, 64),))

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> NgramDrafter:
        """The drafter that fills this tree."""
        return NgramDrafter(tree)


def check_no_threshold(name: str, tree: TreeConfig) -> None:
    """Refuse a threshold: what is looked up is found at once."""
    if tree.threshold is not None:
        raise ValueError(
            f"tree {tree}: {name} has no probabilities to estimate the gain of a level from "
            f"(+{tree.threshold:g}); write {replace(tree, threshold=None)}"
        )


def match_lengths(text: Int[Array, "B S"], last: Lengths) -> Int[Array, "B S"]:
    """How many tokens up to every position equal those up to ``last[b]``, at most :data:`CONTEXT`.

    Args:
      text: tokens of each row; garbage after ``last[b]``.
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
    order, count = matched * slots + jnp.arange(slots), min(count, slots)
    if slots > EXACT // (CONTEXT + 1):
        _, places = jax.lax.top_k(order, count)
    else:
        # Whole numbers from which a logarithm below 1/2 is subtracted keep their order as float32
        # numbers. A text that is too short for the op's kernels is lengthened.
        longer = (0, 0), (0, max(SMALL_VOCABULARY + 1 - slots, 0))
        numbers = jnp.pad(order.astype(jnp.float32), longer, constant_values=-jnp.inf)[:, None]
        _, _, places = best_continuations(numbers, jnp.zeros((len(order), 1)), count)
    return places, jnp.take_along_axis(matched, places, axis=1)


def continuations_of(
    text: Int[Array, "B S"], places: Int[Array, "B C"], period: Int[Array, "B C"], levels: int
) -> Int[Array, "B C levels"]:
    """The tokens after every place; of them the first ``period`` again and again."""
    steps = jnp.arange(levels) % period[:, :, None]
    return along((places + 1)[:, :, None] + steps, text)


def side_by_side(
    pending: Int[Array, " B"],
    tokens: Int[Array, "B C levels"],
    totals: Float[Array, "B C levels"],
    shape: TreeConfig,
) -> Tree:
    """Continuations as branches of one tree, level by level; some may begin alike.

    Args:
      pending: the root of every row.
      tokens: of each continuation.
      totals: how likely its tokens are reached, as logarithms.
      shape: widths of the levels: of the first one as many continuations take part.
    """
    batch, places, _ = tokens.shape
    nodes = [(level, branch) for level, width in enumerate(shape.widths) for branch in range(width)]
    level, branch = np.asarray(nodes).T
    # A node's ancestors are the nodes of its own branch in the levels above.
    mask = np.eye(1 + len(nodes), dtype=bool)
    mask[:, 0] = True
    mask[1:, 1:] = (branch[:, None] == branch) & (level[:, None] >= level)
    depth = mask.sum(axis=1) - 1
    parent = mask & (depth + 1 == depth[:, None])
    parents = np.where(parent.any(axis=1), parent.argmax(axis=1), -1).astype(np.int32)
    # Some nodes of a level wider than there are places, or than the one above, are not used.
    none = (branch >= places) | (depth[1:] <= level)
    branch = np.minimum(branch, places - 1)
    own = np.arange(shape.num_levels) <= level[:, None]
    paths = jnp.where(own, tokens[:, branch].astype(jnp.int32), -1)
    return Tree(
        jnp.concatenate([pending[:, None], tokens[:, branch, level]], axis=1).astype(jnp.int32),
        jnp.broadcast_to(parents, (batch, len(mask))),
        jnp.broadcast_to(mask, (batch, *mask.shape)),
        of_all_nodes([jnp.where(none, -jnp.inf, totals[:, branch, level])]),
        paths=jnp.pad(paths, ((0, 0), (1, 0), (0, 0)), constant_values=-1),
    )
