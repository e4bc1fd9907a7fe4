"""What the decode loop asks of a drafter, and the drafter that proposes nothing.

A drafter proposes a tree of candidate tokens each round. It may read the target's last-layer K/V;
whatever state it keeps is its own pytree. It cannot change the output, only the speed: the target's
own draws walk its tree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots, Lengths
from longspec_jax.config import PLAIN, TreeConfig
from longspec_jax.drafters.tree import Tree, plant

Score: TypeAlias = Callable[..., Float[Array, "B w v"]]
"""``(draft logits[B, w, V], depth) -> log-probabilities`` that the target will draw each token at a
node of this depth, the round's sampling noise and temperature included. A drafter whose logits cover
a part of the vocabulary passes the token of every logit as a third argument."""


class Context(NamedTuple):
    """What a drafter may look at when it proposes."""

    pending: Int[Array, " B"]
    """The last emitted token of each row, not yet in the cache: the root of the tree."""
    length: Lengths
    """Committed tokens of each row; the pending token's position."""
    keys: CacheSlots
    """The target's last-layer keys; row ``b`` holds ``length[b]`` committed slots."""
    values: CacheSlots
    """The target's last-layer values."""


@runtime_checkable
class Drafter(Protocol):
    """Pure functions of parameters and state; the object itself is static and hashable."""

    @property
    def tree(self) -> TreeConfig:
        """The static shape of the trees it proposes."""
        ...

    def prefill(self, params: Any, tokens: Int[Array, "B P"], length: Lengths) -> Any:
        """The state after prompts ``tokens[b, :length[b]]``."""
        ...

    def propose(self, params: Any, state: Any, context: Context, score: Score) -> Tree:
        """Candidate continuations of the pending tokens: ``tree.num_nodes`` nodes with the root."""
        ...

    def commit(
        self, params: Any, state: Any, tokens: Int[Array, "B h"], count: Lengths, length: Lengths
    ) -> Any:
        """The state after ``tokens[b, :count[b]]`` joined the prefix of ``length[b]`` tokens."""
        ...


@dataclass(frozen=True)
class NoDraft:
    """Proposes the pending token alone: plain decoding, through the same step."""

    tree: TreeConfig = PLAIN

    def prefill(self, params: Any, tokens: Int[Array, "B P"], length: Lengths) -> tuple[()]:
        """No state."""
        return ()

    def propose(self, params: Any, state: tuple[()], context: Context, score: Score) -> Tree:
        """The root without children."""
        return plant(context.pending, self.tree)

    def commit(
        self,
        params: Any,
        state: tuple[()],
        tokens: Int[Array, "B h"],
        count: Lengths,
        length: Lengths,
    ) -> tuple[()]:
        """No state."""
        return ()
