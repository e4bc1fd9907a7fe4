"""A loaded draft of any kind, as the library, the commands and the benchmarks use it.

They know none of its options: a draft has its parameters, makes a drafter for any tree, and says
which trees usually pay. Of several drafts a call runs the one that is fastest.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.tree import Tree
from longspec_jax.ops.placement import tree_bytes

LARGE = 2_000_000_000
"""Bytes of a target from which a GPU spends most of a round on reading weights. Nodes are nearly
free there, so the default tree pays without timing, and a draft of half the bytes is faster."""


def is_large(target_params: Any) -> bool:
    """Whether rounds of a target are bound by reading its weights: large ones on a GPU."""
    return jax.default_backend() != "cpu" and tree_bytes(target_params) >= LARGE


class Target(NamedTuple):
    """A loaded target, as the loaders of drafts see it."""

    config: TargetConfig
    params: Any
    tokenizer: Any = None
    """A transformers tokenizer, if it has one."""


def pays_in_int8(target: Target) -> bool:
    """Whether a draft is faster in 8 bits: where reading weights takes the time of its levels."""
    return is_large(target.params) and jnp.dtype(target.config.dtype).itemsize == 2


@dataclass(frozen=True)
class DefaultTrees:
    """Trees that usually pay, by machine; the first is used where nothing can be timed."""

    cpu: tuple[TreeConfig, ...]
    gpu: tuple[TreeConfig, ...]
    """For a small target, where a GPU spends its time on launches."""
    large: tuple[TreeConfig, ...]
    """For a large target, where a GPU spends its time on reading weights: nodes are nearly free."""
    settled: bool = True
    """Whether the first large one pays on every machine, so that none is timed."""
    together: tuple[TreeConfig, ...] = ()
    """For a large target that decodes several rows together: their nodes share a forward, so nodes
    cost time. Those for one row if empty."""


class Draft:
    """A loaded draft of any kind. By default it has no parameters and fits every target."""

    name: str
    """Name of the draft kind: ``longspec``, ``ngram``."""
    params: Any = ()
    """What its drafters get as ``params.draft``; may hold arrays of the target."""

    @property
    def own_params(self) -> Any:
        """The parameters that are not shared with the target; ``params`` say so if they share."""
        return getattr(self.params, "own_params", self.params)

    @property
    def default_trees(self) -> DefaultTrees:
        """Which trees usually pay."""
        raise NotImplementedError

    @property
    def apart(self) -> "Draft":
        """The same draft for rows that may be of several people.

        No row drafts from the texts of the others, unless :attr:`shares_texts`.
        """
        return self

    @property
    def shares_texts(self) -> bool:
        """Whether its options ask for rows of several people to draft from each other's texts.

        A server must then show no draft tokens but accepted ones.
        """
        return False

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError if it does not belong to this target, as its ``config`` says."""
        if (config := getattr(self, "config", None)) is not None:
            config.check_fits(target)

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> Drafter:
        """The drafter that grows this tree.

        Args:
          tree: shape of its trees; without levels it proposes nothing, but its state still learns.
          attention: attention implementation; chosen automatically if absent.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class OneOf(Drafter):
    """One of several drafters proposes; all of them learn of committed tokens.

    Candidates of a call differ only in ``active`` and ``tree``, and share one state.
    """

    members: tuple[Drafter, ...]
    """Drafters of plain trees; the active one grows :attr:`tree`."""
    active: int
    tree: TreeConfig
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.members[self.active].name)

    @property
    def needs(self) -> Needs:
        """What all members need together."""
        return functools.reduce(operator.or_, (member.needs for member in self.members))

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
        """Prepare the active member; another one is prepared when it is active."""
        own, index = of_member(params, self.active), self.active
        ready = self.alone.before_round(own, state[index], view)
        return (*state[:index], ready, *state[index + 1 :])

    def gathered_slots(self, capacity: int) -> int:
        """The active member's."""
        return self.alone.gathered_slots(capacity)

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
    """The candidates of a call, and their parameters."""
    if len(drafts) == 1:
        [draft], [shapes] = drafts, trees
        return tuple(draft.drafter(tree, attention) for tree in shapes), draft.params
    members = tuple(draft.drafter(PLAIN, attention) for draft in drafts)
    choices = (OneOf(members, index, tree) for index, shapes in enumerate(trees) for tree in shapes)
    return tuple(choices), tuple(draft.params for draft in drafts)
