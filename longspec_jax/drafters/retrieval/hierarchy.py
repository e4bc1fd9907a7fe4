"""A drafter whose trees the target verifies over a part of its cache before it verifies in full.

Several rounds of speculative decoding take place inside a proposal: another drafter proposes, the
target runs over a selection of its cache, and its draws choose a path of the tree. The accepted
paths form one long chain, which the full verification checks with the same noise. So the output is
exactly the target's, whatever was selected.

Two published methods are instances. SpecPV (arXiv:2512.02337, sections 3.2 and 3.3) verifies an
EAGLE-3 tree over part of the cache for many rounds, emits what they accept, and repairs the cache
by a full forward now and then; here the full one decides before anything is emitted, unless
``verify_all`` is False. TriForce (arXiv:2404.11912): a small model with a short cache drafts for
the target with a retrieved one, which drafts for the target with all of it. Here that is a
hierarchy around a small model with a working cache.

A tree of the inner drafter may hang at the end of the chain, for the full verification only: where
it confirms the whole chain, it goes on into the tree instead of stopping at one more token.

The options here stand next to those of a draft of any kind: ``retrieve=4096`` makes a
:class:`RetrievalDraft` of it.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, PyTree

from longspec_jax.axes import Array, Lengths
from longspec_jax.checks import shown
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import DEFAULT_TREE, PLAIN, TreeConfig
from longspec_jax.drafters.base import (
    Committed,
    Drafter,
    Needs,
    Params,
    SamplingNoise,
    Selection,
    Uncommitted,
    View,
)
from longspec_jax.drafters.draft import DefaultTrees, Draft, with_tree
from longspec_jax.drafters.retrieval.selection import (
    AttentionRetriever,
    Quest,
    Selector,
    SinksAndRecent,
)
from longspec_jax.drafters.tree import (
    Tree,
    accept,
    hang_at_end,
    node_depths,
    root_tree,
    single_branch,
)
from longspec_jax.ops.selection.blocks import BlockBudget
from longspec_jax.ops.slicing import along, last_along


class HierarchyState(NamedTuple):
    """What the inner drafter and the selector know of the committed tokens."""

    inner: PyTree
    selector: PyTree


@dataclass(frozen=True)
class PartialVerifier(Drafter):
    """Proposes the chain that rounds of another drafter yield under partial verification.

    A row goes on while the chain has slack for a whole round's tokens, so that none is thrown away.
    Of several rows all wait for the slowest one.
    """

    inner: Drafter
    selector: Selector = SinksAndRecent()
    """Chooses which committed tokens the partial verification sees besides the chain so far; once a
    proposal, that is after every full verification."""
    tree: TreeConfig = TreeConfig((1,) * 16)
    """The chain that a full verification is handed, ``chain:16``, or one with a tree of the inner
    drafter at its end, ``chain:16/4,8``. An empty chain, ``chain:0/4,8``, is only that tree: one
    level, without partial verification."""
    verify_all: bool = True
    """Whether the full verification decides about the chain. If not, the chain is emitted as it is,
    as SpecPV was published: fast, and *not lossless*. The full forward then computes the exact keys
    and values of the chain, but a token that only the whole context rules out stays in the text."""

    name: str = field(init=False)

    def __post_init__(self) -> None:
        own = f"hierarchy of {self.inner.name}" + ("" if self.verify_all else ", not lossless")
        object.__setattr__(self, "name", own)
        chosen = self.tree.selective or self.tree.threshold is not None
        if self.tree.chain is None and ({*self.tree.widths} - {1} or chosen):
            raise ValueError(
                f"tree {self.tree} must be a chain such as chain:16: partial verification leaves "
                "one path for the full one; a tree that only the full one sees stands after it, "
                f"chain:16/{TreeConfig(self.tree.widths)}"
            )

    @cached_property
    def lossless(self) -> bool:
        """Whether the full verification decides about every token."""
        return self.verify_all

    @property
    def unverified_levels(self) -> int:
        """The chain if it is emitted as it is; a tree at its end is verified in full."""
        return 0 if self.verify_all else self.levels

    @cached_property
    def needs(self) -> Needs:
        """What the inner drafter and the selector need."""
        return self.inner.needs | self.selector.needs

    def begin(self, params: Params, batch: int, capacity: int) -> HierarchyState:
        """The inner drafter's state and the selector's."""
        inner = self.inner.begin(params, batch, capacity)
        return HierarchyState(inner, self.selector.begin(batch, capacity))

    def extend(self, params: Params, state: HierarchyState, committed: Committed) -> HierarchyState:
        """Let both learn of committed tokens."""
        inner = self.inner.extend(params, state.inner, committed)
        return HierarchyState(inner, self.selector.extend(state.selector, committed))

    def before_round(self, params: Params, state: HierarchyState, view: View) -> HierarchyState:
        """Prepare the inner drafter, once before all of the rounds inside a proposal."""
        return state._replace(inner=self.inner.before_round(params, state.inner, view))

    def propose(
        self, params: Params, state: HierarchyState, view: View, noise: SamplingNoise
    ) -> Tree:
        """The chain of what the rounds draw; their state and their K/V are thrown away.

        Nodes that a row lacks at the end of the chain have no parent, so no path reaches them.
        """
        levels = self.levels
        if self.tree.num_levels == 0:
            return root_tree(view.pending, self.tree)
        if levels == 0:
            return self._end(params, state.inner, view, noise)
        with jax.named_scope("selection"):
            selected = self.selector.choose(state.selector, view)
        view = view.within(selected)
        chain = _Chain.empty(view, levels + self._height, state.inner)

        def extended(chain: _Chain) -> _Chain:
            with jax.named_scope("partial_round"):
                found = self._round(params, chain, selected, view, noise)
                inner = self.inner.extend(params, chain.state, found.committed)
                return chain.after(found, inner, levels - self._height)

        chain = jax.lax.while_loop(lambda chain: chain.open.any(), extended, chain)
        tree = single_branch(view.pending, chain.tokens[:, :levels])
        drawn = jnp.arange(levels + 1) <= chain.count[:, None]
        tree = replace(tree, parents=jnp.where(drawn, tree.parents, -1))
        if self.tree.chain is None:
            return tree
        with jax.named_scope("end_of_chain"):
            view = view.ahead(chain.pending, chain.count, chain.rows)
            noise = noise.after(chain.count, self.tree.end.num_levels)
            return hang_at_end(tree, chain.count, self._end(params, chain.state, view, noise))

    def gathered_slots(self, capacity: int) -> int:
        """Slots that its selector copies, and those of a hierarchy inside."""
        own = self.selector.gathered_slots(capacity) if self.levels else 0
        return own + self.inner.gathered_slots(capacity)

    @property
    def levels(self) -> int:
        """Levels of the chain: the most tokens between two full verifications."""
        return self.tree.num_levels if self.tree.chain is None else self.tree.chain

    def _end(self, params: Params, state: PyTree, view: View, noise: SamplingNoise) -> Tree:
        """The tree that only the full verification sees, of the innermost drafter."""
        drafter = self.inner
        while isinstance(drafter, PartialVerifier):
            drafter, state = drafter.inner, state.inner
        return with_tree(drafter, self.tree.end).propose(params, state, view, noise)

    @property
    def _height(self) -> int:
        """The most tokens that one round yields."""
        return self.inner.tree.num_levels + 1

    def _round(
        self,
        params: Params,
        chain: "_Chain",
        selected: Selection,
        start: View,
        noise: SamplingNoise,
    ) -> "_Round":
        """Propose, run the partial forward and accept, from where the chain ends."""
        view = start.ahead(chain.pending, chain.count, chain.rows)
        noise = noise.after(chain.count, self._height - 1)
        tree = self.inner.propose(params, chain.state, view, noise)
        depths = node_depths(tree, self.inner.tree)
        forward = view.partial_forward(
            tree.tokens,
            view.position[:, None] + depths,
            selected,
            view.uncommitted(tree.tokens.shape[1]),
            tree.mask,
            0,
            self.inner.needs,
        )
        accepted_path = accept(tree, noise.draw(forward.logits, depths), self._height - 1)
        # From logits that are not finite the target draws -1, which must not become a candidate.
        tokens = jnp.maximum(accepted_path.tokens, 0)
        rows, features = jax.tree.map(
            partial(along, accepted_path.path), (forward.fresh, forward.features)
        )
        run = jnp.concatenate([view.pending[:, None], tokens[:, :-1]], axis=1)
        count = jnp.where(chain.open, accepted_path.count, 0)
        return _Round(tokens, Committed(run, view.position, count, features), rows)


def on_one_level(tree: TreeConfig) -> TreeConfig:
    """A tree for a hierarchy that verifies nothing in part."""
    return replace(tree, chain=0)


class _Round(NamedTuple):
    """What a partial verification found in each row."""

    tokens: Int[Array, "B h"]
    """What it drew along the accepted path; as many count as were committed."""
    committed: Committed
    """The accepted path: the tokens that these were drawn after. None in a row that is closed."""
    rows: Uncommitted
    """Its keys and values."""


class _Chain(NamedTuple):
    """What the rounds so far have found.

    Rows accept different numbers of tokens, so each is written at an offset of its own. The buffers
    have slack for one round more than any row keeps.
    """

    tokens: Int[Array, "B n"]
    """Those that were drawn."""
    rows: Uncommitted
    """Keys and values of those that were run: the pending token, and all drawn but the last."""
    # Shadows tuple.count on purpose.
    count: Lengths  # pyright: ignore[reportIncompatibleMethodOverride]
    """How many tokens were drawn, which is how many were run."""
    pending: Int[Array, " B"]
    """The last one drawn."""
    open: Bool[Array, " B"]
    """Rows that go on."""
    state: PyTree
    """The inner drafter's."""

    @classmethod
    def empty(cls, view: View, size: int, state: PyTree) -> "_Chain":
        """Before the first round; rows that are done do not take part."""
        count = jnp.zeros_like(view.pending)
        tokens = jnp.zeros((count.shape[0], size), jnp.int32)
        return cls(tokens, view.uncommitted(size), count, view.pending, ~view.done, state)

    def after(self, found: _Round, state: PyTree, last: int) -> "_Chain":
        """After a round; rows go on whose count is at most ``last``."""
        write = partial(_written, at=self.count)
        joined = found.committed.count
        final = last_along(found.tokens, joined)
        count = self.count + joined
        return _Chain(
            tokens=write(self.tokens, found.tokens),
            rows=jax.tree.map(write, self.rows, found.rows),
            count=count,
            pending=jnp.where(joined > 0, final, self.pending),
            open=self.open & (count <= last),
            state=state,
        )


def _written(buffer: Array, rows: Array, at: Lengths) -> Array:
    """The buffer ``[B, n, ...]`` with ``rows[b]`` written at ``at[b]``."""
    return jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(buffer, rows, at)


RETRIEVERS = {"quest": Quest, "attention": AttentionRetriever}
"""Values of ``retrieve_by``: bounds of every layer and head, or the last token's attention."""

VERIFY = ("full", "partial")
"""Values of ``retrieve_verify``: the verification that a token must pass to be emitted."""


@dataclass(frozen=True)
class RetrievalOptions:
    """How much of the cache partial verification sees, and what it verifies."""

    retrieve: int
    """Tokens of every row that a partial forward sees, a multiple of the block; includes sinks and
    recent ones."""
    retrieve_by: str = "quest"
    """How blocks are chosen: ``quest`` or ``attention``."""
    retrieve_block: int = BlockBudget.block
    """Tokens that are chosen together."""
    retrieve_sinks: int = BlockBudget.sinks
    """First tokens of a row, always seen."""
    retrieve_recent: int = BlockBudget.recent
    """Last tokens of a row, always seen."""
    retrieve_tree: str | None = None
    """Tree of the draft that partial forwards verify; its default on this machine if absent. The
    call's tree is the chain that the full verification checks."""
    retrieve_verify: str = "full"
    """``full``, or ``partial`` as SpecPV was published, which changes the text: *not lossless*."""

    def __post_init__(self) -> None:
        if self.retrieve_by not in RETRIEVERS:
            raise ValueError(
                f"retrieve_by={shown(self.retrieve_by)} must be one of {', '.join(RETRIEVERS)}"
            )
        if self.retrieve_verify not in VERIFY:
            raise ValueError(
                f"retrieve_verify={shown(self.retrieve_verify)} must be one of "
                f"{', '.join(VERIFY)}; with partial the text is not the target's own"
            )
        try:
            _ = self.budget
        except ValueError as error:
            raise ValueError(f"retrieve={self.retrieve}: {error}") from error
        if self.retrieve_tree is not None:
            TreeConfig.parse(self.retrieve_tree)

    @property
    def budget(self) -> BlockBudget:
        """The blocks."""
        return BlockBudget(
            self.retrieve, self.retrieve_sinks, self.retrieve_recent, self.retrieve_block
        )


def behind_chain(levels: int, tree: TreeConfig) -> TreeConfig:
    """A tree at the end of a chain; together at most the nodes of a large target's default tree."""
    whole = TreeConfig((1,) * levels + tree.widths, threshold=tree.threshold, chain=levels)
    nodes = min(levels + tree.num_nodes, DEFAULT_TREE.num_nodes)
    return replace(whole, budget=nodes) if nodes < whole.num_nodes else whole


@dataclass(frozen=True, eq=False)
class RetrievalDraft(Draft):
    """A draft of any kind with partial verification over retrieved context."""

    joins: ClassVar[bool] = False
    inner: Draft
    """What partial forwards verify."""
    target: TargetConfig
    options: RetrievalOptions
    name: str = field(init=False)
    params: PyTree = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.drafter(PLAIN).name)
        object.__setattr__(self, "params", self.inner.params)

    @property
    def own_params(self) -> Any:
        """The inner draft's."""
        return self.inner.own_params

    @property
    def apart(self) -> "RetrievalDraft":
        """Around the inner one apart."""
        return replace(self, inner=self.inner.apart)

    @property
    def shares_texts(self) -> bool:
        """Whether the inner one does."""
        return self.inner.shares_texts

    @property
    def default_trees(self) -> DefaultTrees:
        """The inner draft's tree alone, and after chains of two to four partial rounds.

        Partial verification pays at long contexts only. So all of them are timed, on large targets
        too.
        """
        own = self.inner.default_trees

        def around(tree: TreeConfig, *chains: int) -> tuple[TreeConfig, ...]:
            tree = replace(tree, lookup=None)
            return *(behind_chain(levels, tree) for levels in chains), on_one_level(tree)

        return DefaultTrees(
            around(own.cpu[0], 8, 16),
            around(own.gpu[0], 16, 8),
            around(own.large[0], 16, 24, 8),
            settled=False,
        )

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError if it does not belong to this target."""
        target.check_read("retrieval")
        self.inner.check_fits(target)
        if target != self.target:
            raise ValueError(
                "this retrieval was made for a target of another shape; load the draft with this "
                "target"
            )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> PartialVerifier:
        """The drafter that proposes this chain, with the tree at its end.

        Raises:
          ValueError: if it does not begin with a chain.
        """
        inner = self.inner.drafter(self._inner_tree, attention)
        selector = RETRIEVERS[self.options.retrieve_by](self.target, self.options.budget)
        return PartialVerifier(inner, selector, tree, self.options.retrieve_verify == "full")

    @property
    def _inner_tree(self) -> TreeConfig:
        if self.options.retrieve_tree is not None:
            return TreeConfig.parse(self.options.retrieve_tree)
        trees = self.inner.default_trees
        return (trees.cpu if jax.default_backend() == "cpu" else trees.large)[0]
