"""The draft in 8 bits: which rows, what is counted as its own, and where its leaves lie."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.drafters.draft import Target, is_large
from longspec_jax.drafters.longspec import load as load_module
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.load import LongSpecOptions, load
from longspec_jax.drafters.longspec.model import LongSpecParams
from longspec_jax.ops.matmul.int8 import Int8Rows, int8_matmul
from longspec_jax.sharding import make_mesh, param_shardings
from longspec_jax.weights.hf import save_draft
from tests.kit import draft_params, random_draft, random_target, tiny_target_config

TARGET = tiny_target_config()
VOCABULARY = jnp.asarray([90, 5, 7, 33, 61, 2, 71])


@pytest.fixture(scope="module")
def params() -> LongSpecParams:
    layer = random_draft(DraftConfig.for_target(TARGET, window=5))
    return draft_params(layer, random_target(TARGET))


def test_rounding_and_restricting_in_either_order(params: LongSpecParams) -> None:
    first, last = (
        params.in_int8().restricted(VOCABULARY),
        params.restricted(VOCABULARY).in_int8(),
    )
    for ours, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    hidden = jax.random.normal(jax.random.key(0), (3, 36))
    whole = params.in_int8().logits(hidden)
    np.testing.assert_allclose(last.logits(hidden), whole[:, VOCABULARY], rtol=1e-5, atol=1e-5)


def test_a_draft_is_rounded_once(params: LongSpecParams) -> None:
    with pytest.raises(ValueError, match="in 8 bits already"):
        params.in_int8().in_int8()


def test_own_leaves_out_what_the_target_has(params: LongSpecParams) -> None:
    def beside_the_layer(params: LongSpecParams) -> int:
        own, layer = (
            sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
            for tree in (params.own_params, params.layer)
        )
        return own - layer

    assert beside_the_layer(params) == 0
    assert beside_the_layer(params.in_int8()) == 101 * 36 + 101 * 4
    assert beside_the_layer(params.restricted(VOCABULARY)) == 7 * 36 * 4 + 7 * 4
    both = params.restricted(VOCABULARY).in_int8()
    assert beside_the_layer(both) == 7 * 36 + 7 * 4 + 7 * 4
    assert params.in_int8().embedding is params.embedding


def test_a_rounded_head_lies_as_the_head_does() -> None:
    mesh = make_mesh(fsdp=2, tp=2)
    table = jax.random.normal(jax.random.key(1), (26, 6))
    head = Int8Rows.of(table)
    placed = jax.device_put(head, param_shardings(mesh, {"head": head})["head"])
    assert placed.steps.sharding.shard_shape((26, 6)) == (13, 3)
    spread = jax.device_put(table, param_shardings(mesh, {"head": table})["head"])
    again = Int8Rows.of(spread)
    jax.tree.map(np.testing.assert_array_equal, again, head)
    hidden = jax.random.normal(jax.random.key(0), (3, 6))
    ours, theirs = int8_matmul(hidden, placed), int8_matmul(hidden, head)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("large", "dtype", "chosen", "expected"),
    [
        (True, "bfloat16", None, True),
        (True, "bfloat16", False, False),
        (True, "float32", None, False),
        (False, "bfloat16", None, False),
        (False, "float32", True, True),
    ],
)
def test_drafts_of_large_targets_in_16_bits_are_read_in_8(
    large: bool,
    dtype: str,
    chosen: bool | None,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing else is asked for; on this CPU no target is a large one."""
    config = tiny_target_config(dtype=dtype)
    target = Target(config, random_target(config))
    assert not is_large(target.params)
    draft = DraftConfig.for_target(config, window=5)
    save_draft(tmp_path, draft, random_draft(draft), target=config)
    monkeypatch.setattr(load_module, "is_large", lambda params: large)
    assert load(tmp_path, target, LongSpecOptions(int8=chosen)).params.int8 is expected
