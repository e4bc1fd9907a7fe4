"""The comparison with plain decoding finds no difference, and one that was made."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import match
from benchmarks.__main__ import main
from benchmarks.arguments import SHAPES
from longspec_jax import LongSpec, cli, make_mesh
from longspec_jax.config.tree import TreeConfig
from longspec_jax.models import layers
from longspec_jax.ops.matmul.few_rows import matmul_xla

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
def test_quantised_weights_on_a_mesh(tmp_path: Path) -> None:
    options = "--dtype=float32", "--weights=w4a16", "--mesh=data=2,tp=2", "--drafter=oracle"
    status, rows = rows_of(tmp_path / "rows.json", *options)
    assert status == 0 and {row["differing_tokens"] for row in rows} == {0}
    assert {row["dtype"] for row in rows} == {"weights int4, activations float32"}
    with pytest.raises(ValueError, match="is only for random weights; demo has its own"):
        match.load("demo", "float32", "fp8")


def spoil(monkeypatch: pytest.MonkeyPatch, shape: str, other: Callable[..., jax.Array]) -> None:
    """Have ``--target=control`` compute the gated matmuls of launches of several rows otherwise.

    It has random weights that are large enough for its draws to depend on them. No other test has
    programs of its number of positions.
    """
    own = dataclasses.replace(SHAPES[shape], max_positions=1025)
    monkeypatch.setitem(SHAPES, "control", own)
    load = match.load

    def loud(*arguments: Any, **options: Any) -> LongSpec:
        spec = load(*arguments, **options)
        params = jax.tree.map(lambda x: 16 * x if x.ndim > 1 else x, spec.target_params)
        return dataclasses.replace(spec, target_params=params)

    monkeypatch.setattr(match, "load", loud)
    exact = layers.multiply

    def multiply(x: jax.Array, weights: jax.Array, *bias: Any, **options: Any) -> jax.Array:
        if options.get("gated") and x.size > x.shape[-1]:
            return other(x, weights)
        return exact(x, weights, *bias, **options)

    monkeypatch.setattr(layers, "multiply", multiply)


CONTROL = "--target=control", "--drafter=oracle", "--new_tokens=60"


@pytest.mark.slow
def test_a_rounding_that_depends_on_the_rows_beside_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control, promised or not: one more rounding of one matmul of every layer."""

    def rounded(x: jax.Array, weights: jax.Array) -> jax.Array:
        return matmul_xla(x, weights, gated=True).astype(jnp.bfloat16).astype(x.dtype)

    spoil(monkeypatch, "tiny", rounded)
    for promised, batches in ((True, "1,3"), (False, "1")):
        monkeypatch.setattr(LongSpec, "identical", property(lambda spec, it=promised: it))
        options = "--dtype=float32", *CONTROL, f"--batch={batches}"
        status, rows = rows_of(tmp_path / "rows.json", *options)
        assert status == int(promised)
        different = {(row["drafter"], row["batch"]) for row in rows if row["differing_tokens"]}
        several = {("oracle", "3 slots"), ("plain", "3")} if promised else set()
        assert {("oracle", "1"), *several} <= different and ("plain", "1") not in different


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*of the draft's tokens were accepted:UserWarning")
def test_one_matmul_by_xla_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the proof in 16 bits."""
    if not match.load("demo", "bfloat16").identical:
        pytest.skip("needs the kernels of batch_invariant")
    spoil(monkeypatch, "demo", partial(matmul_xla, gated=True))
    options = "--dtype=bfloat16", *CONTROL, "--new_tokens=400"
    status, rows = rows_of(tmp_path / "rows.json", *options)
    different = {(row["drafter"], row["batch"]) for row in rows if row["differing_tokens"]}
    assert status == 1 and {("oracle", "1"), ("plain", "3")} <= different
    assert ("plain", "1") not in different


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*of the draft's tokens were accepted:UserWarning")
@pytest.mark.parametrize("mesh", ["tp=2", "data=2"])
def test_no_token_differs_on_a_mesh_in_16_bits(mesh: str, tmp_path: Path) -> None:
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    if not match.load("demo", "bfloat16", mesh=make_mesh(**cli.mesh(mesh))).identical:
        pytest.skip("needs the kernels of batch_invariant")
    options = "--target=demo", "--dtype=bfloat16", f"--mesh={mesh}"
    more = "--tree=4,8,8,8@16", "--context=128,512", "--new_tokens=64", "--batch=1,2"
    status, rows = rows_of(tmp_path / "rows.json", *options, *more)
    assert status == 0 and {row["differing_tokens"] for row in rows} == {0}


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


def test_the_hierarchy_proposes_only_chains() -> None:
    chain, tree = TreeConfig((1, 1)), TreeConfig((2, 2))
    found = [*match.cases(["hierarchy", "ngram"], [chain, tree])]
    assert [name for name, _ in found] == ["hierarchy", "ngram", "ngram", "plain"]
    assert found[0][1] == chain and np.all([one.widths for _, one in found[-1:]] == [()])
