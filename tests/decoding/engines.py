"""Engines for tests: over a lookup model, and over every kind of drafter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.chooser import Choice, Measurement, Policy
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.runner import slack_slots
from longspec_jax.decoding.sampling import Sampling
from longspec_jax.decoding.slots import StepOutput
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDrafter
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.retrieval.selection import SinksAndRecent
from longspec_jax.drafters.small_lm import SmallLMDrafter
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.generation.candidates import candidates
from tests.decoding.lossless import (
    LENGTHS,
    NEW,
    TABLE,
    VOCABULARY,
    engine_of,
    engine_with,
    generate,
    outputs_of,
    prompts,
    texts_of,
)
from tests.kit import draft_params, random_draft, random_target, tiny_target_config
from tests.lookup import LookupDrafter, LookupTarget, random_table

TREE = TreeConfig((4, 5, 3))
SMALL_TREE = TreeConfig((3, 2))
NEAR = TABLE + 0.5 * random_table(1, 97, VOCABULARY)
TARGET, DRAFTER, PARAMS = LookupTarget(VOCABULARY), LookupDrafter(TREE), Params(TABLE, NEAR)
CONFIG = tiny_target_config(num_layers=1)
DRAFT = DraftConfig.for_target(CONFIG, window=11)
SMALL = tiny_target_config(num_layers=1)
MIXED = (0.0, 0.8, 1.0)
"""Temperatures of the rows."""
TIGHT = int((LENGTHS + NEW).max()) + slack_slots(TREE.num_levels)
"""Cache slots of the longest row, with no slot to spare."""


@dataclass(frozen=True)
class Cycle(Policy):
    """Runs a fixed cycle of choices, whatever happens."""

    cycle: tuple[Choice, ...]
    turn: int = 0

    def choose(self) -> Choice:
        return self.cycle[self.turn % len(self.cycle)]

    def observe(self, candidate: int, seen: Measurement) -> "Cycle":
        assert candidate == self.choose().candidate and seen.rounds > 0
        return replace(self, turn=self.turn + 1)


EVERY_SWITCH = Cycle(tuple(Choice(index, 1) for index in (0, 1, 2, 0, 2, 1)))


def lookup_engine(req: Request, policy: Policy | None = None, **options: Any) -> Engine:
    """An engine over the lookup model; its candidates are none, a chain and the tree."""
    drafters = candidates([DRAFTER]) if policy else [DRAFTER]
    tokens = prompts(VOCABULARY)
    models = TARGET, drafters, PARAMS
    return engine_of(*models, tokens, LENGTHS, req, TIGHT, policy=policy, **options)


def plainly(req: Request) -> list[np.ndarray]:
    """The rows of the lookup model, decoded plainly."""
    tokens = prompts(VOCABULARY)
    return generate(TARGET, NoDraft(), Params(TABLE, ()), tokens, LENGTHS, req)[0]


LENGTHS_OF = (1, 30, 8, 3, 17, 9, 25)
NEW_OF = (9, 1, 12, 4, 2, 7, 5)
SIZES: dict[str, Any] = {"capacity": 48, "chunks": (8,), "stop_width": 2}


def asked(row: int) -> Request:
    """The options of a row: no two alike."""
    sampling = Sampling(
        np.asarray([MIXED[row % 3]], np.float32),
        np.asarray([(0, 5)[row % 2]], np.int32),
        np.asarray([1.0 - 0.05 * row], np.float32),
        np.asarray([11 * row], np.uint32),
        np.asarray([-np.inf], np.float32),
    )
    stops = np.asarray([[row, -1]], np.int32)
    return Request(sampling, stops, np.asarray([NEW_OF[row % len(NEW_OF)]], np.int32))


def endless(new: int) -> Request:
    return replace(
        asked(0),
        stop_tokens=np.full((1, 2), -1, np.int32),
        max_new_tokens=np.asarray([new], np.int32),
    )


def prompt(row: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    length = LENGTHS_OF[row % len(LENGTHS_OF)]
    return np.random.default_rng(row).integers(0, vocabulary, length).astype(np.int32)


def open_engine(
    target: Any = TARGET,
    drafters: Sequence[Drafter] = (LookupDrafter(SMALL_TREE),),
    params: Params = PARAMS,
    slots: int = 2,
    **options: Any,
) -> Engine:
    return engine_with(target, drafters, params, slots=slots, **{**SIZES, **options})


def launched(engine: Engine) -> list[tuple[Any, ...]]:
    """What the launches of rounds are given from now on: choice, kind, slots and constraints."""
    found: list[tuple[Any, ...]] = []
    launch = engine.runner.launch

    launch_by(engine, lambda rows, *given: (found.append(given), launch(rows, *given))[1])
    return found


def launch_by(engine: Engine, launch: Callable[..., Any]) -> None:
    """Have an engine's launches of rounds go through a function, which is given the rows first."""
    object.__setattr__(engine.runner, "launch", launch)


def serve(
    engine: Engine, rows: Sequence[int], vocabulary: int = VOCABULARY
) -> tuple[list[np.ndarray], list[StepOutput]]:
    """Submit the rows in this order; their tokens by number, and all outputs."""
    ids = {row: engine.submit(prompt(row, vocabulary), asked(row)) for row in rows}
    outputs = outputs_of(engine)
    texts = texts_of(outputs)
    return [texts[ids[row]] for row in sorted(rows)], outputs


def alone(target: Any, params: Any, rows: Sequence[int], vocabulary: int) -> list[np.ndarray]:
    """The rows decoded plainly, each by itself."""
    found = []
    for row in rows:
        text = prompt(row, vocabulary)
        models = target, NoDraft(), Params(params, ())
        [own], _ = generate(*models, text[None], [len(text)], asked(row), 48, 8)
        found.append(own)
    return found


TABLES = random_target(CONFIG)
STREAMING = StreamingDrafter(TreeConfig((1,)), SinksAndRecent(1, 4))
KINDS = {
    "longspec": (LongSpecDrafter(DRAFT, SMALL_TREE), draft_params(random_draft(DRAFT), TABLES)),
    "ngram": (NgramDrafter(TreeConfig((2, 2))), ()),
    "small_lm": (SmallLMDrafter(SMALL, SMALL_TREE), random_target(SMALL, seed=3)),
    "hierarchy": (PartialVerifier(STREAMING, SinksAndRecent(2, 6), TreeConfig((1, 1, 1, 1))), ()),
}
