"""A loaded draft of any kind, as the library, the commands and the benchmarks use it.

They know none of its options: a draft has its parameters, makes a drafter for any tree, and says
which trees usually pay. Several drafts propose into one tree (:mod:`longspec_jax.drafters.joined`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from longspec_jax.checks import Tokenizer
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Drafter
from longspec_jax.ops.placement import tree_bytes

LARGE = 2_000_000_000
"""Bytes of a target from which a GPU spends most of a round on reading weights. Nodes are nearly
free there, so the default tree pays without timing, and a draft of half the bytes is faster."""


def is_large(target_params: PyTree) -> bool:
    """Whether rounds of a target are bound by reading its weights: large ones on a GPU."""
    return jax.default_backend() != "cpu" and tree_bytes(target_params) >= LARGE


class Target(NamedTuple):
    """A loaded target, as the loaders of drafts see it."""

    config: TargetConfig
    params: PyTree
    tokenizer: Tokenizer | None = None
    """A transformers tokenizer, if it has one."""


def pays_in_int8(target: Target) -> bool:
    """Whether a draft is faster in 8 bits: where reading weights takes the time of its levels."""
    return is_large(target.params) and jnp.dtype(target.config.dtype).itemsize == 2


LIKELY_TOKENS = 65_536
"""Tokens that a reduced draft vocabulary holds where nobody named a number. After 4,000 tokens 0.5
to 0.8 % of code and prose are neither among them nor in the row's text (Llama 3, Qwen2.5; of half
as many tokens 1.5 to 3 %, and sampled texts hold more rare tokens than that)."""
_LEAST_SAVED = 0.06
"""Bytes of LM heads that a round no longer reads, of those of the target, from which a reduced
vocabulary pays: about twice the accepted tokens that it costs. Infinity turns the default off."""
_LEVELS = 5
"""Of the default tree, each of which reads the LM head."""


def pays_in_fewer_tokens(target: Target) -> bool:
    """Whether a round is faster with a draft vocabulary of :data:`LIKELY_TOKENS`.

    By bytes: what the levels of the default tree no longer read of an LM head in 8 bits, against
    the target's weights.
    """
    config = target.config
    saved = _LEVELS * (config.vocab_size - LIKELY_TOKENS) * config.model_width
    return pays_in_int8(target) and saved >= _LEAST_SAVED * tree_bytes(target.params)


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
    params: PyTree = ()
    """What its drafters get as ``params.draft``; may hold arrays of the target."""
    joins: ClassVar[bool] = True
    """Whether others can propose into its trees."""
    looks_up: ClassVar[bool] = False
    """Whether it proposes what text holds already, and has no model."""

    @property
    def own_params(self) -> Any:
        """The parameters without those of the target, if ``params`` tells them apart."""
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


def tallest(drafters: Sequence[Drafter]) -> Drafter:
    """The drafter with the tallest tree, whose rounds need the most slack slots."""
    return max(drafters, key=lambda drafter: drafter.tree.num_levels)


def with_tree(drafter: Drafter, tree: TreeConfig) -> Drafter:
    """The same drafter with another tree."""
    # All of them are dataclasses with this field.
    return replace(drafter, tree=tree)  # pyright: ignore[reportArgumentType, reportCallIssue]
