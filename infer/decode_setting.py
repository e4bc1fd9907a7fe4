"""One point of ``infer.bench decode``: what is decoded, with which model, from which cache."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from longspec_jax.config import TreeConfig
from longspec_jax.decoding import engine
from longspec_jax.decoding.cache import KVCache, bucket_capacity
from longspec_jax.decoding.engine import SpecState
from longspec_jax.decoding.simulated import AcceptanceLengths
from longspec_jax.drafters.longspec import LongSpecDrafter

from .bench_models import (
    Model,
    abstract,
    draft_state,
    filled_cache,
    greedy_request,
    state_at,
)


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
        needed = self.context + self.new_tokens + engine.room(self.tree.num_levels)
        return bucket_capacity(needed)


@dataclasses.dataclass
class Bench:
    """A setting with its model and the cache that the measurements hand to one another."""

    setting: Setting
    model: Model
    cache: KVCache

    @classmethod
    def prepare(cls, setting: Setting, model: Model) -> "Bench":
        """Fill a cache."""
        return cls(setting, model, filled_cache(model.config, setting.batch, setting.capacity))

    @functools.cached_property
    def drafter(self) -> LongSpecDrafter:
        """The draft with the setting's tree."""
        return self.model.drafter(self.setting.tree)

    @functools.cached_property
    def request(self) -> engine.Request:
        """What every row asks for."""
        return greedy_request(self.setting.batch, self.setting.new_tokens)

    def state(self, drafter: Any) -> SpecState:
        """The state at the beginning; it takes the cache along."""
        draft = draft_state(self.model, drafter, self.setting.batch)
        setting = self.setting
        return state_at(self.cache, draft, drafter.tree, setting.contexts, setting.new_tokens)

    def compile(self, program: Any, *static: Any, drafter: Any) -> Callable[..., Any]:
        """Compile ``program(*static, params, request, state)`` from shapes alone."""
        dynamic = abstract((self.model.params, self.request, self.state(drafter)))
        return program.lower(*static, *dynamic).compile()
