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
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from longspec_jax.axes import Array, Lengths
from longspec_jax.config import MAX_TREE_LEVELS, TreeConfig
from longspec_jax.drafters.base import (
    Beliefs,
    Committed,
    Drafter,
    Needs,
    Params,
    Uncommitted,
    View,
)
from longspec_jax.drafters.selection import SinksAndRecent
from longspec_jax.drafters.tree import Tree, along, branch, node_depths


@dataclass(frozen=True)
class Hierarchy:
    """Proposes the chain that rounds of another drafter yield under partial verification."""

    inner: Drafter
    selection: SinksAndRecent = SinksAndRecent()
    """Which committed tokens the partial verification sees, beside the chain so far."""
    rounds: int = 2
    """Partial verifications before a full one."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.rounds * self._height > MAX_TREE_LEVELS:
            raise ValueError(
                f"rounds={self.rounds} of a tree of {self._height - 1} levels yield up to "
                f"{self.rounds * self._height} tokens, and a full verification takes 1 to "
                f"{MAX_TREE_LEVELS}; use at least one round, and fewer rounds or levels"
            )

    @property
    def name(self) -> str:
        """Its own and the inner one's."""
        return f"hierarchy of {self.inner.name}"

    @property
    def tree(self) -> TreeConfig:
        """A chain of the most tokens that the rounds can yield."""
        return TreeConfig((1,) * (self.rounds * self._height))

    @property
    def needs(self) -> Needs:
        """What the inner drafter wants."""
        return self.inner.needs

    def begin(self, params: Params, batch: int, capacity: int) -> Any:
        """The inner drafter's state."""
        return self.inner.begin(params, batch, capacity)

    def extend(self, params: Params, state: Any, committed: Committed) -> Any:
        """Let the inner drafter learn of committed tokens."""
        return self.inner.extend(params, state, committed)

    def propose(self, params: Params, state: Any, view: View, beliefs: Beliefs) -> Tree:
        """The chain of what the rounds draw; their state and their K/V are thrown away.

        Rows accept different numbers of tokens, so each is written at an offset of its own. What a
        row lacks at the end of the chain is garbage: a candidate like others.
        """
        height, batch = self._height, view.pending.shape[0]
        count = jnp.zeros((batch,), jnp.int32)
        tokens = jnp.zeros((batch, self.rounds * height), jnp.int32)
        past = view.uncommitted((self.rounds - 1) * height)
        here = view
        for index in range(self.rounds):
            with jax.named_scope(f"partial_round_{index + 1}"):
                found = self._round(params, state, here, beliefs.after(count, height - 1))
                tokens = _written(tokens, found.tokens, count)
                if index + 1 < self.rounds:
                    state = self.inner.extend(params, state, found.committed)
                    past = jax.tree.map(partial(_written, at=count), past, found.rows)
                    count += found.committed.count
                    here = view.ahead(found.pending, count, past)
        return branch(view.pending, tokens)

    @property
    def _height(self) -> int:
        """The most tokens that one round yields."""
        return self.inner.tree.num_levels + 1

    def _round(self, params: Params, state: Any, view: View, beliefs: Beliefs) -> "_Round":
        """Propose, glance, walk."""
        tree = self.inner.propose(params, state, view, beliefs)
        depths = node_depths(tree, self.inner.tree)
        glance = view.glance(
            tree.tokens,
            view.position[:, None] + depths,
            self.selection(view.length),
            view.uncommitted(tree.tokens.shape[1]),
            tree.mask,
            0,
            self.needs,
        )
        walked = view.walk(tree, beliefs.draw(glance.logits, depths), self._height - 1)
        # The target draws a token that is none from logits that are not finite; it is no candidate.
        tokens = jnp.maximum(walked.tokens, 0)
        last = jnp.take_along_axis(tokens, walked.count[:, None] - 1, axis=1)[:, 0]
        rows, features = jax.tree.map(partial(along, walked.path), (glance.fresh, glance.features))
        run = jnp.concatenate([view.pending[:, None], tokens[:, :-1]], axis=1)
        committed = Committed(run, view.position, walked.count, features)
        return _Round(tokens, last, committed, rows)


class _Round(NamedTuple):
    """What a partial verification found in each row."""

    tokens: Int[Array, "B h"]
    """What it drew along the accepted path; as many count as were committed."""
    pending: Int[Array, " B"]
    """The last of them."""
    committed: Committed
    """The accepted path: the tokens that these were drawn after."""
    rows: Uncommitted
    """Its keys and values."""


def _written(buffer: Array, rows: Array, at: Lengths) -> Array:
    """The buffer ``[B, n, ...]`` with ``rows[b]`` written at ``at[b]``."""
    return jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(buffer, rows, at)
