"""A drafter made of drafters: all propose into one tree, which the target verifies once.

A model draft and lookup accept at different places: a copy goes on where lookup says, new text
where the model does. The target's own draws follow whatever tree is there, so both are in it, equal
nodes as one (:mod:`longspec_jax.drafters.union`), and the budget goes to the likeliest nodes: where
nothing was found all of them are the model's, and in a long copy most are lookup's. Published
systems choose one or the other for a round (llama.cpp's list of types, SAM-Decoding,
arXiv:2411.10666).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import MAX_TREE_LEVELS, PLAIN, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.draft import DefaultTrees, Draft, with_tree
from longspec_jax.drafters.tree import Tree, root_tree
from longspec_jax.drafters.union import union

LEVELS = 16
"""To which lookup joins the trees of calls that name none."""
FEWEST = 8, 16, 16
"""Nodes of such a tree at least: on a CPU, on a GPU, and there for a large target. Lookup alone has
as many. On a CPU 8 nodes take as long as 6: SmolLM2's joined rounds 102 processor ms, a plain one
40, for 3.7 tokens a round instead of 3.3 (code, greedy)."""


@dataclass(frozen=True)
class Joined(Drafter):
    """All members propose, and the best nodes of their trees are one tree.

    Candidates of a call differ only in :attr:`tree`, and share one state: a member that does not
    propose to this tree learns all the same.
    """

    members: tuple[Drafter, ...]
    """Drafters of plain trees; each grows its part of :attr:`tree`."""
    tree: TreeConfig
    name: str = field(init=False)

    def __post_init__(self) -> None:
        names = [member.name for _, member in self.active] or [self.members[0].name]
        object.__setattr__(self, "name", "+".join(names))

    @property
    def active(self) -> list[tuple[int, Drafter]]:
        """The members that propose, by their numbers: a model grows the widths, lookup its levels.

        Where all members look up, the tree is theirs.
        """
        models = not all(member.looks_up for member in self.members)
        found = []
        for index, member in enumerate(self.members):
            part = self.tree.looked_up if member.looks_up and models else self.tree.own
            if part.num_levels:
                found.append((index, with_tree(member, part)))
        return found

    @property
    def proposes_freely(self) -> bool:
        """Whether all that propose look up, and some do."""
        active = self.active
        return bool(active) and all(member.looks_up for _, member in active)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of all members."""
        return tuple(member.name for member in self.members)

    @cached_property
    def parts(self) -> tuple[TreeConfig, ...]:
        """The trees of all members; none of those that do not propose."""
        grown = {index: TreeConfig(member.tree.widths) for index, member in self.active}
        return tuple(grown.get(index, PLAIN) for index in range(len(self.members)))

    @cached_property
    def needs(self) -> Needs:
        """What all members need together."""
        return reduce(or_, (member.needs for member in self.members))

    @cached_property
    def lossless(self) -> bool:
        """Whether all members are."""
        return all(member.lossless for member in self.members)

    def begin(self, params: Params, batch: int, capacity: int) -> tuple[Any, ...]:
        """The states of all members."""
        return tuple(
            member.begin(of_member(params, index), batch, capacity)
            for index, member in enumerate(self.members)
        )

    def extend(
        self, params: Params, state: tuple[Any, ...], committed: Committed
    ) -> tuple[Any, ...]:
        """All members learn, but for those that need features of tokens that were not run."""
        return tuple(
            member.extend(of_member(params, index), part, committed)
            if committed.features.serve(member.needs)
            else part
            for index, (member, part) in enumerate(zip(self.members, state, strict=True))
        )

    def before_round(self, params: Params, state: tuple[Any, ...], view: View) -> tuple[Any, ...]:
        """Prepare the members that propose."""
        ready = list(state)
        for index, member in self.active:
            ready[index] = member.before_round(of_member(params, index), state[index], view)
        return tuple(ready)

    def propose(
        self, params: Params, state: tuple[Any, ...], view: View, noise: SamplingNoise
    ) -> Tree:
        """The best nodes of what the members offer; a single one's own tree."""
        if len(self.active) < 2:
            for index, member in self.active:
                alone = with_tree(member, replace(member.tree, budget=self.tree.budget))
                tree = alone.propose(of_member(params, index), state[index], view, noise)
                return replace(tree, sources=jnp.full_like(tree.parents, 1 << index))
            return root_tree(view.pending, PLAIN)
        offered = {}
        for index, member in self.active:
            with jax.named_scope(f"offer_{member.name}"):
                own = of_member(params, index)
                offered[index] = member.offer(own, state[index], view, noise)
        with jax.named_scope("union"):
            return union(offered, self.tree.num_levels, self.tree.num_nodes)

    def gathered_slots(self, capacity: int) -> int:
        """The slots of all members that propose."""
        return sum(member.gathered_slots(capacity) for _, member in self.active)


def of_member(params: Params, index: int) -> Params:
    """The parameters that one of several drafters takes."""
    return replace(params, draft=params.draft[index])


@dataclass(frozen=True, eq=False)
class JoinedDraft(Draft):
    """Several drafts that propose into one tree."""

    members: tuple[Draft, ...]
    name: str = field(init=False)
    params: PyTree = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", "+".join(member.name for member in self.members))
        object.__setattr__(self, "params", tuple(member.params for member in self.members))

    @property
    def own_params(self) -> Any:
        """The parameters of all members that are not shared with the target."""
        return tuple(member.own_params for member in self.members)

    @property
    def default_trees(self) -> DefaultTrees:
        """The first model's, with lookup to more levels; where nodes cost time lookup alone, too.

        No deeper than the shallowest of the other models' trees, or than a chain of all nodes.
        """
        models = [member for member in self.members if not member.looks_up]
        joins = len(models) < len(self.members)
        if not models:
            return self.members[0].default_trees
        first, *others = (model.default_trees for model in models)

        def joined(name: str, least: int) -> tuple[TreeConfig, ...]:
            # A kind may have no trees of its own for a use.
            theirs = (tree for each in others for tree in getattr(each, name)[:1])
            deepest = min([MAX_TREE_LEVELS, *(tree.num_levels for tree in theirs)])
            found = []
            for tree in getattr(first, name):
                nodes = max(tree.num_nodes, least) if joins else tree.budget
                lookup = min(LEVELS, nodes - 1) if joins and nodes else None
                found.append(
                    replace(tree, widths=tree.widths[:deepest], budget=nodes, lookup=lookup)
                )
            return tuple(found)

        few, some, many = FEWEST
        small = joined("gpu", some)
        fewest = min(small, key=lambda tree: tree.num_nodes)
        if not joins:
            large, together = joined("large", many), joined("together", many)
            return DefaultTrees(joined("cpu", few), small, large, first.settled, together)
        on_cpu, on_gpu = (
            TreeConfig((), nodes, lookup=min(LEVELS, nodes - 1)) for nodes in (few, some)
        )
        return DefaultTrees(
            (*joined("cpu", few), on_cpu),
            (*small, on_gpu),
            # The first shows in every round what lookup alone would emit.
            tuple(dict.fromkeys((*joined("large", many), fewest, on_gpu))),
            settled=False,
            together=(*joined("together", many), on_gpu) if first.together else (),
        )

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError if one of them does not belong to this target."""
        for member in self.members:
            member.check_fits(target)

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> Joined:
        """The drafter whose members grow this tree together."""
        return Joined(tuple(member.drafter(PLAIN, attention) for member in self.members), tree)
