"""A loaded draft of any kind: what the library, the commands and the benchmarks take.

They know none of its knobs: a draft comes with its parameters, makes drafters of any tree, and says
which trees tend to pay. Several drafts together are candidates of one call, which runs the one that
turns out fastest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from longspec_jax.config import PLAIN, TargetConfig, TreeConfig
from longspec_jax.drafters.base import (
    Committed,
    Drafter,
    Needs,
    Params,
    SamplingNoise,
    View,
    gathered_slots,
    run_before_round,
)
from longspec_jax.drafters.tree import Tree
from longspec_jax.ops.placement import tree_bytes

LARGE = 2_000_000_000
"""Bytes of a target from which on a GPU reads weights for most of a round: nodes are nearly free
there and the default tree pays, so that nothing needs to be timed, and a draft of half the bytes is
the faster one."""


def is_large(target_params: Any) -> bool:
    """Whether rounds of a target are bound by reading its weights: on a GPU, from a size on."""
    return jax.default_backend() != "cpu" and tree_bytes(target_params) >= LARGE


class Target(NamedTuple):
    """A loaded target, as what is loaded for it sees it."""

    config: TargetConfig
    params: Any
    tokenizer: Any = None
    """A transformers tokenizer, if it has one."""


@dataclass(frozen=True)
class DefaultTrees:
    """Trees that tend to pay, by machine; the first is the one where nothing can be timed."""

    cpu: tuple[TreeConfig, ...]
    gpu: tuple[TreeConfig, ...]
    """For a target so small that a GPU spends its time on launches."""
    large: tuple[TreeConfig, ...]
    """For a target whose weights a GPU reads for most of a round: nodes are nearly free there."""
    settled: bool = True
    """Whether the first one of such a target pays wherever it runs, so that none is timed."""
    together: tuple[TreeConfig, ...] = ()
    """For such a target that decodes several rows together, all their nodes in one pass: nodes cost
    there. As for one row where there are none."""


@runtime_checkable
class Draft(Protocol):
    """What every kind of draft provides."""

    @property
    def name(self) -> str:
        """Of its kind, as it is told: ``longspec``, ``ngram``."""
        ...

    @property
    def params(self) -> Any:
        """What its drafters find as ``params.draft``; may hold arrays of the target."""
        ...

    @property
    def own(self) -> Any:
        """The part of the parameters that the target does not hold."""
        ...

    @property
    def default_trees(self) -> DefaultTrees:
        """Which trees tend to pay."""
        ...

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError if it is no draft for this target."""
        ...

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> Drafter:
        """The drafter that grows this tree.

        Args:
          tree: shape of its trees; without levels it proposes nothing, and keeps its state.
          attention: attention implementation; chosen automatically if absent.
        """
        ...


@dataclass(frozen=True)
class OneOf:
    """One of several drafters proposes; all of them learn what is committed.

    Candidates of a call differ in ``active`` and ``tree`` alone, and share one state.
    """

    members: tuple[Drafter, ...]
    """Without trees of their own."""
    active: int
    tree: TreeConfig
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        needs = self.members[0].needs
        for member in self.members[1:]:
            needs |= member.needs
        object.__setattr__(self, "needs", needs)

    @property
    def name(self) -> str:
        """The active member's."""
        return self.alone.name

    @property
    def alone(self) -> Drafter:
        """The active member without the others."""
        return with_tree(self.members[self.active], self.tree)

    def begin(self, params: Params, batch: int, capacity: int) -> tuple[Any, ...]:
        """The states of all members."""
        return tuple(
            member.begin(of_member(params, index), batch, capacity)
            for index, member in enumerate(self.members)
        )

    def extend(
        self, params: Params, state: tuple[Any, ...], committed: Committed
    ) -> tuple[Any, ...]:
        """All members learn."""
        return tuple(
            member.extend(of_member(params, index), part, committed)
            for index, (member, part) in enumerate(zip(self.members, state, strict=True))
        )

    def before_round(self, params: Params, state: tuple[Any, ...], view: View) -> tuple[Any, ...]:
        """The active member looks; another one will when it is its turn."""
        own, index = of_member(params, self.active), self.active
        seen = run_before_round(self.alone, own, state[index], view)
        return (*state[:index], seen, *state[index + 1 :])

    def gathers(self, capacity: int) -> int:
        """What the active member does."""
        return gathered_slots(self.alone, capacity)

    def propose(
        self, params: Params, state: tuple[Any, ...], view: View, noise: SamplingNoise
    ) -> Tree:
        """The active member proposes."""
        own = of_member(params, self.active)
        return self.alone.propose(own, state[self.active], view, noise)


def of_member(params: Params, index: int) -> Params:
    """The parameters that one of several drafters takes."""
    return replace(params, draft=params.draft[index])


def with_tree(drafter: Drafter, tree: TreeConfig) -> Drafter:
    """The same drafter with another tree."""
    varied: Any = drafter  # All of them are dataclasses with this field.
    return replace(varied, tree=tree)


def drafters_of(
    drafts: Sequence[Draft], trees: Sequence[Sequence[TreeConfig]], attention: str | None
) -> tuple[tuple[Drafter, ...], Any]:
    """The candidates of a call, and their parameters.

    Args:
      drafts: at least one.
      trees: the trees of each, at least one.
      attention: attention implementation; chosen automatically if absent.
    """
    if len(drafts) == 1:
        [draft], [shapes] = drafts, trees
        return tuple(draft.drafter(tree, attention) for tree in shapes), draft.params
    members = tuple(draft.drafter(PLAIN, attention) for draft in drafts)
    choices = (OneOf(members, index, tree) for index, shapes in enumerate(trees) for tree in shapes)
    return tuple(choices), tuple(draft.params for draft in drafts)
