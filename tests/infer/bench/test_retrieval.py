"""``python -m infer.bench retrieval`` on the tiny shape, and what it simulates."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from infer.bench import __main__ as bench
from infer.bench.acceptance import AcceptanceLengths
from infer.bench.retrieval import accept_agreed, break_even, partial_rounds, round_parts
from infer.bench.rounds import LoopTime
from longspec_jax.config import TreeConfig
from longspec_jax.drafters.tree import at_end, branch

LEVELS = TreeConfig((2,) * 5)


def test_rows_have_what_is_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "retrieval.json"
    command = "retrieval --shape=tiny --context=700 --new_tokens=32 --agreement=0.5"
    command += " --agreement=0.999 --end 2,2 --draft_option=int8"
    assert bench.main([*command.split(), f"--json={file}"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["method"] for row in rows] == ["longspec", "retrieval", "retrieval"]
    assert rows[1]["retrieve"] == 256
    assert all(row["draft_options"] == {"int8": True} for row in rows)
    low, high = rows[1:]
    assert high["acceptance_length"] > low["acceptance_length"] > 1
    for row in rows[1:]:
        assert (row["chain"], row["end"], row["nodes"]) == (8, "2,2", 13)
        assert row["speedup_over_longspec"] > 0
    case = "tiny at 700, retrieve 256, chain 8 with 2,2 behind"
    assert f"{case}: faster than one level" in capsys.readouterr().out


def test_the_cache_may_lie_in_the_hosts_memory(tmp_path: Path) -> None:
    file = tmp_path / "offload.json"
    command = "retrieval --offload --shape=tiny --context=700 --new_tokens=32 --agreement=0.9"
    assert bench.main([*command.split(), f"--json={file}"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["method"] for row in rows] == ["plain", "longspec", "retrieval"]
    assert [row.get("host_bytes", 0) > 0 for row in rows] == [True, True, True]
    assert rows[0]["acceptance_length"] == 1


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([(0.9, 0.8), (0.95, 0.9), (0.99, 1.1)], "from an agreement of 0.970 on"),
        ([(0.99, 1.4), (0.9, 1.2)], "at every agreement from 0.9 on"),
        ([(0.9, 0.5)], "at no agreement up to 0.9"),
    ],
)
def test_where_it_begins_to_pay(points: list[tuple[float, float]], words: str) -> None:
    assert break_even(points) == words


def test_the_parts_of_a_cycle_come_apart() -> None:
    """A full round of 10 ms and partial ones of 3: four before it, and two."""
    most, fewest = partial_rounds(9, 6, 1), partial_rounds(9, 6, 6)
    assert (most, fewest) == (4, 1)
    loops = (LoopTime(0.022 * 5, 5, 50, 5), LoopTime(0.013 * 5, 5, 50, 5))
    parts = round_parts(*loops, most, fewest)
    assert parts == {"partial_round_ms": 3.0, "full_round_ms": 10.0}


@pytest.mark.parametrize("agreement", [0.6, 0.9])
def test_chains_are_confirmed_as_far_as_they_agree(agreement: float) -> None:
    """On average over rounds, and never what a row did not draw."""
    rows, levels, offered = 500, 12, 7
    tree = branch(jnp.zeros(rows, jnp.int32), jnp.ones((rows, levels), jnp.int32))
    drawn = jnp.arange(levels + 1) <= offered
    tree = replace(tree, parents=jnp.where(drawn, tree.parents, -1))
    draws = jnp.full((rows, levels + 1), 3)
    edges = AcceptanceLengths.geometric(3.0, LEVELS).edges
    accepted_path = accept_agreed(
        *(tree, draws, levels),
        edges=edges,
        agreement=jnp.float32(agreement),
        chain=levels,
        rounds=jnp.arange(rows),
    )
    count = np.asarray(accepted_path.count)
    wanted = sum(agreement**length for length in range(offered + 1))
    assert abs(count.mean() - wanted) < 0.2 and count.max() == offered + 1
    for row in (0, 1, 2):
        tokens = np.asarray(accepted_path.tokens)[row, : count[row]]
        assert tokens.tolist() == [1] * (count[row] - 1) + [3]


def test_behind_a_chain_that_is_confirmed_goes_on_what_the_draft_earns() -> None:
    """As far as its tree goes: two levels, behind the third of four links."""
    rows, mean = 4000, 2.0
    zeros = jnp.zeros(rows, jnp.int32)
    chain = branch(zeros, jnp.ones((rows, 4), jnp.int32))
    chain = replace(chain, parents=chain.parents.at[:, 4].set(-1))
    end = branch(zeros, jnp.full((rows, 2), 2))
    tree, draws = at_end(chain, zeros + 3, end), jnp.full((rows, 7), 5)
    lengths = AcceptanceLengths.geometric(mean, LEVELS)
    for agreement, sure in ((1.0, 1.0), (1e-6, 0.0)):
        accepted_path = accept_agreed(
            *(tree, draws, 6),
            edges=lengths.edges,
            agreement=jnp.float32(agreement),
            chain=4,
            rounds=jnp.arange(rows),
        )
        count = np.asarray(accepted_path.count)
        share = [(count == number).mean() for number in (4, 5, 6)]
        first, second = lengths.probabilities[:2]
        wanted = np.array([first, second, 1 - first - second]) * sure
        np.testing.assert_allclose(share, wanted, atol=0.03)
        longest = int(count.argmax())
        tokens = np.asarray(accepted_path.tokens)[longest, : count[longest]].tolist()
        assert tokens == ([1, 1, 1, 2, 2, 5] if sure else [5])
