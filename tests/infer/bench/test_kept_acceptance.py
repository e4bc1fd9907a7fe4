"""What fewer verified nodes keep of an acceptance length: as recorded, and never too much."""

import json
from pathlib import Path

import numpy as np
import pytest

from infer.bench.kept_acceptance import RECORDED, kept_lengths, kept_share
from infer.bench.simulated import AcceptanceLengths
from longspec_jax.config import TreeConfig

ROOT = Path(__file__).parents[3]
PAPER = (4, 16, 16, 16, 16)


def recorded_rows() -> list[dict]:
    file = ROOT / "docs" / "results" / "demo_trees_temperature1_h200.json"
    return [row for row in json.loads(file.read_text())["rows"] if not row["draft_int8"]]


def test_the_curve_is_the_recorded_one() -> None:
    of_paper = [row for row in recorded_rows() if row["tree"] == list(PAPER)]
    assert len(of_paper) == len(RECORDED)
    whole = next(row for row in of_paper if row["budget"] is None)["acceptance_length"]
    for row in of_paper:
        tree = TreeConfig(PAPER, row["budget"])
        tau = row["acceptance_length"]
        assert RECORDED[tree.num_nodes] == round(tau, 4)
        assert kept_lengths(whole, tree).mean == pytest.approx(tau, abs=1e-3)
    # What is drawn of the paper's tau on GovReport: 1 + 2.57 times the share of accepted tokens.
    expected = {64: 3.545, 48: 3.410, 32: 3.249, 16: 2.925}
    for nodes, tau in expected.items():
        assert kept_lengths(3.57, TreeConfig(PAPER, nodes)).mean == pytest.approx(tau, abs=1e-3)


@pytest.mark.parametrize("widths", [PAPER, (8,) * 8, (1,) * 32, (8, 24, 24, 24, 24), (2, 3), (16,)])
def test_a_node_less_never_earns_more(widths: tuple[int, ...]) -> None:
    whole = TreeConfig(widths)
    shares = [kept_share(TreeConfig(widths, nodes)) for nodes in range(1, whole.num_grown + 1)]
    assert shares[0] == 0 and shares[-1] == 1 and kept_share(whole) == 1
    assert (np.diff(shares) > 0).all()


@pytest.mark.parametrize("widths", [PAPER, (1,) * 8, (1, 1), (2, 3)])
def test_nothing_is_emitted_that_no_node_can_hold(widths: tuple[int, ...]) -> None:
    """A perfect draft, too; and any budget runs in the program of the whole tree."""
    most = float(len(widths) + 1)
    for acceptance in (1.0, 1 + 0.9 * (most - 1), most):
        whole = kept_lengths(acceptance, TreeConfig(widths))
        assert whole == AcceptanceLengths.geometric(acceptance, len(widths))
        for nodes in range(1, sum(widths) + 1):
            lengths = kept_lengths(acceptance, TreeConfig(widths, nodes))
            assert lengths.edges.shape == whole.edges.shape
            assert 1 <= lengths.mean <= min(whole.mean, nodes) + 1e-9
            assert sum(lengths.probabilities[nodes:]) == 0


def test_what_is_assumed_of_trees_of_other_widths() -> None:
    """Fewer nodes than the paper's: the ratio of two places. More: its place among all nodes."""
    narrow, wide = (3, 11, 11, 11, 11), (8, 24, 24, 24, 24)
    assert kept_share(TreeConfig(narrow, 16)) == pytest.approx(
        kept_share(TreeConfig(PAPER, 16)) / kept_share(TreeConfig(PAPER, 48))
    )
    # 105 ** (x / y) is the place of 69 ** (x / y): 64 nodes of 105 stand where 44 of 69 do.
    stretched = kept_share(TreeConfig(wide, 64))
    assert kept_share(TreeConfig(PAPER, 43)) < stretched < kept_share(TreeConfig(PAPER, 45))


def test_what_the_whole_tree_cannot_emit_is_refused() -> None:
    with pytest.raises(ValueError, match="a tree of 2 levels emits 1 to 3 tokens"):
        kept_lengths(3.5, TreeConfig((2, 3), 2))
