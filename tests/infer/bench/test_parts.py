"""The parts of a round in the decode benchmark: each does the work it is named after.

Apart from the benchmark's other tests, because every run of the command leaves hundreds of
megabytes of compiled programs behind until its module ends.
"""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from infer.bench import __main__ as bench
from infer.bench import parts as bench_parts
from infer.bench.models import (
    draft_state,
    filled_cache,
    greedy_request,
    random_model,
    state_at,
)
from infer.bench.shapes import SHAPES
from longspec_jax.config import TreeConfig
from longspec_jax.decoding import engine
from longspec_jax.decoding.rows import Rows
from longspec_jax.drafters.base import Params


@pytest.fixture(scope="module")
def model():
    return random_model(SHAPES["tiny"])


PARTS = [
    *(bench_parts.draft, bench_parts.verify, bench_parts.verify_products),
    *(bench_parts.verify_attention, bench_parts.draft_cross, bench_parts.draft_head),
    bench_parts.draft_choice,
]


@pytest.mark.parametrize("budget", [1, 5])
def test_a_budget_is_measured(budget: int, tmp_path: Path) -> None:
    """Also one that leaves a level out of the verified tree."""
    file = tmp_path / "rows.json"
    bench.main(
        [
            *("decode", "--shape=tiny", "--context=64", f"--tree=2,3@{budget}"),
            *("--acceptance=2", "--new_tokens=41", "--turns=1", "--repetitions=1"),
            *("--parts", f"--json={file}"),
        ]
    )
    [row] = json.loads(file.read_text())["rows"]
    assert row["tree"] == [2, 3] and row["budget"] == budget
    assert row["acceptance_of_all_nodes"] == 2 > row["acceptance_wanted"]
    assert row["acceptance_length"] == pytest.approx(row["acceptance_wanted"], abs=0.15)
    assert (row["acceptance_wanted"] == 1) == (budget == 1), "the root alone yields one token"


def test_a_draft_in_8_bits_is_measured(model, tmp_path: Path) -> None:
    """In the rounds and in the parts; its bytes are counted."""
    file = tmp_path / "rows.json"
    bench.main(
        [
            *("decode", "--shape=tiny", "--context=64", "--tree=2,3", "--acceptance=2"),
            *("--new_tokens=41", "--turns=1", "--repetitions=1", "--parts", f"--json={file}"),
            *("--drafter_option=vocabulary=61", "--drafter_option=int8"),
        ]
    )
    [row] = json.loads(file.read_text())["rows"]
    assert row["draft_int8"] is True and row["draft_vocabulary"] == 61
    assert row["draft_head_ms"] > 0 and row["draft_choice_ms"] > 0
    # The layer by hand: the products' elements and a scale an output, biases and norms in float32.
    elements = 64 * 128 + 3 * 64 * 64 + 64 * 2 * 96 + 96 * 64
    outputs = 128 + 3 * 64 + 2 * 96 + 64
    assert row["draft_bytes"] == elements + 4 * (outputs + 128 + 64 + 3 * 64) + 61 * (64 + 4 + 4)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_every_turn_of_a_part_does_the_work(model, part) -> None:
    """The loop body holds the products: nothing was hoisted out of the loop or dropped."""
    drafter = model.drafter(TreeConfig((2, 3)))
    cache = filled_cache(model.config, 1, 256)
    state = state_at(
        cache, draft_state(model, drafter, 1), drafter.tree, (64,), greedy_request(1, 8)
    )
    program = jax.jit(part(model.target, drafter, 3)).lower(model.params, state.rows)
    computations = dict(
        re.findall(r"^(?:ENTRY )?%(\S+) .*?\{\n(.*?)^\}", program.compile().as_text(), re.S | re.M)
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
    cache = filled_cache(model.config, 2, 256)
    state = state_at(
        cache, draft_state(model, drafter, 2), drafter.tree, (64, 64), greedy_request(2, 8)
    )
    draws = jax.jit(bench_parts.verify(model.target, drafter, 1))(model.params, state.rows)
    tree = bench_parts.some_tree(drafter.tree, state.rows)

    @jax.jit
    def expected(params: Params, rows: Rows) -> jax.Array:
        noise = engine.sampling_noise(model.target, drafter, rows)
        return engine.verify_tree(model.target, drafter, params, rows, tree, noise)[1]

    np.testing.assert_array_equal(draws, expected(model.params, state.rows))
