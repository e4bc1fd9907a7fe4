"""The target as its own drafter: perfect where it sees everything, worse where it is misled."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import NOTHING, View
from longspec_jax.drafters.retrieval.selection import SinksAndRecent, Spans
from longspec_jax.drafters.streaming import StreamingDraft, StreamingDrafter
from tests.decoding.lossless import request as requested
from tests.drafters.kit import histogram, is_perfect

CHAIN = TreeConfig((1, 1, 1))
ALL = SinksAndRecent(2, 1000)
GREEDY, MIXED = requested(), requested((0.0, 0.7, 1.0))


@pytest.mark.parametrize(
    ("selection", "request_"),
    [
        (ALL, GREEDY),
        *((all_, MIXED) for all_ in (ALL, SinksAndRecent(1000, 1), SinksAndRecent(0, 1000))),
    ],
    ids=["greedy", "both", "sinks", "recent"],
)
def test_a_chain_that_sees_everything_is_perfect(selection: SinksAndRecent, request_) -> None:
    assert is_perfect(histogram(StreamingDrafter(CHAIN, selection), request_, None))


class Overlapping(SinksAndRecent):
    """The window is not cut where the sinks end."""

    def __call__(self, length: jax.Array) -> Spans:
        zero = jnp.zeros_like(length)
        start = jnp.stack([zero, jnp.maximum(length - self.recent, 0)], axis=1)
        return Spans(start, jnp.stack([jnp.minimum(length, self.sinks), length], axis=1))


class Misled(StreamingDrafter):
    """Its own positions are one too high."""

    def propose(self, params, state, view: View, noise):
        view = dataclasses.replace(view, position=view.position + 1)
        return super().propose(params, state, view, noise)


@dataclass(frozen=True, eq=False)
class Forgetful(View):
    """No token sees its ancestors."""

    def partial_forward(self, tokens, positions, selection, fresh, mask, at, needs=NOTHING):
        own = jnp.arange(mask.shape[2]) == at + jnp.arange(mask.shape[1])[:, None]
        return super().partial_forward(tokens, positions, selection, fresh, mask & own, at, needs)


class Orphaned(StreamingDrafter):
    """Draws what follows a token without its ancestors."""

    def propose(self, params, state, view: View, noise):
        rows = view.pending, view.position, view.length, view.done
        view = Forgetful(view.target, view.params, view.cache, *rows)
        return super().propose(params, state, view, noise)


@pytest.mark.parametrize(
    "broken",
    [StreamingDrafter(CHAIN, Overlapping(2, 1000)), Misled(CHAIN, ALL), Orphaned(CHAIN, ALL)],
    ids=["overlap", "position", "mask"],
)
def test_a_mistake_lowers_what_is_accepted(broken: StreamingDrafter) -> None:
    """Negative control: the perfection above tells a right pass from a wrong one."""
    found = histogram(broken, GREEDY, None)
    assert found[-1] < found.sum() / 2


def test_what_a_pass_sees_can_be_chosen() -> None:
    """The draft's fields are its options; what is left out is as the selection has it."""
    assert StreamingDraft().drafter(CHAIN) == StreamingDrafter(CHAIN)
    assert StreamingDraft(recent=64).drafter(CHAIN).selection == SinksAndRecent(recent=64)
    with pytest.raises(ValueError, match="recent=0 at least 1"):
        StreamingDraft(recent=0)
