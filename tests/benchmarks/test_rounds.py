"""Rounds of the benchmarks: the wanted acceptance along real paths, and parts that do the work."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import rounds as bench_rounds
from benchmarks.arguments import SHAPES
from benchmarks.models import draft_state, filled_cache, random_model
from benchmarks.rounds import GREEDY, accept_drawn, acceptance_edges, decode, drawn_count, rows_at
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding import round as round_lib
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.runner import slack_slots
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Params
from longspec_jax.ops.attention import path
from tests.kit import ALL_PASSES, after_prompts
from tests.lookup import LookupDrafter, LookupTarget, random_table, table_params

TREE = TreeConfig((3, 5, 4))
FIVE_LEVELS = TreeConfig((4,) * 5)
VOCABULARY = 13
NEW = 61
TARGET, DRAFTER = LookupTarget(VOCABULARY), LookupDrafter(TREE)
PARAMS = table_params(random_table(0, 97, VOCABULARY), random_table(1, 97, VOCABULARY))
EDGES = acceptance_edges(2.6, TREE)


def start(drafter=DRAFTER) -> Rows:
    """Two rows of a lookup table whose caches are empty."""
    slots = NEW + slack_slots(TREE.num_levels)
    return rows_at(TARGET.allocate(2, slots), drafter.begin(PARAMS, 2, slots), 2, 0, NEW)


@pytest.mark.parametrize("mean", [1.0, 1.7, 3.57, 5.2, 6.0])
def test_geometric_lengths_have_the_mean(mean: float) -> None:
    edges = acceptance_edges(mean, FIVE_LEVELS)
    reached = np.asarray([1, *(1 - np.asarray(edges, float) / 2**32), 0])
    assert len(edges) == 5 and reached.sum() == pytest.approx(mean, abs=1e-8)
    np.testing.assert_allclose(reached[1:-1], reached[:-2] * reached[1], atol=1e-8)
    counts = jax.vmap(lambda r: drawn_count(edges, jnp.full((3,), r)))(jnp.arange(500))
    for row in np.asarray(counts).T:
        share = np.bincount(row, minlength=7)[1:] / len(row)
        np.testing.assert_allclose(share, -np.diff(reached), atol=0.01)
        # Any stretch has the mean, so that a short benchmark is not off by luck.
        stretches = row[:480].reshape(-1, 40).mean(axis=1)
        np.testing.assert_allclose(stretches, mean, atol=0.15)
    assert mean in (1.0, 6.0) or not np.array_equal(counts[:, 0], counts[:, 1])


def test_a_mean_is_one_that_the_tree_can_emit() -> None:
    assert int(acceptance_edges(1.9, TreeConfig((2, 3), 2))[1]) == 2**32 - 1
    with pytest.raises(ValueError, match="emits 1 to 2 tokens"):
        acceptance_edges(2.1, TreeConfig((2, 3), 2))
    with pytest.raises(ValueError, match="emits 1 to 6 tokens"):
        acceptance_edges(6.5, FIVE_LEVELS)


def test_rounds_emit_the_wanted_mean_along_existing_paths() -> None:
    """One program serves every acceptance length."""
    program = decode.lower(TARGET, DRAFTER, EDGES, PARAMS, start()).compile()
    for mean in (2.6, 1.4):
        end = program(acceptance_edges(mean, TREE), PARAMS, start())
        np.testing.assert_array_equal(end.emitted, [NEW - 1] * 2)
        np.testing.assert_array_equal(end.rows.length, [NEW - 1] * 2)
        np.testing.assert_allclose(end.emitted / end.rounds, mean, atol=0.2)
    cached = np.asarray(end.rows.cache.keys[0])[:, 0, :, 0]  # The lookup table caches token ids.
    for row in range(2):
        text = [int(token) for token in cached[row, : end.rows.length[row]]]
        # The drafter's hash of the whole text: its state advanced by the same tokens.
        fresh = after_prompts(DRAFTER, PARAMS, [text], [len(text)])
        assert int(end.rows.draft[row]) == int(fresh[0])


@pytest.mark.parametrize("budget", [2, 7])
def test_a_budget_that_left_no_node_so_deep_ends_the_path(budget: int) -> None:
    """The wanted mean is kept: a benchmark's rounds do the same work, whatever they commit."""
    drafter = LookupDrafter(TreeConfig(TREE.widths, budget))
    end = decode(TARGET, drafter, EDGES, PARAMS, start(drafter))
    np.testing.assert_array_equal(end.emitted, [NEW - 1] * 2)
    np.testing.assert_allclose(end.emitted / end.rounds, 2.6, atol=0.2)


def test_a_simulated_round_costs_what_a_real_one_does() -> None:
    """The real accept is still compiled in: the simulated round does all of the work."""

    def flops(rule) -> float:
        step = jax.jit(
            lambda params, rows: round_lib.spec_step(TARGET, DRAFTER, params, rows, GREEDY, rule)
        )
        return step.lower(PARAMS, start()).compile().cost_analysis()["flops"]

    drawn = functools.partial(accept_drawn, shape=TREE, edges=EDGES, rounds=jnp.zeros(2, jnp.int32))
    real, simulated = flops(None), flops(drawn)
    # A lookup table computes next to nothing: what the simulation adds would vanish in a model.
    assert real <= simulated <= real + 2000


def test_the_library_never_reaches_it() -> None:
    root = Path(__file__).parents[2] / "longspec_jax"
    users = [path.name for path in root.rglob("*.py") if "accept_drawn" in path.read_text()]
    assert users == []


@pytest.fixture(scope="module")
def model():
    return random_model(SHAPES["tiny"])


def rows_of(model, drafter) -> Rows:
    draft = draft_state(model, drafter, 2)
    return rows_at(filled_cache(model.target, 2, 256), draft, 2, 64, 8)


def test_a_random_cache_in_8_bits_holds_codes_of_numbers() -> None:
    config = dataclasses.replace(SHAPES["tiny"], kv_dtype="fp8")
    leaves = jax.tree.leaves(filled_cache(TargetModel(config), 2, 256))
    caches = [leaf for leaf in leaves if leaf.dtype == jnp.uint8]
    assert len(caches) == 2 * config.num_layers
    for cache in caches:
        numbers = jax.lax.bitcast_convert_type(cache, jnp.float8_e4m3fn).astype(jnp.float32)
        assert float(numbers.std()) == pytest.approx(1, abs=0.05)


def test_rings_of_a_random_cache_are_those_that_the_kernels_of_one_order_read() -> None:
    target = TargetModel(SHAPES["gemma3-12b"], batch_invariant=True)
    cache = jax.eval_shape(lambda: filled_cache(target, 1, 4096))
    assert {leaf.shape[2] % path.SLOTS for leaf in jax.tree.leaves(cache)} == {0}


@pytest.mark.parametrize("part", bench_rounds.PARTS, ids=lambda part: part.__name__)
def test_every_turn_of_a_part_does_the_work(model, part) -> None:
    """The loop body holds the matmuls: nothing was hoisted out of the loop or dropped."""
    drafter = model.drafter(TreeConfig((2, 3)))
    rows = rows_of(model, drafter)
    program = jax.jit(part(model.target, drafter, 3)).lower(model.params, rows)
    computations = dict(
        re.findall(
            r"^(?:ENTRY )?%(\S+) .*?\{\n(.*?)^\}",
            program.compile(ALL_PASSES).as_text(),
            re.S | re.M,
        )
    )
    reached, waiting = "", re.findall(r"body=%([\w.-]+)", "".join(computations.values()))
    assert waiting, "the loop is gone"
    while waiting:
        text = computations.pop(waiting.pop(), "")
        reached += text
        waiting += re.findall(r"%([\w.-]+)", text)
    assert " dot(" in reached or "custom-call" in reached


def test_the_verify_part_is_the_rounds_verification(model) -> None:
    """One turn of the part draws what verifying the same tree draws."""
    drafter = model.drafter(TreeConfig((2, 3)))
    rows = rows_of(model, drafter)
    draws = jax.jit(bench_rounds.verify(model.target, drafter, 1))(model.params, rows)
    tree = bench_rounds.some_tree(drafter.tree, rows)

    @jax.jit
    def expected(params: Params, rows: Rows) -> jax.Array:
        noise = round_lib.sampling_noise(model.target, drafter, rows, GREEDY)
        return round_lib.verify_tree(model.target, drafter, params, rows, tree, noise)[1]

    np.testing.assert_array_equal(draws, expected(model.params, rows))
