"""The interface of a drafter, and the drafter that proposes nothing.

A drafter proposes a tree of candidate tokens each round. It cannot change the output, only the
speed: the target's own draws decide which path is accepted. A drafter's state is its own pytree. It
learns of committed tokens in one way only, :meth:`Drafter.extend`, for a chunk of a prompt and for
the accepted path of a round alike.

A drafter declares what it needs of the target's forward (:class:`Needs`), and gets the target's
cache in a round (:class:`View`). Drafters compose: one may hold another, and run the target over a
part of its cache to improve on it (:mod:`longspec_jax.drafters.retrieval.hierarchy`), or hold
several that propose into one tree (:mod:`longspec_jax.drafters.joined`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PyTree

from longspec_jax.axes import Array, Leaf, Lengths, Queries, TreeMask
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.tree import Tree, root_tree
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.recurrence.operands import RecurrentRows


@dataclass(frozen=True, eq=False)
class Params:
    """Parameters of both models, as their ``apply`` functions take them.

    Every launch flattens its arguments, for which dicts sort their keys: a third of what jax takes
    to launch a program of 400 parameters. So these keep their arrays in a row as well, and what is
    changed in place afterwards is not seen.
    """

    target: PyTree
    draft: PyTree
    costs: Leaf[Float[Array, " 2"]] | None = None
    """Seconds of a round that verifies only the pending token, and of one that verifies a tree.

    Where they are given, a tree that costs nothing to propose is verified only if it is worth its
    seconds. Absent, every tree is verified."""

    @cached_property
    def flat(self) -> tuple[list[PyTree], PyTree]:
        """The arrays, and the structure that they stand in."""
        return jax.tree.flatten((self.target, self.draft, self.costs))


jax.tree_util.register_pytree_node(
    Params,
    attrgetter("flat"),
    lambda structure, arrays: Params(*jax.tree.unflatten(structure, arrays)),
)


@dataclass(frozen=True)
class Needs:
    """What a drafter needs to learn of committed tokens; nothing else is computed for it."""

    hidden: tuple[int, ...] = ()
    """Layers after which it takes the hidden states; the first is 0, and -1 is the embedding. So
    ``i - 1`` is what enters layer ``i``. The number of layers stands for what leaves the final
    norm."""
    queries: tuple[int, ...] = ()
    """Layers whose queries it takes, rotary applied."""
    keys: tuple[int, ...] = ()
    """Layers whose keys it takes, rotary applied."""
    recent: int | None = None
    """How many of the last committed tokens its state depends on; all of them if absent. It does
    not get chunks of a prompt that end before these."""
    first: int = 0
    """How many of the first tokens it depends on besides the last ones."""
    text: bool = False
    """Whether it gets all committed tokens; only their ids where it needs no features of them."""

    def __or__(self, other: "Needs") -> "Needs":
        """What two drafters need together."""
        whole = self.recent is None or other.recent is None
        return Needs(
            tuple(sorted({*self.hidden, *other.hidden})),
            tuple(sorted({*self.queries, *other.queries})),
            tuple(sorted({*self.keys, *other.keys})),
            None if whole else max(self.recent or 0, other.recent or 0),
            max(self.first, other.first),
            self.text or other.text,
        )

    @cached_property
    def of_a_pass(self) -> "Needs":
        """The needs of one forward, whichever its tokens: equal ones share programs."""
        return replace(self, recent=None, first=0, text=False)


NOTHING = Needs(recent=0)
"""The needs of a drafter that keeps no state."""


class Features(NamedTuple):
    """What a forward of the target computed at its tokens, by layer; holds what was needed only."""

    hidden: Mapping[int, Float[Array, "B n D"]] = {}
    """The residual stream after the layer, before any norm; the embedding at -1, and what leaves
    the final norm at the number of layers."""
    queries: Mapping[int, Float[Array, "B n N H"]] = {}
    """The layer's queries, rotary applied."""
    keys: Mapping[int, Float[Array, "B n K H"]] = {}
    """The layer's keys, rotary applied."""

    def serve(self, needs: Needs) -> bool:
        """Whether they hold all that is needed."""
        held = {*needs.hidden} <= {*self.hidden}, {*needs.queries} <= {*self.queries}
        return all(held) and {*needs.keys} <= {*self.keys}


class Committed(NamedTuple):
    """Tokens that joined the prefix, with what the target's forward computed at them."""

    tokens: Int[Array, "B n"]
    """Garbage from ``count[b]`` on."""
    start: Lengths
    """Position of each row's first token."""
    # Shadows tuple.count on purpose.
    count: Lengths  # pyright: ignore[reportIncompatibleMethodOverride]
    """How many of the tokens joined; 0 for a row that did not advance."""
    features: Features = Features()

    def last(self, most: int) -> "Committed":
        """The last ``most`` of the tokens that joined, if more are given; without the features."""
        tokens, start, count = self.tokens, self.start, self.count
        if tokens.shape[1] > most:
            skipped = jnp.maximum(count - most, 0)
            index = skipped[:, None] + jnp.arange(most)
            tokens = jnp.take_along_axis(tokens, index, axis=1)
            start, count = start + skipped, count - skipped
        return Committed(tokens, start, count)


@cache
def proposers(sources: tuple[str, ...], bits: int) -> str:
    """Who proposed a token, such as ``longspec+ngram``.

    Args:
      sources: as in :attr:`Drafter.sources`.
      bits: of the token; not 0.
    """
    return "+".join(name for index, name in enumerate(sources) if bits >> index & 1)


@runtime_checkable
class SamplingNoise(Protocol):
    """The noise, temperatures and filters of a round's draws, known before the target runs.

    Depth ``d`` is about the token that follows a node of depth ``d``.
    """

    def scores(self, logits: Float[Array, "B w V"], depth: int) -> Float[Array, "B w V"]:
        """How likely the target draws each token, estimated from a draft's logits.

        Log-probabilities up to a constant of each node.
        """
        ...

    def chances(
        self, likely: Float[Array, "B w levels"], tokens: Int[Array, "B w levels"]
    ) -> Float[Array, "B w levels"]:
        """How likely the target draws tokens, estimated from that where the noise is not known.

        ``tokens[b, i, d]`` follows a node of depth ``d``.
        """
        ...

    def draw(self, logits: Float[Array, "B T V"], depths: Int[Array, "#B T"]) -> Int[Array, "B T"]:
        """What the target draws from these logits at nodes of these depths."""
        ...

    def among(self, tokens: Int[Array, "*B v"]) -> "SamplingNoise":
        """The same for the logits of only these tokens, the same in all rows or each row's own."""
        ...

    def after(self, steps: Lengths, levels: int) -> "SamplingNoise":
        """The same for nodes below ``steps[b]`` more tokens, down to ``levels`` levels."""
        ...


class Uncommitted(NamedTuple):
    """Keys and values of tokens that are not in the cache, ``L x [B, U, K, H]`` each."""

    keys: tuple[Array | None, ...]
    """None of a recurrent layer."""
    values: tuple[Array | None, ...]
    rows: Mapping[int, RecurrentRows] = {}
    """What the tokens write to the states of recurrent layers."""


class PartialForward(NamedTuple):
    """What a forward of the target over a part of its cache yields."""

    logits: Float[Array, "B T V"]
    fresh: Uncommitted
    """The given ones, with those of the tokens written among them."""
    features: Features


ReadParts: TypeAlias = Callable[[int, Queries], tuple[Queries, Sequence[Prefix]]]
"""Reads the parts of a layer's prefix for queries; attention reads them one after the other."""


@runtime_checkable
class Selection(Protocol):
    """A part of every row's committed tokens; no token is in it twice."""

    def reading(self, cache: PyTree) -> ReadParts:
        """What attention reads of a target's cache in a forward."""
        ...

    def apart(self, layer: int) -> Prefix | None:
        """What it holds of a layer (-1 for the last), if that is a copy apart from the cache."""
        ...


class Between(NamedTuple):
    """Tokens after the committed ones and before the pending one, which are not in the cache."""

    rows: Uncommitted
    there: Bool[Array, "B U"]
    """Which of them exist in each row."""


@dataclass(frozen=True, eq=False)
class View:
    """What a drafter sees when it proposes, and what the target can run for it.

    It lives while a round is traced.
    """

    target: PyTree
    """A :class:`longspec_jax.decoding.target.TargetModel`."""
    params: PyTree
    """The target's."""
    cache: PyTree
    """The target's keys and values, a :class:`longspec_jax.decoding.cache.KVCache`."""
    pending: Int[Array, " B"]
    """The last token of each row, not in the cache: the root of the tree."""
    position: Lengths
    """The pending token's position."""
    length: Lengths
    """Cache slots of each row that hold committed tokens.

    Equal to the position, except in a view :meth:`ahead` of the committed tokens."""
    done: Bool[Array, " B"]
    """Rows that have ended: nothing more is emitted, so they are not worth a forward."""
    between: Between | None = None
    selected: Prefix | None = None
    """What drafts read of their layer; all of it if absent."""

    def read_layer(self) -> Prefix:
        """What a draft reads of the target: all of one layer's cache, or the selection.

        The layer is :attr:`longspec_jax.config.target.TargetConfig.read_layer`.
        """
        if self.selected is not None:
            return replace(self.selected, scales=self.cache.read_scales)
        return self.cache.read(self.length)

    def uncommitted(self, tokens: int) -> Uncommitted:
        """Zeros for the keys and values of this many tokens outside the cache."""
        return self.cache.uncommitted(len(self.pending), tokens, self.target.dtype)

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
          fresh: keys and values of all fresh tokens; those of these tokens are written at ``at``.
          mask: ``[B, T, U]`` which fresh tokens each of them sees, itself included.
          at: index of the first of these tokens among the fresh ones.
          needs: what to return of them besides the logits.
        """
        run = partial(
            self.target.partial_forward,
            self.params,
            self.cache,
            tokens,
            positions,
            selection,
            length=self.length,
            needs=needs,
        )
        if self.between is None:
            return run(fresh, mask, at)
        before = self.between.there.shape[1]
        shape = (*tokens.shape, before)
        mask = jnp.concatenate([jnp.broadcast_to(self.between.there[:, None], shape), mask], axis=2)
        forward = run(_joined(self.between.rows, fresh), mask, before + at)
        fresh = jax.tree.map(lambda row: row[:, before:], forward.fresh)
        return forward._replace(fresh=fresh)

    def ahead(self, pending: Int[Array, " B"], steps: Lengths, past: Uncommitted) -> "View":
        """The same cache, seen from ``steps[b]`` tokens further on, which are not in it.

        Args:
          pending: the pending token there.
          steps: how many tokens further on; the pending token of this view is the first of them.
          past: their keys and values, garbage from ``steps[b]`` on; partial forwards see them.
        """
        there = jnp.arange(jax.tree.leaves(past)[0].shape[1]) < steps[:, None]
        if self.between is not None:
            there = jnp.concatenate([self.between.there, there], axis=1)
            past = _joined(self.between.rows, past)
        position = self.position + steps
        return replace(self, pending=pending, position=position, between=Between(past, there))

    def within(self, selection: Selection) -> "View":
        """The same view, whose :meth:`read_layer` is the selection, if that is a copy.

        Drafts inside a partial round use it: reading all of a long cache at every level of a tree
        would cost more than the partial forward does.
        """
        return replace(self, selected=selection.apart(self.cache.read_layer))


def _joined(first: Uncommitted, second: Uncommitted) -> Uncommitted:
    """The tokens of both, one after the other."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)


class Drafter:
    """Pure functions of parameters and state; the object itself is a frozen dataclass.

    By default it has no state, copies nothing of the cache, and its output is lossless.
    """

    name: str
    """Name of the drafter kind."""
    tree: TreeConfig
    """The static shape of the trees it proposes. One that the drafter cannot grow is refused when
    the drafter is made."""
    looks_up: ClassVar[bool] = False
    """Whether it proposes what text holds already, and has no model. All of its trees then have
    :attr:`Tree.totals`, by which rounds weigh them."""

    @cached_property
    def label(self) -> str:
        """Its name; that of plain decoding where its tree has no levels."""
        return self.name if self.tree.num_levels else "plain"

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of those that propose, in the order of the bits of :attr:`Tree.sources`."""
        return (self.name,)

    @cached_property
    def parts(self) -> tuple[TreeConfig, ...]:
        """The tree that each of :attr:`sources` grows, before a budget chooses."""
        return (TreeConfig(self.tree.widths),)

    @property
    def proposes_freely(self) -> bool:
        """Whether a proposal costs next to nothing, and says how likely its nodes are."""
        return self.looks_up

    @cached_property
    def needs(self) -> Needs:
        """What it needs to learn of committed tokens."""
        return NOTHING

    def begin(self, params: Params, batch: int, capacity: int) -> Any:
        """The state of rows without a token, every leaf ``[B, ...]``.

        Args:
          params: parameters of both models.
          batch: rows.
          capacity: most tokens that a row will hold.
        """
        return ()

    def extend(self, params: Params, state: PyTree, committed: Committed) -> Any:
        """The state after more tokens were committed: a chunk of a prompt, or an accepted path."""
        return state

    def before_round(self, params: Params, state: PyTree, view: View) -> Any:
        """The state before a round, which may take something from the target's cache."""
        return state

    def propose(self, params: Params, state: PyTree, view: View, noise: SamplingNoise) -> Tree:
        """Candidate continuations of the pending tokens: ``tree.num_nodes`` nodes with the root."""
        raise NotImplementedError

    def offer(self, params: Params, state: PyTree, view: View, noise: SamplingNoise) -> Tree:
        """What it proposes where others do, too: :attr:`tree` whole, with totals of its nodes.

        Equal nodes are merged afterwards (:mod:`longspec_jax.drafters.union`).
        """
        return self.propose(params, state, view, noise)

    def gathered_slots(self, capacity: int) -> int:
        """Slots of every layer of the target's cache that it copies in a round."""
        return 0

    @cached_property
    def lossless(self) -> bool:
        """Whether the output is the target's own. Reports must show a drafter that is not."""
        return True

    @property
    def unverified_levels(self) -> int:
        """First levels of its trees that are emitted whatever the target draws; 0 if lossless."""
        return 0


@dataclass(frozen=True)
class NoDraft(Drafter):
    """Proposes only the pending token: plain decoding, through the same step."""

    name: str = field(default="plain", init=False)
    tree: TreeConfig = field(default=PLAIN, init=False)

    def propose(self, params: Params, state: tuple[()], view: View, noise: SamplingNoise) -> Tree:
        """The root without children."""
        return root_tree(view.pending, self.tree)
