"""Simulated acceptance: the mean it was asked for, along real paths, at a real round's cost."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.bench.simulated import (
    AcceptanceLengths,
    drawn_count,
    simulated_decode,
    simulated_step,
)
from longspec_jax.config import TreeConfig
from longspec_jax.decoding.engine import recorded_step, slack_slots
from longspec_jax.decoding.prefill import prefill
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.sampling import Sampling
from tests.kit import after_prompts
from tests.lookup import LookupDrafter, LookupTarget, random_table, table_params

TREE = TreeConfig((3, 5, 4))
VOCABULARY = 13
NEW = np.array([61, 37], np.int32)
TARGET, DRAFTER = LookupTarget(VOCABULARY), LookupDrafter(TREE)
PARAMS = table_params(random_table(0, 97, VOCABULARY), random_table(1, 97, VOCABULARY))


def request() -> Request:
    sampling = Sampling.greedy(2)
    return Request(sampling, jnp.full((2, 1), -1), jnp.asarray(NEW))


def start() -> tuple[np.ndarray, SpecState]:
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (2, 11)).astype(np.int32)
    state = prefill(
        TARGET,
        DRAFTER,
        PARAMS,
        jnp.asarray(tokens),
        jnp.array([11, 7]),
        request(),
        capacity=11 + int(NEW.max()) + slack_slots(TREE.num_levels),
        max_emitted=int(NEW.max()),
        chunk=4,
    )
    return tokens, state


@pytest.mark.parametrize("mean", [1.0, 1.7, 3.57, 5.2, 6.0])
def test_geometric_lengths_have_the_mean(mean: float) -> None:
    lengths = AcceptanceLengths.geometric(mean, levels=5)
    assert len(lengths.probabilities) == 6
    assert lengths.mean == pytest.approx(mean, abs=1e-9)


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="emits 1 to 6 tokens"):
        AcceptanceLengths.geometric(6.5, levels=5)
    with pytest.raises(ValueError, match="sum to 1"):
        AcceptanceLengths((0.5, 0.4))
    with pytest.raises(ValueError, match="no rounds"):
        AcceptanceLengths.from_histogram([0, 0])


@pytest.mark.parametrize(
    "lengths",
    [AcceptanceLengths.geometric(3.57, 5), AcceptanceLengths.from_histogram([7, 0, 2, 11])],
    ids=["geometric", "histogram"],
)
def test_counts_follow_the_distribution(lengths: AcceptanceLengths) -> None:
    rounds = jnp.arange(500)
    counts = jax.vmap(lambda r: drawn_count(lengths.edges, 5, jnp.full((3,), r)))(rounds)
    for row in np.asarray(counts).T:
        share = np.bincount(row, minlength=len(lengths.probabilities) + 1)[1:] / len(row)
        np.testing.assert_allclose(share, lengths.probabilities, atol=0.01)
        # Any stretch has the mean, so that a short benchmark is not off by luck.
        stretches = row[:480].reshape(-1, 40).mean(axis=1)
        np.testing.assert_allclose(stretches, lengths.mean, atol=0.15)
    assert not np.array_equal(counts[:, 0], counts[:, 1])


def test_rounds_emit_the_wanted_mean_along_existing_paths() -> None:
    lengths = AcceptanceLengths.geometric(2.6, TREE.num_levels)
    tokens, state = start()
    prompt = np.asarray(state.rows.length)
    end = simulated_decode(TARGET, DRAFTER, 1, lengths.edges, PARAMS, state)
    np.testing.assert_array_equal(end.record.emitted, NEW)
    np.testing.assert_array_equal(end.rows.length, prompt + NEW - 1)
    np.testing.assert_allclose((end.record.emitted - 1) / end.record.rounds, lengths.mean, atol=0.2)
    np.testing.assert_array_equal(end.record.histogram.sum(axis=1), end.record.rounds)
    cached = np.asarray(end.rows.cache.keys[0])[:, 0, :, 0]  # The lookup table caches token ids.
    for row in range(2):
        text = [*tokens[row, : prompt[row]], *np.asarray(end.record.output)[row, : NEW[row] - 1]]
        np.testing.assert_array_equal(cached[row, : end.rows.length[row]], text)
        # The drafter's hash of the whole text: its state advanced by the same tokens.
        fresh = after_prompts(DRAFTER, PARAMS, [text], [len(text)])
        assert int(end.rows.draft[row]) == int(fresh[0])


def test_one_program_serves_every_acceptance_length() -> None:
    """What it is given when it runs is what its rounds emit."""
    first = AcceptanceLengths.geometric(1.4, TREE.num_levels)
    program = simulated_decode.lower(TARGET, DRAFTER, 1, first.edges, PARAMS, start()[1]).compile()
    for mean in (1.4, 3.3):
        edges = AcceptanceLengths.geometric(mean, TREE.num_levels).edges
        record = program(edges, PARAMS, start()[1]).record
        np.testing.assert_array_equal(record.emitted, NEW)
        np.testing.assert_allclose((record.emitted - 1) / record.rounds, mean, atol=0.2)


@pytest.mark.parametrize("budget", [2, 7])
def test_a_budget_that_left_no_node_so_deep_ends_the_path(budget: int) -> None:
    """The wanted mean is kept: a benchmark's rounds do the same work, whatever they commit."""
    drafter = LookupDrafter(TreeConfig(TREE.widths, budget))
    lengths = AcceptanceLengths.geometric(2.6, TREE.num_levels)
    _, state = start()
    end = simulated_decode(TARGET, drafter, 1, lengths.edges, PARAMS, state)
    np.testing.assert_array_equal(end.record.emitted, NEW)
    np.testing.assert_allclose((end.record.emitted - 1) / end.record.rounds, lengths.mean, atol=0.2)


def test_accepted_tokens_are_drafted_and_the_bonus_is_the_targets() -> None:
    """With a perfect draft whose best path is taken, simulated output is the target's own."""
    params = table_params(PARAMS.target)
    lengths = AcceptanceLengths.from_histogram([0, 0, 0, 1])
    _, state = start()
    step = jax.jit(partial(simulated_step, TARGET, DRAFTER, 0, lengths.edges))
    simulated = step(params, state)[0].record
    real = jax.jit(partial(recorded_step, TARGET, DRAFTER))(params, state).record
    matched = np.asarray(real.emitted) == 5
    assert np.array_equal(simulated.emitted, [5, 5])
    np.testing.assert_array_equal(
        np.asarray(simulated.output)[matched, :5], np.asarray(real.output)[matched, :5]
    )
    assert np.asarray(simulated.drafted)[0, :5].tolist() == [False, True, True, True, False]


def test_a_simulated_round_costs_what_a_real_one_does() -> None:
    """The real walk is still compiled in: the simulated round does all of the work, and no less."""
    _, state = start()
    real = jax.jit(partial(recorded_step, TARGET, DRAFTER)).lower(PARAMS, state)
    lengths = AcceptanceLengths.geometric(2.6, TREE.num_levels)
    simulated = jax.jit(partial(simulated_step, TARGET, DRAFTER, 0))
    simulated = simulated.lower(lengths.edges, PARAMS, state)
    real_flops, simulated_flops = (x.compile().cost_analysis()["flops"] for x in (real, simulated))
    # A lookup table computes next to nothing: what the simulation adds would vanish in a model.
    assert real_flops <= simulated_flops <= real_flops + 2000


def test_the_library_never_reaches_it() -> None:
    root = Path(__file__).parents[3] / "longspec_jax"
    users = [
        path.name
        for path in root.rglob("*.py")
        if "simulated" in path.read_text() and path.name != "simulated.py"
    ]
    assert users == []
