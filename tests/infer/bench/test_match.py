"""The comparison with plain decoding finds no difference, and one that was made."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from infer.bench import match
from infer.bench.__main__ import main
from infer.bench.arguments import SHAPES
from longspec_jax import LongSpec
from longspec_jax.config.tree import TreeConfig
from longspec_jax.models import target as target_lib

SHORT = ("--target=tiny", "--tree=3,4@6", "--context=40", "--new_tokens=9", "--batch=1,3")


def rows_of(path: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and the rows of the file."""
    status = main(["match", *SHORT, f"--json={path}", *options])
    return status, json.loads(path.read_text())["rows"]


@pytest.mark.slow
def test_no_token_differs(tmp_path: Path) -> None:
    status, rows = rows_of(tmp_path / "rows.json", "--dtype=float32")
    assert status == 0 and {row["differing_tokens"] for row in rows} == {0}
    cases = {(row["drafter"], row["tree"], row["batch"]) for row in rows}
    drafters = [("oracle", "3,4@6"), ("ngram", "3,4@6"), ("plain", "none")]
    assert cases == {(*one, batch) for one in drafters for batch in ("1", "3", "3 slots")}
    assert {(row["temperature"], row["top_p"]) for row in rows} == {*match.SAMPLINGS}
    assert {row["new_tokens"] for row in rows} == {9}
    oracle = [row["acceptance_length"] for row in rows if row["drafter"] == "oracle"]
    assert min(oracle) > 1.5, "the oracle knows the text"


@pytest.mark.slow
def test_a_product_that_depends_on_the_rows_beside_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control, promised or not. No other test has programs of this context."""
    own = dataclasses.replace(SHAPES["tiny"], max_positions=1025)
    monkeypatch.setitem(SHAPES, "tiny", own)
    exact = target_lib.head_logits

    def head_logits(table: jax.Array, hidden: jax.Array) -> jax.Array:
        logits = exact(table, hidden)
        if hidden.size == hidden.shape[-1]:
            return logits
        return logits + jax.random.normal(jax.random.key(0), logits.shape[-1:])

    monkeypatch.setattr(target_lib, "head_logits", head_logits)
    for promised in (True, False):
        monkeypatch.setattr(LongSpec, "identical", property(lambda spec, it=promised: it))
        status, rows = rows_of(tmp_path / "rows.json", "--dtype=float32", "--drafter=ngram")
        assert status == int(promised)
        different = {(row["drafter"], row["batch"]) for row in rows if row["differing_tokens"]}
        assert {("ngram", "1"), ("ngram", "3 slots"), ("plain", "3")} <= different
        assert ("plain", "1") not in different


def test_prompts_lie_around_the_boundaries() -> None:
    config = SHAPES["tiny"]
    prompts = match.prompts_of(LongSpec(config, None), [128, 256])
    assert sorted(len(one.tokens) for one in prompts) == [127, 128, 129, 255, 256, 257]
    assert {(one.temperature, one.top_p) for one in prompts} == {*match.SAMPLINGS}
    assert len({one.seed for one in prompts}) == 6
    assert all(0 <= token < config.vocab_size for one in prompts for token in one.tokens)


def test_every_token_that_differs_counts() -> None:
    prompts = [match.Prompt([1], *sampling, 0) for sampling in match.SAMPLINGS]
    rows = [*match.compared(prompts, [(1, 2, 3), (4, 5), (6,)], [(1, 9, 8), (4, 5), (6, 7)])]
    assert [row["differing_tokens"] for row in rows] == [2, 0, 1]
    assert [row["new_tokens"] for row in rows] == [3, 2, 1]


def test_the_hierarchy_proposes_chains_alone() -> None:
    chain, tree = TreeConfig((1, 1)), TreeConfig((2, 2))
    found = [*match.cases(["hierarchy", "ngram"], [chain, tree])]
    assert [name for name, _ in found] == ["hierarchy", "ngram", "ngram", "plain"]
    assert found[0][1] == chain and np.all([one.widths for _, one in found[-1:]] == [()])
