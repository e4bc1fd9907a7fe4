"""The folded draft: the layer itself but for rounding, and which drafts are folded."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.longspec import folded as module
from longspec_jax.drafters.longspec import load as load_module
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.folded import foldable
from longspec_jax.drafters.longspec.load import LongSpecDraft, load
from longspec_jax.drafters.longspec.model import LongSpecParams
from longspec_jax.drafters.longspec.options import LongSpecOptions
from longspec_jax.ops.placement import tree_bytes
from longspec_jax.sharding import make_mesh
from longspec_jax.weights.hf import save_draft
from tests.kit import draft_params, random_draft, random_target, relative_error, tiny_target_config

TARGET = tiny_target_config()
CONFIG = DraftConfig.for_target(TARGET, window=5)
FIRST = jnp.asarray([7, 3])
TOKENS = jax.random.randint(jax.random.key(3), (2, 4), 0, TARGET.vocab_size)


@pytest.fixture(scope="module")
def params() -> LongSpecParams:
    return draft_params(random_draft(CONFIG), random_target(TARGET))


def level(params: LongSpecParams, config: DraftConfig = CONFIG) -> jax.Array:
    """What the LM head reads of a level at depth 2, its attentions being any functions."""

    def attend_self(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        groups = q.shape[2] // k.shape[2]
        return q + jnp.repeat(jnp.tanh(k) * v, groups, axis=2)

    run = params.levels(config, FIRST, 4)
    return run(2, TOKENS, attend_self, lambda q: jnp.sin(q) + q[:, ::-1])


def test_it_is_the_layer_but_for_rounding(params: LongSpecParams) -> None:
    folded = params.folded(CONFIG)
    assert folded.int8 and folded.is_folded and not params.in_int8().is_folded
    assert 0 < relative_error(level(folded), level(params)) < 0.02
    positions = FIRST[:, None] + jnp.arange(4)
    ours, theirs = (each.keys_values(CONFIG, TOKENS, positions) for each in (folded, params))
    for found, expected in zip(ours, theirs, strict=True):
        assert 0 < relative_error(found, expected) < 0.005
    np.testing.assert_array_equal(folded.head.steps, params.in_int8().head.steps)


def test_a_draft_is_folded_once(params: LongSpecParams) -> None:
    with pytest.raises(ValueError, match="in 8 bits already"):
        params.folded(CONFIG).folded(CONFIG)
    with pytest.raises(ValueError, match="in 8 bits already"):
        params.in_int8().folded(CONFIG)


def test_tables_that_the_kernels_could_not_count_are_refused(
    params: LongSpecParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = max(
        part["bias"].size for part in (params.layer["self_qkv"]["fused"], params.layer["cross_q"])
    )
    assert foldable(params.layer, (2**31 - 1) // most)
    assert not foldable(params.layer, (2**31 - 1) // most + 1)
    monkeypatch.setattr(module, "MOST_ELEMENTS", 101 * most - 1)
    with pytest.raises(ValueError, match=f"have {101 * most} elements, .* up to {101 * most - 1};"):
        params.folded(CONFIG)


@pytest.mark.parametrize(
    ("large", "chosen", "expected"),
    [
        (True, {}, True),
        (True, dict(int8=True), True),
        (True, dict(int8=False), False),
        (True, dict(folded=False), False),
        (False, {}, False),
        (False, dict(int8=True), False),
        (False, dict(folded=True), True),
    ],
)
def test_drafts_of_large_targets_are_folded(
    large: bool,
    chosen: dict[str, bool],
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing else is asked for."""
    config = tiny_target_config(dtype="bfloat16")
    target = Target(config, random_target(config))
    draft = DraftConfig.for_target(config, window=5)
    save_draft(tmp_path, draft, random_draft(draft), target=config)
    monkeypatch.setattr(load_module, "is_large", lambda params: large)
    monkeypatch.setattr(load_module, "free_device_bytes", lambda devices: 10**9)
    loaded = load(tmp_path, target, LongSpecOptions(**chosen)).params
    assert loaded.is_folded is expected
    assert loaded.int8 is (chosen.get("int8", large) or expected)


@pytest.mark.parametrize(
    ("free", "expected"), [(20, True), (19.9, False), pytest.param(None, False, id="unknown")]
)
def test_tables_nobody_asked_for_leave_room_for_contexts(
    free: float | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_target_config(dtype="bfloat16")
    target = Target(config, random_target(config))
    draft = DraftConfig.for_target(config, window=5)
    layer = random_draft(draft)
    save_draft(tmp_path, draft, layer, target=config)
    tables = sum(module.table_bytes(layer, config.vocab_size))
    folded = LongSpecParams.beside(target.params, layer).folded(draft)
    assert isinstance(folded.layer, module.FoldedLayer)
    assert tables == folded.layer.heads.steps.nbytes + folded.layer.queries.steps.nbytes

    monkeypatch.setattr(load_module, "is_large", lambda params: True)
    monkeypatch.setattr(load_module, "free_device_bytes", lambda _: free and int(free * tables))
    options = LongSpecOptions(), LongSpecOptions(folded=True)
    chosen = [load_module._bits_and_folding(each, target, layer, None) for each in options]
    assert chosen == [(True, expected), (True, True)]


def test_who_does_not_fold_asks_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job of several processes a device may be another one's, and not say what is free."""
    monkeypatch.setattr(load_module, "free_device_bytes", lambda _: pytest.fail("asked"))
    target, layer = Target(TARGET, random_target(TARGET)), random_draft(CONFIG)
    for options in (LongSpecOptions(), LongSpecOptions(int8=True), LongSpecOptions(folded=False)):
        assert not load_module._bits_and_folding(options, target, layer, None)[1]
    monkeypatch.setattr(load_module, "pays_in_int8", lambda target: True)
    found = load_module._bits_and_folding(LongSpecOptions(), target, layer, make_mesh(tp=2))
    assert found == (True, False)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    target = Target(TARGET, random_target(TARGET))
    save_draft(tmp_path, CONFIG, random_draft(CONFIG), target=TARGET)
    with pytest.raises(ValueError, match="a folded draft is one in 8 bits"):
        LongSpecOptions(int8=False, folded=True)
    options = LongSpecOptions(folded=True)
    with pytest.raises(ValueError, match="a folded draft is for one device"):
        load(tmp_path / "before it is looked for", target, options, mesh=make_mesh(tp=1))
    bind = LongSpecDraft.bind
    with pytest.raises(ValueError, match="a folded draft is for one device"):
        bind(CONFIG, random_draft(CONFIG), target.params, folded=True, mesh=make_mesh(tp=1))


def test_its_own_are_tables_and_head(params: LongSpecParams) -> None:
    folded = params.folded(CONFIG)
    assert isinstance(folded.layer, module.FoldedLayer)
    tables = sum(module.table_bytes(params.layer, TARGET.vocab_size))
    leaves = {id(leaf) for leaf in jax.tree.leaves(folded.own)}
    assert id(folded.layer.heads.steps) in leaves and id(folded.embedding) not in leaves
    assert tree_bytes(folded.own) > tables + folded.head.steps.nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits(dtype: str) -> None:
    config = tiny_target_config(dtype=dtype)
    draft = DraftConfig.for_target(config, window=5)
    whole = draft_params(random_draft(draft), random_target(config))
    found, exact = level(whole.folded(draft), draft), level(whole, draft)
    assert found.dtype == exact.dtype == jnp.dtype(dtype)
    assert relative_error(found, np.float64(exact)) < 0.03
