"""Digests of what XLA is given for a round, many rounds, a chunk of a prompt and a training step.

The same text is the same speed. Names of functions and of fields are left out, locations too: a
move or a new name changes nothing. What is compared is the program.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

# The only place that names what may move.
from longspec_jax import LongSpec, TreeConfig
from longspec_jax.decoding.prefill import _prefill_chunk as prefill_chunk
from longspec_jax.decoding.prefill import vacant
from longspec_jax.decoding.round import many_rounds, one_round
from longspec_jax.decoding.rows import RowShardings
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import NoDraft, Params
from longspec_jax.drafters.joined import JoinedDraft
from longspec_jax.ops import hardware
from tests.golden import training
from tests.golden.models import MODELS, WIDE
from tests.golden.tokens import loaded
from tests.kit import on_hopper

KINDS = {"greedy": SamplingKind.GREEDY, "any": SamplingKind.ANY}
ROWS, CAPACITY, CHUNK, STOPS = 3, 256, 64, 4
SHAPES = {"alone": (1, CHUNK), "rows": (ROWS, CHUNK)}
PROGRAMS = "one-greedy", "one-any", "many-any", "chunk"
ON_HOPPER = {
    f"{name}-{way}": (name, options)
    for name in WIDE
    for way, options in {
        "xla": {"attention": "xla"},
        "pallas": {"attention": "pallas"},
        "batch_invariant": {"batch_invariant": True},
    }.items()
    if way != "batch_invariant" or hardware.mosaic_is_supported()
}
"""Targets in bfloat16 of sizes that the kernels take, lowered for a Hopper GPU.

Those that are written for it need jax 0.11 or newer."""


def digest(text: str) -> str:
    """Of a lowered program, without its names."""
    names: dict[str, str] = {}
    text = re.sub(r'jax\.(result_info|arg_info|global_constant) = "[^"]*"(, )?', "", text)
    text = re.sub(r"loc\(.*?\)|^#loc.*$", "", text, flags=re.M)
    text = re.sub(r'(@[\w.$]+|@"[^"]*")', lambda m: names.setdefault(m[1], f"@{len(names)}"), text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """Every wanted program, with its digest."""
    for name, models in MODELS.items():
        if not any(map(wanted, _names(f"cpu/{name}"))):
            continue
        spec = loaded(folder, models, models.trees[0])
        drafter, draft = _drafter(spec, None)
        for program, trace in _programs(spec, spec.target, drafter, draft):
            if wanted(f"cpu/{name}/{program}"):
                yield f"cpu/{name}/{program}", digest(trace().lower().as_text())
    for name, (models, options) in ON_HOPPER.items():
        if not any(map(wanted, _names(f"cuda/{name}"))):
            continue
        spec = loaded(folder, WIDE[models], WIDE[models].trees[0], dtype="bfloat16")
        target = replace(TargetModel(spec.target_config), **options)
        drafter, draft = _drafter(spec, options.get("attention"))
        with _hopper():
            for program, trace in _programs(spec, target, drafter, draft):
                if wanted(f"cuda/{name}/{program}"):
                    text = trace().lower(lowering_platforms=("cuda",)).as_text()
                    yield f"cuda/{name}/{program}", digest(text)
    for name in training.KINDS:
        if wanted(f"cpu/train-{name}"):
            yield f"cpu/train-{name}", digest(training.lowered_step(name))


def _names(models: str) -> list[str]:
    """What the programs of a model are called."""
    return [f"{models}/{size}-{each}" for size in SHAPES for each in PROGRAMS]


@contextmanager
def _hopper() -> Iterator[None]:
    with (
        mock.patch.object(hardware, "compute_capability", lambda: (9, 0)),
        on_hopper(),
    ):
        yield


def _drafter(spec: LongSpec, attention: str | None) -> tuple[Any, Any]:
    """The drafter of a model's tree, and its parameters."""
    if not spec.drafts:
        return NoDraft(), ()
    assert isinstance(spec.tree, TreeConfig)
    draft = JoinedDraft(spec.drafts) if spec.tree.lookup else spec.drafts[0]
    return draft.drafter(spec.tree, attention), draft.params


def _programs(
    spec: LongSpec, target: Any, drafter: Any, draft: Any
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Traces of a model's programs."""
    params = Params(spec.target_params, draft)
    make = partial(vacant, target, drafter, params, stop_width=STOPS, capacity=CAPACITY)
    for size, (batch, chunk) in SHAPES.items():
        rows = jax.eval_shape(partial(make, batch=batch))
        for kind, static in KINDS.items():
            given = target, drafter, static, params, rows
            yield f"{size}-one-{kind}", partial(one_round.trace, *given)
        given = target, drafter, KINDS["any"], params, rows, np.int32(9)
        yield f"{size}-many-any", partial(many_rounds.trace, *given)
        tokens = jax.ShapeDtypeStruct((batch, CAPACITY), np.int32)
        logits = jax.ShapeDtypeStruct((batch, target.vocab_size), np.float32)
        shardings = RowShardings.for_params(spec.target_params, batch)
        needs = drafter.needs.of_a_pass
        static = target, needs, chunk, shardings, spec.target_params, rows.cache
        yield (
            f"{size}-chunk",
            partial(prefill_chunk.trace, *static, tokens, rows.length, np.int32(0), logits),
        )
