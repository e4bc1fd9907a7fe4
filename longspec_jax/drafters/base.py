"""What the decode loop asks of a drafter, and the drafter that proposes nothing.

A drafter proposes a tree of candidate tokens each round. It cannot change the output, only the
speed: the target's own draws walk its tree. Whatever state it keeps is its own pytree, which learns
of committed tokens in one way alone, :meth:`Drafter.extend`, be they a chunk of a prompt or a
round's accepted path.

What it may use of the target it declares beforehand (:class:`Needs`) or is handed in a round
(:class:`View`). Drafters compose: one may hold another, and run the target over a part of its cache
to improve on it (:mod:`longspec_jax.drafters.hierarchy`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, CacheSlots, Lengths, TreeMask
from longspec_jax.config import PLAIN, TreeConfig
from longspec_jax.drafters.selection import Selection
from longspec_jax.drafters.tree import AcceptedPath, Tree, plant
from longspec_jax.ops.attention.operands import Prefix


@struct.dataclass
class Params:
    """Parameters of both models, as their ``apply`` functions take them."""

    target: Any
    draft: Any


@dataclass(frozen=True)
class Needs:
    """What a drafter wants to learn of committed tokens; nothing else is computed for it."""

    hidden: tuple[int, ...] = ()
    """Layers after which it takes the hidden states; the first is 0."""
    queries: tuple[int, ...] = ()
    """Layers whose queries it takes, rotary applied."""
    keys: tuple[int, ...] = ()
    """Layers whose keys it takes, rotary applied."""
    recent: int | None = None
    """How many of the last committed tokens its state depends on; all of them if absent. Chunks of
    a prompt that lie before are not shown to it."""

    def __or__(self, other: "Needs") -> "Needs":
        """What two drafters want together."""
        whole = self.recent is None or other.recent is None
        return Needs(
            tuple(sorted({*self.hidden, *other.hidden})),
            tuple(sorted({*self.queries, *other.queries})),
            tuple(sorted({*self.keys, *other.keys})),
            None if whole else max(self.recent or 0, other.recent or 0),
        )

    @property
    def of_a_pass(self) -> "Needs":
        """The same needs of whichever tokens: what one pass computes, and one program serves."""
        return replace(self, recent=None)


NOTHING = Needs(recent=0)
"""The needs of a drafter that keeps no state."""


class Features(NamedTuple):
    """What a target pass found at its tokens, by layer; only what was asked for is there."""

    hidden: Mapping[int, Float[Array, "B n D"]] = {}
    """The residual stream after the layer."""
    queries: Mapping[int, Float[Array, "B n N H"]] = {}
    """The layer's queries, rotary applied."""
    keys: Mapping[int, Float[Array, "B n K H"]] = {}
    """The layer's keys, rotary applied."""


class Committed(NamedTuple):
    """Tokens that joined the prefix, with what the target's pass over them found."""

    tokens: Int[Array, "B n"]
    """Garbage from ``count[b]`` on."""
    start: Lengths
    """Position of each row's first token."""
    # tuple.count is not missed.
    count: Lengths  # pyright: ignore[reportIncompatibleMethodOverride]
    """How many of the tokens joined; 0 for a row that did not advance."""
    features: Features = Features()


@runtime_checkable
class SamplingNoise(Protocol):
    """What is known of a round's draws beforehand: their noise, temperatures and filters.

    Depth ``d`` is about the token that follows a node of depth ``d``.
    """

    def scores(self, logits: Float[Array, "B w V"], depth: int) -> Float[Array, "B w V"]:
        """How likely the target is to draw each token, for a draft whose logits these are.

        Logarithms of probabilities, up to a constant of each node.
        """
        ...

    def draw(self, logits: Float[Array, "B T V"], depths: Int[Array, "#B T"]) -> Int[Array, "B T"]:
        """What the target would draw from these logits at nodes of these depths."""
        ...

    def lead(
        self, logits: Float[Array, "B T V"], depths: Int[Array, "#B T"]
    ) -> Float[Array, "B T"]:
        """How far what would be drawn from these logits is ahead of every other token, in nats."""
        ...

    def among(self, tokens: Int[Array, " v"]) -> "SamplingNoise":
        """The same for logits of these tokens alone."""
        ...

    def after(self, steps: Lengths, levels: int) -> "SamplingNoise":
        """The same for nodes below ``steps[b]`` more tokens, down to so many levels."""
        ...


class Uncommitted(NamedTuple):
    """Keys and values of tokens that are not in the cache, ``L x [B, U, K, H]`` each."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]


class PartialForward(NamedTuple):
    """What a pass of the target over a part of its cache yields."""

    logits: Float[Array, "B T V"]
    fresh: Uncommitted
    """Those that were given, the tokens' own written among them."""
    features: Features


@runtime_checkable
class View(Protocol):
    """What a drafter sees when it proposes, and what it can have the target do."""

    @property
    def pending(self) -> Int[Array, " B"]:
        """The last token of each row, not in the cache: the root of the tree."""
        ...

    @property
    def position(self) -> Lengths:
        """The pending token's position."""
        ...

    @property
    def length(self) -> Lengths:
        """Cache slots of each row that hold committed tokens.

        It is the position, unless a drafter has another go on from tokens that are not committed.
        """
        ...

    @property
    def done(self) -> Bool[Array, " B"]:
        """Rows of which nothing is emitted any more, whatever is proposed: not worth a pass."""
        ...

    @property
    def keys(self) -> tuple[CacheSlots, ...]:
        """The target's cached keys of every layer."""
        ...

    @property
    def values(self) -> tuple[CacheSlots, ...]:
        """The target's cached values of every layer."""
        ...

    def last_layer(self) -> Prefix:
        """What a draft reads of the target's last layer: all of the cache, or what is selected."""
        ...

    def uncommitted(self, tokens: int) -> Uncommitted:
        """Room for so many tokens outside the cache."""
        ...

    def partial_forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        selection: Selection,
        fresh: Uncommitted,
        mask: TreeMask,
        at: int,
        needs: Needs = NOTHING,
    ) -> PartialForward:
        """Run the target over tokens that see a selection of the cache, and fresh tokens.

        Args:
          tokens: their ids.
          positions: their positions.
          selection: the cache slots that all of them see.
          fresh: other fresh tokens' keys and values; those of these tokens are written at ``at``.
          mask: ``[B, T, U]`` which fresh tokens each sees, itself among them.
          at: where these tokens stand among the fresh ones.
          needs: what to return of them beside the logits.
        """
        ...

    def accept(self, tree: Tree, draws: Int[Array, "B T"], levels: int) -> AcceptedPath:
        """The path that draws take through a tree of so many levels."""
        ...

    def ahead(self, pending: Int[Array, " B"], steps: Lengths, past: Uncommitted) -> "View":
        """The same cache, seen from ``steps[b]`` tokens further on, which are not in it.

        Args:
          pending: the token that stands there.
          steps: how many tokens further on; the last pending token is the first of them.
          past: their keys and values, garbage from ``steps[b]`` on. Every glance sees them.
        """
        ...

    def within(self, selection: Selection) -> "View":
        """The same, but that drafts read of the last layer what was selected, if it lies apart.

        They take part in passes over that selection: reading all of a long cache at every level of
        a tree would cost more than such a pass does.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Pure functions of parameters and state; the object itself is static and hashable."""

    @property
    def name(self) -> str:
        """Of its kind, as it is told."""
        ...

    @property
    def tree(self) -> TreeConfig:
        """The static shape of the trees it proposes."""
        ...

    @property
    def needs(self) -> Needs:
        """What it wants to learn of committed tokens."""
        ...

    def begin(self, params: Params, batch: int, capacity: int) -> Any:
        """The state of rows without a token, every leaf ``[B, ...]``.

        Args:
          params: parameters of both models.
          batch: rows.
          capacity: most tokens that a row will hold.
        """
        ...

    def extend(self, params: Params, state: Any, committed: Committed) -> Any:
        """The state after more tokens were committed: a chunk of a prompt, or an accepted path."""
        ...

    def propose(self, params: Params, state: Any, view: View, noise: SamplingNoise) -> Tree:
        """Candidate continuations of the pending tokens: ``tree.num_nodes`` nodes with the root."""
        ...


@runtime_checkable
class BeforeRound(Protocol):
    """A drafter whose state takes something from the target's cache, too."""

    def before_round(self, params: Params, state: Any, view: View) -> Any:
        """The state after a look at the target's cache, before every round."""
        ...


def run_before_round(drafter: Drafter, params: Params, state: Any, view: View) -> Any:
    """The drafter's state, ready for a round; what of it remains is kept with the rows."""
    return drafter.before_round(params, state, view) if isinstance(drafter, BeforeRound) else state


@runtime_checkable
class Gathering(Protocol):
    """A drafter in whose rounds a part of the target's cache is held a second time."""

    def gathers(self, capacity: int) -> int:
        """Slots of every layer that are, of a cache with so many."""
        ...


def gathered_slots(drafter: Drafter, capacity: int) -> int:
    """Slots of the target's cache that a drafter holds a second time."""
    return drafter.gathers(capacity) if isinstance(drafter, Gathering) else 0


@runtime_checkable
class Lossy(Protocol):
    """A drafter whose proposals are taken for the target's draws: the output is *not* its own.

    Nothing else in the library changes a token; whoever reports a result says that this does.
    """

    @property
    def changes_the_output(self) -> str:
        """By what, in words."""
        ...

    @property
    def trusted(self) -> int:
        """How many of the first levels of its trees are taken so: a chain."""
        ...


@dataclass(frozen=True)
class NoDraft:
    """Proposes the pending token alone: plain decoding, through the same step."""

    name: str = field(default="plain", init=False)
    tree: TreeConfig = field(default=PLAIN, init=False)
    needs: Needs = field(default=NOTHING, init=False)

    def begin(self, params: Params, batch: int, capacity: int) -> tuple[()]:
        """No state."""
        return ()

    def extend(self, params: Params, state: tuple[()], committed: Committed) -> tuple[()]:
        """No state."""
        return ()

    def propose(self, params: Params, state: tuple[()], view: View, noise: SamplingNoise) -> Tree:
        """The root without children."""
        return plant(view.pending, self.tree)
