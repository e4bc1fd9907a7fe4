"""What the attention benchmark compares: our implementations, cuDNN and XLA.

A candidate is a function of the operands of a case, compiled into a chain of calls in which every
call waits for the one before. What cannot be built or compiled gives the reason instead.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.ops.attention import dispatch
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.attention.tiles import MosaicTile, PrefixTile, TreeTile

from .attention_cases import HEAD_MAJOR, TOKEN_MAJOR, Case, abstract_operands

Call = Callable[..., jax.Array]
"""``(q, k, v, tree_k, tree_v, mask) -> out``, all in the shapes of a case."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation, and how it wants the cache."""

    build: Callable[[Case], Call]
    layout: str


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why there is no time: part of the result."""

    reason: str

    @classmethod
    def of(cls, error: Exception) -> "Refusal":
        """The first line of an error, with its kind."""
        reason = (str(error).splitlines() or [""])[0][:200]
        return cls(f"{type(error).__name__}: {reason}")


def ours(implementation: str | None) -> Candidate:
    """The project's op, by its automatic choice if no implementation is named."""

    def build(case: Case) -> Call:
        length = jnp.full((case.batch,), case.context, jnp.int32)

        def call(q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
            operands = Prefix(k, v, length), Fresh(tree_k, tree_v, mask)
            return dispatch.speculative_attention(q, *operands, implementation=implementation)

        return call

    return Candidate(build, HEAD_MAJOR)


def ours_with(prefix: PrefixTile | MosaicTile, tree: TreeTile) -> Candidate:
    """The Pallas kernels with given tiles."""

    def build(case: Case) -> Call:
        from longspec_jax.ops.attention import kernels  # Not every jax has its backend.

        length = jnp.full((case.batch,), case.context, jnp.int32)

        def call(q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
            operands = Prefix(k, v, length), Fresh(tree_k, tree_v, mask)
            tiles = dict(prefix_tile=prefix, tree_tile=tree)
            return kernels.speculative_attention(q, *operands, **tiles)

        return call

    return Candidate(build, HEAD_MAJOR)


def _cudnn(case: Case) -> Call:
    """CuDNN over the prefix alone: less work than ours, since it takes no mask at this speed."""

    def call(q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    return call


def _xla_masked(case: Case) -> Call:
    """XLA with materialised scores over the prefix, masked.

    The tree part is played by the last ``tokens`` slots, so that nothing is concatenated.
    """

    def call(q: Any, k: Any, v: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
        seen = jnp.ones((case.batch, case.tokens, case.context - case.tokens), bool)
        whole = jnp.concatenate([seen, mask], axis=2)[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=whole, implementation="xla")

    return call


CANDIDATES: dict[str, Candidate] = {
    "ours": ours(None),
    **{name: ours(name) for name in ("pallas", "mosaic", "triton", "xla")},
    "cudnn": Candidate(_cudnn, TOKEN_MAJOR),
    "xla-masked": Candidate(_xla_masked, TOKEN_MAJOR),
}
"""``ours`` is the automatic choice; the four names after it are the dispatch's."""


def compiled(case: Case, candidate: Candidate) -> Any:
    """The compiled program of a case, or a :class:`Refusal`; allocates nothing."""
    try:
        program = jax.jit(_chain(case, candidate.build(case)))
        return program.lower(*abstract_operands(case, candidate.layout)).compile()
    except Exception as error:  # A call that does not compile is a result, too.
        return Refusal.of(error)


def _chain(case: Case, call: Call) -> Callable[..., jax.Array]:
    """Call once per cache and turn, each call's output being the next one's queries."""
    inner = jax.jit(call)

    def program(q: Any, caches: Any, tree_k: Any, tree_v: Any, mask: Any) -> jax.Array:
        for _ in range(case.turns):
            for k, v in caches:
                q = inner(q, k, v, tree_k, tree_v, mask)
        return q

    return program
