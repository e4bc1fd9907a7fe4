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
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Lengths
from longspec_jax.config.tree import TreeConfig
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
from longspec_jax.drafters.draft import with_tree
from longspec_jax.drafters.retrieval.selection import Selector, SinksAndRecent
from longspec_jax.drafters.tree import Tree, accept, at_end, branch, node_depths, plant
from longspec_jax.ops.slicing import along, last_along


class HierarchyState(NamedTuple):
    """What the inner drafter and the selector know of the committed tokens."""

    inner: Any
    selector: Any


@dataclass(frozen=True)
class Hierarchy(Drafter):
    """Proposes the chain that rounds of another drafter yield under partial verification.

    A row goes on while the chain has slack for a whole round's tokens, so that none is thrown away.
    Of several rows all wait for the slowest one.
    """

    inner: Drafter
    selector: Selector = SinksAndRecent()
    """Chooses which committed tokens the partial verification sees beside the chain so far; once a
    proposal, that is after every full verification."""
    tree: TreeConfig = TreeConfig((1,) * 16)
    """The chain that a full verification is handed, ``chain:16``, or one with a tree of the inner
    drafter at its end, ``chain:16/4,8``. A chain of none, ``chain:0/4,8``, is that tree alone: one
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
                "one path for the full one; a tree that only the full one sees stands behind it, "
                f"chain:16/{TreeConfig(self.tree.widths)}"
            )

    @property
    def lossless(self) -> bool:
        """Whether the full verification decides about every token."""
        return self.verify_all

    @property
    def trusted(self) -> int:
        """The chain if it is emitted as it is; a tree at its end is verified in full."""
        return 0 if self.verify_all else self.levels

    @property
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
            return plant(view.pending, self.tree)
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
        tree = branch(view.pending, chain.tokens[:, :levels])
        drawn = jnp.arange(levels + 1) <= chain.count[:, None]
        tree = replace(tree, parents=jnp.where(drawn, tree.parents, -1))
        if self.tree.chain is None:
            return tree
        with jax.named_scope("end_of_chain"):
            view = view.ahead(chain.pending, chain.count, chain.rows)
            noise = noise.after(chain.count, self.tree.end.num_levels)
            return at_end(tree, chain.count, self._end(params, chain.state, view, noise))

    def gathered_slots(self, capacity: int) -> int:
        """Slots that its selector copies, and those of a hierarchy inside."""
        own = self.selector.gathered_slots(capacity) if self.levels else 0
        return own + self.inner.gathered_slots(capacity)

    @property
    def levels(self) -> int:
        """Of the chain: the most tokens between two full verifications."""
        return self.tree.num_levels if self.tree.chain is None else self.tree.chain

    def _end(self, params: Params, state: Any, view: View, noise: SamplingNoise) -> Tree:
        """The tree that only the full verification sees, of the innermost drafter."""
        drafter = self.inner
        while isinstance(drafter, Hierarchy):
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
    state: Any
    """The inner drafter's."""

    @classmethod
    def empty(cls, view: View, size: int, state: Any) -> "_Chain":
        """Before the first round; rows that are done do not take part."""
        count = jnp.zeros_like(view.pending)
        tokens = jnp.zeros((count.shape[0], size), jnp.int32)
        return cls(tokens, view.uncommitted(size), count, view.pending, ~view.done, state)

    def after(self, found: _Round, state: Any, last: int) -> "_Chain":
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
