"""float32 weights with their outputs first, on a CPU."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax import LongSpec
from longspec_jax.ops.matmul import few_rows, outputs_first
from longspec_jax.ops.matmul.outputs_first import OutputsFirst
from longspec_jax.weights import hf
from tests.kit import TOLERANCE, each_row, normal, random_target, relative_error, tiny_target_config

PROMPT = np.arange(1, 8)


@each_row("rows", [1, 2, 3, 5, 8, few_rows.FEW_ON_CPU, few_rows.FEW_ON_CPU + 1])
def test_any_number_of_rows(rows: int) -> None:
    x, table = normal(0, rows, 40), normal(1, 4, 410, 40)
    weights, bias = OutputsFirst(table), normal(2, 4, 410)
    exact = np.tensordot(np.float64(x), np.float64(table), ((1,), (2,)))
    out = jax.jit(outputs_first.matmul)(x[None], weights, bias)
    assert out.shape == (1, rows, 4, 410)
    assert relative_error(out[0], exact + np.float64(bias)) <= TOLERANCE["float32"]
    np.testing.assert_array_equal(weights.kernel(jnp.float32), jnp.moveaxis(table, -1, 0))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the form of a CPU")
def test_few_rows_are_the_operand_that_is_turned() -> None:
    # The simplifier of XLA would make ``x @ table.T`` of it, which takes twice as long.
    x, table = normal(0, 1, 6, 40), normal(1, 1640, 40)
    compiled = jax.jit(few_rows.head_matmul_xla).lower(x, table).compile().as_text()
    assert compiled is not None
    assert "f32[1640,8]" in compiled and "f32[8,1640]{1,0} dot" not in compiled


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other machines keep inputs first")
def test_a_loaded_model_decodes_as_with_inputs_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (few_rows, outputs_first):
        monkeypatch.setattr(module, "WORTH_AN_ORDER", 64)
    config = tiny_target_config()
    params = random_target(config)
    hf.save_target(tmp_path, config, params)
    spec = LongSpec.from_pretrained(tmp_path, "ngram", dtype="float32")
    kernels = [
        leaf
        for leaf in jax.tree.leaves(spec.target_params, is_leaf=is_turned)
        if isinstance(leaf, OutputsFirst)
    ]
    assert len(kernels) == 4 * config.num_layers  # All of attention and MLP.
    whole = dataclasses.replace(spec, target_params=params)
    for tree in ("none", "2,2", None):
        ours, theirs = (
            each.generate([PROMPT], max_new_tokens=12, temperature=1.0, seed=3, tree=tree)
            for each in (spec, whole)
        )
        assert ours.sequences == theirs.sequences


def is_turned(leaf: object) -> bool:
    return isinstance(leaf, OutputsFirst)
