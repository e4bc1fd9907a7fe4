"""A drafter whose trees the target checks over a part of its cache before it checks them whole.

Some rounds of speculative decoding take place inside a proposal: another drafter proposes, the
target runs over a selection of its cache, and its draws walk the tree. What they accept becomes one
long chain, which is handed to the full verification. As that has the last word, with the same
noise, the output is exactly the target's, whatever was selected.

Two published methods are instances. SpecPV (arXiv:2512.02337, sections 3.2 and 3.3) verifies an
EAGLE-3 tree over part of the cache for many rounds, emits what they accept, and repairs the cache
by a full pass now and then; here the full pass decides before anything is emitted. TriForce
(arXiv:2404.11912) has a small model with a short cache draft for the target with a retrieved one,
which drafts for the target with all of it: two levels, as here with such a drafter inside.

A tree of the drafter inside may hang at the chain's end, for the full pass alone to verify: where
it confirms the whole chain, it goes on into the tree instead of stopping at one more token.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Lengths
from longspec_jax.config import TreeConfig
from longspec_jax.drafters.base import (
    Committed,
    Drafter,
    Needs,
    Params,
    SamplingNoise,
    Uncommitted,
    View,
    gathered_slots,
    run_before_round,
)
from longspec_jax.drafters.draft import with_tree
from longspec_jax.drafters.selection import Selection
from longspec_jax.drafters.selectors import Selector, SinksAndRecent
from longspec_jax.drafters.tree import Tree, at_end, branch, node_depths, plant
from longspec_jax.ops.along import along, last_along


class HierarchyState(NamedTuple):
    """What the drafter inside and the selector know of the committed tokens."""

    inner: Any
    selector: Any


@dataclass(frozen=True)
class Hierarchy:
    """Proposes the chain that rounds of another drafter yield under partial verification.

    A row goes on for as long as a whole round's yield has room in the chain, so that nothing of it
    is thrown away; where a batch holds several rows, all wait for the one that gets on most slowly.
    """

    inner: Drafter
    selector: Selector = SinksAndRecent()
    """Chooses which committed tokens the partial verification sees, beside the chain so far; once a
    proposal, which is after every full verification."""
    tree: TreeConfig = TreeConfig((1,) * 16)
    """The chain that a full verification is handed, ``chain:16``, or one with a tree of the inner
    drafter at its end, ``chain:16/4,8``. A chain of none, ``chain:0/4,8``, is that tree alone: one
    level, without partial verification."""
    lead: float = 0.0
    """How far ahead of every other token each one on a row's chain must be, in nats after noise and
    temperature, for the row to go on. A token that is less so may well be another one once all of
    the cache is seen."""

    def __post_init__(self) -> None:
        chosen = self.tree.selective or self.tree.threshold is not None
        if self.tree.chain is None and ({*self.tree.widths} - {1} or chosen):
            raise ValueError(
                f"tree {self.tree} must be a chain such as chain:16: partial verification leaves "
                "one path for the full one; a tree that only the full one sees stands behind it, "
                f"chain:16/{TreeConfig(self.tree.widths)}"
            )
        if not self.lead >= 0:  # Not true of NaN either.
            raise ValueError(f"lead={self.lead} must be 0 or more nats; 0 never stops a row")

    @property
    def name(self) -> str:
        """Its own and the inner one's."""
        return f"hierarchy of {self.inner.name}"

    @property
    def needs(self) -> Needs:
        """What the inner drafter and the selector want."""
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
        """Let both look at the cache: once before all of the rounds."""
        inner = run_before_round(self.inner, params, state.inner, view)
        if self.levels == 0:
            return state._replace(inner=inner)  # Nothing is verified in part.
        return HierarchyState(inner, self.selector.before_round(state.selector, view))

    def propose(
        self, params: Params, state: HierarchyState, view: View, noise: SamplingNoise
    ) -> Tree:
        """The chain of what the rounds draw; their state and their K/V are thrown away.

        What a row lacks at the end of the chain has no parent, so that no walk comes to it.
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
                return chain.after(found, inner, levels - self._height, self.lead)

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

    def gathers(self, capacity: int) -> int:
        """What its selector copies, and that of a hierarchy inside."""
        own = self.selector.gathers(capacity) if self.levels else 0
        return own + gathered_slots(self.inner, capacity)

    @property
    def levels(self) -> int:
        """Of the chain: the most tokens that are verified in part before they are in full."""
        return self.tree.num_levels if self.tree.chain is None else self.tree.chain

    def _end(self, params: Params, state: Any, view: View, noise: SamplingNoise) -> Tree:
        """The tree that only the full verification sees, of the innermost drafter."""
        drafter = self.inner
        while isinstance(drafter, Hierarchy):
            drafter, state = drafter.inner, state.inner
        return with_tree(drafter, self.tree.end).propose(params, state, view, noise)

    @property
    def shortest(self) -> int:
        """Tokens that every chain has at least: a row goes on while a whole round has room."""
        if not self.levels:
            return 0
        return max(1, self.levels - self._height + 1) if self.lead == 0 else 1

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
        """Propose, glance, walk, from where the chain ends."""
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
        accepted_path = view.accept(tree, noise.draw(forward.logits, depths), self._height - 1)
        # The target draws a token that is none from logits that are not finite; it is no candidate.
        tokens = jnp.maximum(accepted_path.tokens, 0)
        rows, features = jax.tree.map(
            partial(along, accepted_path.path), (forward.fresh, forward.features)
        )
        lead = jnp.full(tokens.shape, jnp.inf)
        if self.lead > 0:
            logits, depths = jax.tree.map(
                partial(along, accepted_path.path),
                (forward.logits, jnp.broadcast_to(depths, tree.tokens.shape)),
            )
            lead = noise.lead(logits, depths)
        run = jnp.concatenate([view.pending[:, None], tokens[:, :-1]], axis=1)
        count = jnp.where(chain.open, accepted_path.count, 0)
        return _Round(tokens, lead, Committed(run, view.position, count, features), rows)


def on_one_level(tree: TreeConfig) -> TreeConfig:
    """A tree as a hierarchy takes it that verifies nothing in part."""
    return replace(tree, chain=0)


class _Round(NamedTuple):
    """What a partial verification found in each row."""

    tokens: Int[Array, "B h"]
    """What it drew along the accepted path; as many count as were committed."""
    lead: Float[Array, "B h"]
    """How far each was ahead of all others."""
    committed: Committed
    """The accepted path: the tokens that these were drawn after. None in a row that is closed."""
    rows: Uncommitted
    """Its keys and values."""


class _Chain(NamedTuple):
    """What the rounds so far have found.

    Rows accept different numbers of tokens, so each is written at an offset of its own; there is
    room for a round more than any row keeps.
    """

    tokens: Int[Array, "B n"]
    """Those that were drawn."""
    rows: Uncommitted
    """Keys and values of those that were run: the pending token, and all drawn but the last."""
    # tuple.count is not missed.
    count: Lengths  # pyright: ignore[reportIncompatibleMethodOverride]
    """How many were drawn, and how many run."""
    pending: Int[Array, " B"]
    """The last one drawn."""
    open: Bool[Array, " B"]
    """Rows that go on."""
    state: Any
    """The inner drafter's."""

    @classmethod
    def empty(cls, view: View, room: int, state: Any) -> "_Chain":
        """Before the first round, which rows that are done do not take part in."""
        count = jnp.zeros_like(view.pending)
        tokens = jnp.zeros((count.shape[0], room), jnp.int32)
        return cls(tokens, view.uncommitted(room), count, view.pending, ~view.done, state)

    def after(self, found: _Round, state: Any, last: int, lead: float) -> "_Chain":
        """After a round; rows go on whose count is not above ``last`` and whose leads suffice."""
        write = partial(_written, at=self.count)
        joined = found.committed.count
        inside = jnp.arange(found.tokens.shape[1]) < joined[:, None]
        final = last_along(found.tokens, joined)
        count = self.count + joined
        sure = jnp.where(inside, found.lead, jnp.inf).min(axis=1) >= lead
        return _Chain(
            tokens=write(self.tokens, found.tokens),
            rows=jax.tree.map(write, self.rows, found.rows),
            count=count,
            pending=jnp.where(joined > 0, final, self.pending),
            open=self.open & sure & (count <= last),
            state=state,
        )


def _written(buffer: Array, rows: Array, at: Lengths) -> Array:
    """The buffer ``[B, n, ...]`` with ``rows[b]`` written at ``at[b]``."""
    return jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(buffer, rows, at)
