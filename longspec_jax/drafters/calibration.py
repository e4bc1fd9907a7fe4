"""How likely what lookup finds is right: by how long it matched, and by how far places agree.

A continuation of an earlier place goes on being right the likelier, the more tokens before it are
equal. So a token's class is the number of tokens that would match before it (the match and the
continuation so far), and whether the places that share its path agree on it. How often the tokens
of each class are right is counted in every row for itself, over its latest rounds. A text that is
copied, one that is new and one that is sampled differ; each begins with the shares of
:data:`SHARES`, measured on source code and documents with a model of 135M at temperature 0.

What is counted is the row's own text: whether it continued as the places found in the round before
say, wherever the accepted path went. Counts change which nodes are tried, never the text.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.ops.slicing import along

LENGTHS = (1, 2, 3, 4, 6, 8, 16)
"""Least tokens that match before a token, of every class."""
SHARES = np.asarray(
    [
        (0.45, 0.74, 0.83, 0.94, 0.96, 0.98, 0.99),  # All places that share the path agree.
        (0.35, 0.56, 0.61, 0.72, 0.80, 0.90, 0.96),  # There is one place.
        (0.32, 0.38, 0.42, 0.50, 0.54, 0.58, 0.62),  # They disagree: what most weight is on,
        (0.10, 0.12, 0.14, 0.16, 0.18, 0.20, 0.20),  # and what less is on.
    ],
    np.float32,
)
"""Share of tokens that are right by class, given that all before them on their path are."""
AGREED, SINGLE, LEADS, TRAILS = range(len(SHARES))
TRUST = 3.0
"""Tokens of a class that have to be counted to weigh as much as :data:`SHARES`."""
KEPT = 0.9
"""What earlier counts of a class weigh when it is counted again."""
RISE = 3.0
"""Factor on the weight of a place per additional matched token."""
NONE = -1
"""Class where there is no token."""
COUNTED = 8, 8
"""Places and levels that are counted."""


class Kept(NamedTuple):
    """What is counted of what was found in a round; every leaf ``[B, ...]``."""

    tokens: Int[Array, "B C levels"]
    classes: Int[Array, "B C levels"]
    """As in :class:`Found`; :data:`NONE` also where an earlier place has the same path."""
    start: Lengths
    """Where the first of these tokens would be in the row."""

    @classmethod
    def nothing(cls, batch: int) -> "Kept":
        """What is kept before the first lookup."""
        none = jnp.zeros((batch, *COUNTED), jnp.int32)
        return cls(none, none + NONE, none[:, 0, 0])


class Found(NamedTuple):
    """What followed the places of a row that match its end best; every leaf ``[B, ...]``."""

    tokens: Int[Array, "B C levels"]
    classes: Int[Array, "B C levels"]
    """Class of every token; :data:`NONE` where there is none."""
    repeats: Bool[Array, "B C levels"]
    """Whether an earlier place has the same path."""

    def kept(self, start: Lengths) -> Kept:
        """The first places and levels, as many as are counted, whatever the tree."""
        places, levels = COUNTED
        shape = self.tokens.shape
        more = (0, 0), (0, max(places - shape[1], 0)), (0, max(levels - shape[2], 0))

        def part(leaf: Array, empty: int) -> Array:
            return jnp.pad(leaf[:, :places, :levels], more, constant_values=empty)

        counted = jnp.where(self.repeats, NONE, self.classes)
        return Kept(part(self.tokens, 0), part(counted, NONE), start)


def classified(
    tokens: Int[Array, "B C levels"],
    known: Bool[Array, "B C levels"],
    matched: Int[Array, "B C"],
) -> Found:
    """Continuations of some places, with the classes of their tokens.

    Args:
      tokens: after every place.
      known: which of them there are; none after one that is not.
      matched: tokens up to each place that equal the row's end.
    """
    place, steps = (jnp.arange(count) for count in tokens.shape[1:])
    agree = agreements(tokens, known)
    above = jnp.pad(agree[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)), constant_values=True)
    before = above & known[:, :, None] & known[:, None]
    weight = jnp.where(agree, RISE ** matched[:, None, :, None].astype(jnp.float32), 0).sum(axis=2)
    most = jnp.where(before, weight[:, None], 0).max(axis=2)
    rivals, friends = before.sum(axis=2), agree.sum(axis=2)
    longest = jnp.where(agree, matched[:, None, :, None], 0).max(axis=2) + steps
    kind = jnp.where(weight >= most, LEADS, TRAILS)
    kind = jnp.where(friends == rivals, jnp.where(rivals == 1, SINGLE, AGREED), kind)
    length = (longest[..., None] >= jnp.asarray(LENGTHS)).sum(axis=3) - 1
    classes = jnp.where(known, kind * len(LENGTHS) + length, NONE)
    repeats = (agree & (place < place[:, None])[..., None]).any(axis=2)
    return Found(tokens, classes, repeats)


def agreements(
    tokens: Int[Array, "B C levels"], known: Bool[Array, "B C levels"]
) -> Bool[Array, "B C C levels"]:
    """Which places agree on the path down to every level, a place with itself where it is known."""
    steps = jnp.arange(tokens.shape[2])
    equal = (tokens[:, :, None] == tokens[:, None]) & known[:, :, None] & known[:, None]
    # One reduction instead of a scan over the levels.
    return (equal[:, :, :, None] | (steps > steps[:, None])).all(axis=4)


@struct.dataclass
class Counts:
    """How often tokens of every class were right in a row, lately."""

    tried: Leaf[Float[Array, "B K"]]
    """Those with no wrong token before them on their path."""
    right: Leaf[Float[Array, "B K"]]

    @classmethod
    def begin(cls, batch: int) -> "Counts":
        """A state in which nothing was counted."""
        none = jnp.zeros((batch, SHARES.size), jnp.float32)
        return cls(none, none)

    def after(self, found: Kept, text: Int[Array, "B S"], position: Lengths) -> "Counts":
        """The counts with what a row's text says about the places found some tokens before.

        Args:
          found: places found when the text was shorter.
          text: of each row.
          position: of its last token.
        """
        steps = jnp.arange(found.tokens.shape[2])
        at = found.start[:, None] + steps
        right = found.tokens == along(jnp.minimum(at, text.shape[1] - 1), text)[:, None]
        so_far = (right[:, :, None] | ~(steps[:, None] > steps)).all(axis=3)
        tried = so_far & (at <= position[:, None])[:, None]
        of_class = found.classes[..., None] == jnp.arange(SHARES.size)
        fresh = (of_class & tried[..., None]).sum(axis=(1, 2), dtype=jnp.float32)
        good = (of_class & (tried & right)[..., None]).sum(axis=(1, 2), dtype=jnp.float32)
        kept = jnp.where(fresh > 0, KEPT, 1.0)
        return Counts(kept * self.tried + fresh, kept * self.right + good)

    def likely(self, classes: Int[Array, "B C levels"]) -> Float[Array, "B C levels"]:
        """How likely a token of each class is, given that all before it on its path are right."""
        share = (self.right + TRUST * SHARES.reshape(-1)) / (self.tried + TRUST)
        flat = classes.reshape(len(share), -1)
        chosen = jnp.take_along_axis(share, jnp.maximum(flat, 0), axis=1)
        return jnp.where(flat >= 0, chosen, 0.0).reshape(classes.shape)


def path_totals(likely: Float[Array, "B C levels"]) -> Float[Array, "B C levels"]:
    """Logarithms of how likely paths are, from how likely each of their tokens is."""
    steps = jnp.arange(likely.shape[2])
    above = jnp.where(steps[:, None] >= steps, jnp.log(likely)[:, :, None], 0.0)
    return above.sum(axis=3)
