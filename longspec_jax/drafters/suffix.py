"""Suffix decoding: what followed the row's last tokens before, here or in other rows' texts.

Suffix decoding (arXiv:2411.04975) asks for every length of match how often each continuation
followed, and drafts from the length that promises most: agents and pipelines emit long passages
again. Published code keeps suffix trees on the host. Here the same counts come from the texts
themselves, on the device: of the latest places that match best, a fixed number, all pairs of
continuations are compared. So a round's cost is bounded, and a token takes the 4 bytes that prompt
lookup keeps as well.

The texts of all slots may be searched: a slot that is vacant still holds the text of its last
request. A row's speed then depends on its neighbours; its tokens do not. Where the neighbours may
be other people's, every row looks only in its own text (:attr:`SuffixDraft.shared`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Lengths
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Params, SamplingNoise, View
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.ngram import (
    CONTEXT,
    NgramState,
    OwnTextDrafter,
    best_places,
    check_no_threshold,
    continuations_of,
    last_tokens,
    matches,
)
from longspec_jax.drafters.tree import Tree, add_level, of_all_nodes, root_tree, within_budget
from longspec_jax.ops.slicing import along

LONGEST = 32
"""Tokens of a match that count at most."""
PLACES = 32
"""Places whose continuations are compared."""
OTHERS = 2048
"""Last tokens of every other row that are searched."""
NOTHING = -1
"""In place of a token, where a text has none."""
FEW = 1e-3
"""Weight of continuations of shorter matches, less than one of :data:`PLACES`: they fill up."""


@dataclass(frozen=True)
class SuffixDrafter(OwnTextDrafter):
    """Proposes the continuations of the match whose chain promises the most accepted tokens."""

    tree: TreeConfig
    own: bool = False
    """Whether a row looks only in its own text."""
    looks_up: ClassVar[bool] = True
    name: str = field(default="suffix", init=False)

    def __post_init__(self) -> None:
        check_no_threshold(self.name, self.tree)

    def propose(self, params: Params, state: NgramState, view: View, noise: SamplingNoise) -> Tree:
        """The tree of the best match's continuations; shorter matches fill it up."""
        tree, levels = root_tree(view.pending, self.tree), self.tree.num_levels
        if not levels:
            return tree
        text = state.text(view.pending, view.position)
        ending = last_tokens(text, view.position, LONGEST)
        library, first = texts_to_search(text, view.position, own=self.own)
        end = (first + view.position)[:, None]
        slot = jnp.arange(library.shape[1])
        earlier = (slot < end) & (library != NOTHING)
        places, matched = best_places(matches(library, ending[:, :CONTEXT], earlier), PLACES)
        length = jnp.where(matched > 0, _lengths(library, places, ending), 0)
        # Of its own text the period goes on; another row's ends.
        period = jnp.where(places >= first, end - places, levels + 1)
        continuations = continuations_of(library, places, jnp.maximum(period, 1), levels)
        known = jnp.cumprod(continuations != NOTHING, axis=2) > 0
        known &= (length > 0)[:, :, None]
        same = [
            agree & known[:, :, depth, None] & known[:, None, :, depth]
            for depth, agree in enumerate(agreements(continuations))
        ]
        return merged(tree, self.tree, continuations, same, _scores(jnp.stack(same, 1), length))


@dataclass(frozen=True)
class SuffixDraft(Draft):
    """Suffix decoding as a draft; it has no parameters and fits every target."""

    looks_up: ClassVar[bool] = True
    shared: bool | None = None
    """Whether rows look in each other's texts, and in those of the requests before. If absent, the
    rows of one call do. The requests of an engine do not, because they may be of several people:
    what is drafted, and how much of it is accepted, tells of the text that it was found in."""
    name: str = field(default="suffix", init=False)

    @property
    def apart(self) -> "SuffixDraft":
        """Rows look only in their own text, unless the option asks for more."""
        return replace(self, shared=self.shares_texts)

    @property
    def shares_texts(self) -> bool:
        """Whether the option asks for it."""
        return bool(self.shared)

    @property
    def default_trees(self) -> DefaultTrees:
        """Deep ones, for long passages; few nodes of them are verified where nodes cost time."""
        few, some = TreeConfig((8,) * 7, 8), TreeConfig((8,) * 15, 16)
        return DefaultTrees((few,), (some,), (TreeConfig((8,) * 16, 64),))

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> SuffixDrafter:
        """The drafter that fills this tree."""
        return SuffixDrafter(tree, own=self.shared is False)


def texts_to_search(
    text: Int[Array, "B S"], last: Lengths, *, own: bool
) -> tuple[Int[Array, "B N"], int]:
    """What each row looks up its last tokens in: the ends of all other rows, and its own text.

    :data:`NOTHING` stands before every text, so that no match and no continuation crosses to
    another one, and after the row's own.

    Args:
      text: tokens of each row; garbage after ``last[b]``.
      last: position of each row's last token.
      own: whether a row looks only in its own text.

    Returns:
      The texts side by side, and where the row's own begins.
    """
    rows, slots = text.shape
    whole = jnp.where(jnp.arange(slots) <= last[:, None], text, NOTHING)
    whole = jnp.pad(whole, ((0, 0), (1, 0)), constant_values=NOTHING)
    if own or rows == 1:
        return whole, 1
    kept = min(OTHERS, slots)
    positions = last[:, None] - kept + 1 + jnp.arange(kept)
    ends = jnp.where(positions < 0, NOTHING, along(jnp.maximum(positions, 0), text))
    ends = jnp.pad(ends, ((0, 0), (1, 0)), constant_values=NOTHING)
    others = jnp.where(jnp.eye(rows, dtype=bool)[:, :, None], NOTHING, ends).reshape(rows, -1)
    return jnp.concatenate([others, whole], axis=1), others.shape[1] + 1


def _lengths(
    library: Int[Array, "B N"], places: Int[Array, "B C"], ending: Int[Array, "B n"]
) -> Int[Array, "B C"]:
    """How many tokens up to each place equal the ending."""
    before = places[:, :, None] - jnp.arange(ending.shape[1])
    tokens = along(jnp.maximum(before, 0), library)  # Before all texts there is no token.
    return jnp.cumprod(tokens == ending[:, None], axis=2).sum(axis=2)


def _scores(
    same: Bool[Array, "B levels C C"], length: Int[Array, "B C"]
) -> list[Float[Array, "B C"]]:
    """The log-probability of each place's path, for every level.

    A length of match has the places that match as far or farther, and the share of them that
    continues by a path estimates its probability. A match may draft as many tokens as it is long.
    The length is taken whose most frequent paths have the greatest sum of probabilities, the
    longest of equal ones.
    """
    levels, found = same.shape[1], length > 0
    as_long = (length[:, None, :] >= length[:, :, None]) & found[:, :, None] & found[:, None]
    members = as_long.astype(jnp.float32)
    count = jnp.einsum("bgj,bdij->bgdi", members, same.astype(jnp.float32))
    share = count / jnp.maximum(members.sum(axis=2), 1)[:, :, None, None]
    allowed = jnp.arange(levels) < length[:, :, None]
    gain = jnp.where(allowed, share.max(axis=3), 0).sum(axis=2)
    # Equal sums of rounded shares must count as equal.
    _, best = jax.lax.top_k(jnp.round(gain * 1024) * (LONGEST + 1) + length, 1)
    likely = jnp.take_along_axis(share, best[:, :, None, None], axis=1)[:, 0]
    of_all = count[jnp.arange(len(found)), jnp.argmin(jnp.where(found, length, LONGEST + 1), 1)]
    worth = likely + FEW / PLACES * of_all
    return [jnp.log(worth[:, depth]) for depth in range(levels)]


def agreements(continuations: Int[Array, "B C levels"]) -> list[Bool[Array, "B C C"]]:
    """Which places agree on the path, for every level."""
    batch, places, levels = continuations.shape
    same, found = jnp.ones((batch, places, places), bool), []
    for depth in range(levels):
        token = continuations[:, :, depth]
        same &= token[:, :, None] == token[:, None, :]
        found.append(same)
    return found


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
        for one that is not there.
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
        tree = add_level(tree, first, jnp.take_along_axis(token, chosen, axis=1), above)
        parents.append(jnp.where(kept, above, -1))
        totals.append(total)
        # Every place goes on from the node that holds its path so far.
        joined = jnp.take_along_axis(agree, chosen[:, :, None], axis=1) & kept[:, :, None]
        alive = joined.any(axis=1)
        node = first + jnp.argmax(joined, axis=1).astype(jnp.int32)
        first += width
    tree = replace(tree, parents=jnp.concatenate(parents, axis=1).astype(jnp.int32))
    return within_budget(replace(tree, totals=of_all_nodes(totals)), totals, shape)


def _is_first(same: Bool[Array, "B C C"]) -> Bool[Array, "B C"]:
    """Whether no earlier place has the same path."""
    places = jnp.arange(same.shape[1])
    return jnp.argmax(same, axis=2) == places
