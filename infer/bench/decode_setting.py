"""The points of ``infer.bench decode``: what is decoded, with which model, from which cache."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from longspec_jax.config import TreeConfig
from longspec_jax.decoding import engine
from longspec_jax.decoding.cache import KVCache, bucket_capacity
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter

from ..wording import command_words
from .draft_options import draft_options
from .kept_acceptance import kept_lengths
from .models import (
    Model,
    abstract,
    draft_state,
    filled_cache,
    greedy_request,
    state_at,
    target_bytes,
)
from .shapes import SHAPES
from .simulated import AcceptanceLengths

CPU_BYTES_PER_S, CPU_NODES_PER_PASS, CPU_COMPILE_SECONDS = 2e9, 32, 20
"""For a rough estimate: two shared cores."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of a measurement."""

    shape: str
    context: int
    """Committed tokens of the first row."""
    shortest: int
    """Committed tokens of the last row of several; those between are spread evenly."""
    batch: int
    tree: TreeConfig
    new_tokens: int
    lengths: AcceptanceLengths
    repetitions: int
    turns: int
    """Repeats of a part inside its program."""

    @property
    def contexts(self) -> tuple[int, ...]:
        """Committed tokens of every row, the longest first."""
        spread = np.linspace(self.context, self.shortest, self.batch)
        return tuple(np.rint(spread).astype(int).tolist())

    @property
    def capacity(self) -> int:
        """Cache slots of a row."""
        needed = self.context + self.new_tokens + engine.slack_slots(self.tree.num_levels)
        return bucket_capacity(needed)


@dataclasses.dataclass
class Bench:
    """A setting with its model and the cache that the measurements hand to one another."""

    setting: Setting
    model: Model
    cache: KVCache

    @classmethod
    def prepare(cls, setting: Setting, model: Model) -> "Bench":
        """Fill a cache, where the target has it."""
        size = setting.batch, setting.capacity
        return cls(setting, model, filled_cache(model.config, *size, model.target.offload))

    @functools.cached_property
    def drafter(self) -> LongSpecDrafter:
        """The draft with the setting's tree."""
        return self.model.drafter(self.setting.tree)

    @functools.cached_property
    def request(self) -> Request:
        """What every row asks for."""
        return greedy_request(self.setting.batch, self.setting.new_tokens)

    def state(self, drafter: Any) -> SpecState:
        """The state at the beginning; it takes the cache along."""
        draft = draft_state(self.model, drafter, self.setting.batch, self.setting.capacity)
        setting = self.setting
        return state_at(self.cache, draft, drafter.tree, setting.contexts, self.request)

    def compile(self, program: Any, *static: Any, state: Any) -> Callable[..., Any]:
        """Compile ``program(*static, params, state)``, from shapes alone where they suffice."""
        return self.compiling(program, *static, state=state)()

    def compiling(self, program: Any, *static: Any, state: Any) -> Callable[[], Callable[..., Any]]:
        """What :meth:`compile` does, for later; it holds no array where shapes suffice."""
        dynamic = self.model.params, state
        if not self.model.target.offload:  # A shape does not say in which memory an array lies.
            dynamic = abstract(dynamic)
        return lambda: program.lower(*static, *dynamic).compile()


def all_settings(arguments: argparse.Namespace) -> list[Setting]:
    """Every point that the arguments ask for, those of a shape in a row.

    Raises:
      ValueError: naming the option that asks for what cannot be.
    """
    tree = arguments.tree
    lengths = acceptance_lengths(arguments, tree)
    for shape in arguments.shape:
        with command_words():
            draft_options(arguments.drafter, dict(arguments.drafter_option or ()), SHAPES[shape])
    return [
        Setting(
            *(shape, context, -(-context // 2) if arguments.ragged else context, batch),
            *(tree, arguments.new_tokens, lengths, arguments.repetitions, arguments.turns),
        )
        for shape in dict.fromkeys(arguments.shape)
        for batch in arguments.batch
        for context in arguments.context
    ]


def acceptance_lengths(arguments: argparse.Namespace, tree: TreeConfig) -> AcceptanceLengths:
    """How often a round emits so many tokens.

    ``--histogram`` is that of the verified nodes, ``--acceptance`` that of all nodes of the tree.
    """
    counts, levels = arguments.histogram, tree.num_levels
    option = "--acceptance" if counts is None else "--histogram"
    try:
        if counts is None:
            return kept_lengths(arguments.acceptance, tree)
        if len(counts) > levels + 1:
            raise ValueError(
                f"{len(counts)} counts, but a tree of {levels} levels emits at most {levels + 1} "
                "tokens per round; give one count for each, or a deeper --tree"
            )
        return AcceptanceLengths.from_histogram(counts)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def setting_bytes(setting: Setting, offload: bool = False) -> int:
    """The target's weights and the cache on the device: most of what a setting takes there."""
    config = SHAPES[setting.shape]
    held = CachedTarget(config, offload=offload).cache_bytes(setting.batch, setting.capacity)
    return target_bytes(config) + held.device


def rough_seconds(setting: Setting, compile_seconds: float = CPU_COMPILE_SECONDS) -> float:
    """What a setting takes on a CPU, to say minutes or hours beforehand."""
    token = setting_bytes(setting) / CPU_BYTES_PER_S
    round_ = token * (1 + setting.tree.num_nodes / CPU_NODES_PER_PASS)
    rounds = setting.new_tokens / setting.lengths.mean + 2 * setting.turns
    once = setting.new_tokens * token + rounds * round_
    return compile_seconds + (setting.repetitions + 1) * once
