"""Biases and penalties: those of transformers, along each node's path, the same in every tree."""

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from longspec_jax.config.sampling import rule
from longspec_jax.decoding.adjustments import AdjustmentOptions, Adjustments, adjust
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.runner import ModelRunner
from longspec_jax.decoding.sampling import NO_TOKEN, SamplingKind, draw
from longspec_jax.decoding.slots import StepOutput
from longspec_jax.drafters.base import NoDraft, Params
from tests.decoding.lossless import (
    DRAFT_TABLES,
    LENGTHS,
    NEW,
    TABLE,
    TREES,
    VOCABULARY,
    assert_same,
    generate,
    outputs_of,
    prompts,
    request,
    texts_of,
)
from tests.kit import each_row
from tests.lookup import LookupDrafter, LookupTarget, token_hash

TARGET = LookupTarget(VOCABULARY)
PARAMS = Params(TABLE, DRAFT_TABLES["near"])
NO_BIAS: dict[int, float] = {}
OPTIONS = {
    "repetition": ((1.8, 0.6, 1.3), (0.0,) * 3, (0.0,) * 3, [NO_BIAS] * 3),
    "presence": ((1.0,) * 3, (1.5, -1.0, 0.4), (0.0,) * 3, [NO_BIAS] * 3),
    "frequency": ((1.0,) * 3, (0.0,) * 3, (0.7, -0.3, 1.9), [NO_BIAS] * 3),
    "bias": ((1.0,) * 3, (0.0,) * 3, (0.0,) * 3, [{3: 2.5, 7: -100.0}, {0: 4.0}, NO_BIAS]),
    "all": ((1.3, 1.0, 0.8), (0.6, 0.0, -0.5), (0.2, 0.9, 0.0), [{5: 3.0}, NO_BIAS, {1: -2.0}]),
}
"""Of three rows, by what they test: penalties, and biases by token."""


def adjusted(options: Any, temperature: Any = 0.0, new: Any = NEW, **filters: Any) -> Request:
    """Requests of three rows with these options."""
    plain = request(temperature, new=new, **filters)
    sampling = plain.sampling.of_kind(SamplingKind.ANY)
    return replace(plain, sampling=sampling, adjustments=AdjustmentOptions.of(*options))


def run(drafter: Any, params: Params, req: Request) -> list[np.ndarray]:
    """The rows of the lookup model."""
    tokens = prompts(VOCABULARY)
    rows, _ = generate(
        *(TARGET, drafter, params, tokens, LENGTHS, req), adjusted=req.adjustments is not None
    )
    return rows


def by_hand(row: int, options: Any, count: int) -> list[int]:
    """Greedy tokens of a row, one by one, through the processors of transformers."""
    repetition, presence, frequency, biases = (each[row] for each in options)
    ids = prompts(VOCABULARY)[row, : LENGTHS[row]].tolist()
    bias = SequenceBiasLogitsProcessor(
        [[[token], value] for token, value in biases.items()] or [[[0], 0.0]]
    )
    table, emitted = np.array(TABLE), np.zeros(VOCABULARY)
    for _ in range(count):
        history = token_hash(np.asarray(ids), np.arange(len(ids))).sum()
        scores, text = torch.from_numpy(table[history % len(table)])[None], torch.tensor([ids])
        scores = RepetitionPenaltyLogitsProcessor(repetition)(text, bias(text, scores))
        scores = scores.numpy()[0] - frequency * emitted - presence * (emitted > 0)
        ids.append(int(scores.argmax()))
        emitted[ids[-1]] += 1
    return ids[-count:]


@each_row("options", OPTIONS.values())
def test_adjusted_text_is_that_of_plain_decoding_and_of_transformers(options: Any) -> None:
    """In rows of unlike lengths, greedy and sampled, and next to other filters."""
    for temperature, filters in (
        (0.0, {}),
        (1.0, {}),
        ((0.0, 0.7, 1.0), {"min_p": (0, 0.1, 0.02)}),
    ):
        req = adjusted(options, temperature, **filters)
        plain = run(NoDraft(), Params(TABLE, ()), req)
        assert_same(run(LookupDrafter(TREES[0]), PARAMS, req), plain)
        if temperature == 0:
            expected = [by_hand(row, options, NEW[row]) for row in range(3)]
            assert_same(plain, list(map(np.asarray, expected)))
        free = run(NoDraft(), Params(TABLE, ()), adjusted(NEUTRAL, temperature, **filters))
        assert any(not np.array_equal(a, b) for a, b in zip(plain, free, strict=True))


NEUTRAL = ((1.0,) * 3, (0.0,) * 3, (0.0,) * 3, [NO_BIAS] * 3)


def test_a_draft_of_some_tokens_sees_only_their_adjustments() -> None:
    """What it ranks are the target's scores of the committed tokens, of its vocabulary."""
    options = AdjustmentOptions.of([1.5, 1.0], [0.4, 0.0], [0.25, 1.0], [{1: 2.0}, NO_BIAS])
    tokens, kept = np.asarray([[1, 3, 9], [2, 2, 5]]), np.asarray([1, 2, 5, 9])
    emitted = np.asarray([1, 2])
    state = Adjustments.of_prompts(options, tokens, np.asarray([3, 3]), 10, emitted)
    plain = request(1.0, seeds=(5, 6)).sampling.of_kind(SamplingKind.ANY)

    @jax.jit
    def scores(state: Adjustments, logits: jax.Array) -> tuple[jax.Array, ...]:
        noise = RoundNoise.of_round(plain, jnp.asarray([3, 3]), 1, 10, state)
        unadjusted = RoundNoise(noise.noise, noise.sampling).scores(logits, 1)
        some = noise.among(jnp.asarray(kept)).scores(logits[:, :, kept], 1)
        return noise.scores(logits, 1), some, unadjusted

    logits = np.random.default_rng(0).normal(size=(2, 1, 10)).astype(np.float32)
    adjusted_scores, some, unadjusted = map(np.asarray, scores(state, jnp.asarray(logits)))
    whole = adjusted_scores - logits.max(axis=-1, keepdims=True)
    for row in range(2):
        found, expected = some[row, 0], whole[row, 0, kept]
        np.testing.assert_allclose(found - found[0], expected - expected[0], atol=1e-5)
    changed = adjusted_scores - unadjusted
    assert len(np.unique(np.round(changed[0, 0], 4))) > 2


def one(row: int, temperature: float, priority: int = 0) -> Any:
    """A request of its own: a prompt, and options with penalties."""
    several = adjusted(OPTIONS["all"], temperature, (17, 13, 9))
    return prompts(VOCABULARY)[row, : LENGTHS[row]], jax.device_get(several).row(row)


def test_adjusted_requests_share_slots_and_go_on_behind_what_they_emitted() -> None:
    """A better request takes the slot of one that then counts its own text as emitted."""
    models = TARGET, (LookupDrafter(TREES[0]),), PARAMS
    runner = ModelRunner(*models, slots=1, capacity=64, stop_width=1, adjusted=True)
    engine = Engine(runner, chunks=(8,), readmits=True)
    several = adjusted(OPTIONS["all"], 1.0, (17, 13, 9))
    expected = run(NoDraft(), Params(TABLE, ()), several)
    first = engine.submit(*one(0, 1.0), priority=1)
    begun: list[StepOutput] = []
    while sum(len(output.tokens) for output in begun) < 4:
        begun += engine.step()
    others = [engine.submit(*one(row, 1.0), priority=0) for row in (1, 2)]
    plain = engine.submit(one(2, 1.0)[0], replace(one(2, 1.0)[1], adjustments=None))
    tokens = texts_of([*begun, *outputs_of(engine)])
    assert engine.preemptions == 1
    assert_same([tokens[id] for id in (first, *others)], expected)
    unadjusted = run(NoDraft(), Params(TABLE, ()), request(1.0, new=(17, 13, 9)))
    np.testing.assert_array_equal(tokens[plain], unadjusted[2])


def test_an_engine_without_tables_refuses_penalties() -> None:
    models = TARGET, (NoDraft(),), Params(TABLE, ())
    engine = Engine(ModelRunner(*models, slots=1, capacity=64, stop_width=1), chunks=(8,))
    with pytest.raises(ValueError, match="make the engine with enable_penalties=True"):
        engine.submit(*one(0, 0.0))
    neutral = AdjustmentOptions.none(1)
    engine.submit(one(0, 0.0)[0], replace(one(0, 0.0)[1], adjustments=neutral))


def test_logits_stay_finite_at_both_ends_of_what_is_allowed() -> None:
    """Else a request's own option is taken for weights that overflow (status 500 of a server)."""
    ends = [
        [rule(name).least, rule(name).most]
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    ]
    options = [*product(*ends)]
    repetition, presence, frequency = np.asarray(options).T
    biases = [{0: 100.0, 1: -100.0}] * len(options)
    given = AdjustmentOptions.of(repetition, presence, frequency, biases)
    tokens = np.tile(np.arange(4, dtype=np.int32), (len(options), 1))
    of_rows = Adjustments.of_prompts(given, tokens, np.full(len(options), 4), 4)
    on_device = jax.tree.map(jnp.asarray, of_rows)
    emitted = on_device.after(jnp.asarray(tokens), jnp.full(len(options), 4))
    largest = float(jnp.finfo(jnp.float16).max)
    logits = jnp.asarray([[[largest, -largest, largest, -largest]]])
    found = adjust(jnp.tile(logits, (len(options), 1, 1)), emitted)
    assert jnp.isfinite(found).all()
    for temperature in (1e-37, 1.0, rule("temperature").most):
        sampling = replace(
            request(1.0).sampling.of_kind(SamplingKind.ANY),
            temperature=jnp.full(len(options), temperature),
            top_k=jnp.zeros(len(options), jnp.int32),
            top_p=jnp.full(len(options), 0.5),
            seed=jnp.zeros(len(options), jnp.uint32),
            log_min_p=jnp.full(len(options), -1.0),
        )
        assert (draw(found, jnp.zeros_like(found), sampling) != NO_TOKEN).all()
