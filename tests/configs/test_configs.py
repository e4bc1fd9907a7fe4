"""Every shipped configuration and variant: it parses, converts, and its shapes fit."""

import dataclasses
import importlib
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from longspec_jax.config.known import PRESETS, TARGETS
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints import eagle3
from longspec_jax.drafters.checkpoints.longspec import draft_table
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.embedded import demo_target
from longspec_jax.sharding import make_mesh
from longspec_jax.weights.tables import target_table
from tests.kit import each_row
from train.arguments import from_config
from train.config import RunConfig
from train.drafts import dflash, small_lm
from train.drafts.eagle3 import Eagle3Objective, fresh_config
from train.drafts.kinds import DFlashSettings, Eagle3Settings, SmallLMSettings
from train.drafts.longspec import LongSpecObjective
from train.pipeline import with_micro_batches
from train.step import Batch, make_optimizer, state_shardings

SHARED = {"__init__", "common", "paper"}
FOLDER = Path(configs.__path__[0])
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)
INSTALLED = ("qwen_coder", "smollm2")
"""Targets that pip installs, with text that is installed."""
PAPER = [name for name in NAMES if name not in ("demo", "small_scale", *INSTALLED)]
VARIANTS = [(name, variant) for name in PAPER for variant in ("short", "long", "sft")]

TABLE = {
    "vicuna7b": (269.5, 235.9, 15_000, 16384),
    "vicuna13b": (422.1, 369.6, 15_000, 16384),
    "longchat7b": (269.5, 235.9, 15_000, 32768),
    "longchat13b": (422.1, 369.6, 15_360, 16384),
    "llama3_8b_262k": (260.1, 251.7, 30_000, 32768),
    "llama31_8b": (260.1, 251.7, 30_000, 32768),
    "qwq32b_preview": (550.5, 540.0, 30_000, 32768),
    "qwq32b": (550.5, 540.0, 30_000, 32768),
    "qwen3_8b": (234.9, 226.5, 39_000, 32768),
    "qwen3_4b": (127.2, 121.9, 39_000, 32768),
    "qwen3_30b_a3b": (75.5, 73.4, 39_000, 32768),
    "gpt_oss_20b": (78.0, 75.0, 30_000, 32768),
}
"""Stored and live draft parameters in millions, largest offset, long rows: facts of the release;
those of Qwen3 and gpt-oss are counted by hand from the widths in its ``config.json``."""


def load(name: str, *variant: str) -> RunConfig:
    return from_config(importlib.import_module(f"configs.{name}").get_config(*variant).to_dict())


def preset(config: RunConfig) -> TargetConfig:
    return PRESETS[config.target.split("/")[1].lower()]


def count(table: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in table.leaves)


@each_row("name", INSTALLED)
def test_a_draft_of_an_installed_target_learns_text_and_then_answers(name: str) -> None:
    text = load(name)
    assert text.target == text.data.corpus.tokenizer  # type: ignore[union-attr]
    short, long = text.stages
    assert short.seq_len + short.max_offset == long.seq_len and not long.max_offset
    assert 1 <= long.batch * long.seq_len / (short.batch * short.seq_len) <= 2
    for kind in ("parallel", "eagle3"):
        other = load(name, kind)
        assert other.draft.kind == kind and other.data == text.data
        # At equal minutes.
        assert [s.max_seconds for s in other.stages] == [s.max_seconds for s in text.stages]
    assert not other.stages[0].max_offset
    for kind in ("text", "eagle3", "parallel"):
        before, folder = load(name, kind), f"runs/{name}-{kind}".removesuffix("-text")
        answers = load(name, f"{kind}_answers".removeprefix("text_"))
        [stage] = answers.stages
        assert answers.draft == dataclasses.replace(before.draft, init=f"{folder}/draft")
        assert stage.max_offset == before.stages[0].max_offset and answers.target == text.target
        assert answers.data.files == f"{folder}/answers.jsonl" and answers.data.pack
    with pytest.raises(ValueError, match="eagle3, answers, parallel_answers, eagle3_answers"):
        load(name, "short")


def test_the_eagle3_draft_of_smollm2_fits_into_a_package() -> None:
    """As a file in 16 bits: it has no table of its own."""
    settings = load("smollm2", "eagle3").draft
    assert isinstance(settings, Eagle3Settings) and not settings.own_head
    target = TargetConfig(
        architecture="LlamaForCausalLM", vocab_size=49_152, model_width=576, mlp_width=1536,
        num_layers=30, num_heads=9, num_kv_heads=3, head_width=64, max_positions=8192,
    )  # fmt: skip
    draft = fresh_config(settings, target, 8192)
    assert 2 * count(eagle3.draft_table(draft, embedding=False, head=False)) == 8_851_968
    others = load("qwen_coder", "eagle3").draft
    assert isinstance(others, Eagle3Settings) and others.own_head and others.vocabulary == 32_000


def test_every_known_target_has_a_configuration() -> None:
    assert set(PAPER) == set(TABLE)
    assert {preset(load(name)) for name in PAPER} == set(PRESETS.values())


def test_a_target_has_one_name() -> None:
    """``--config=llama31_8b`` and ``--shape=llama31-8b`` are the same one."""
    for name in PAPER:
        short = name.replace("_", "-").removesuffix("-262k")
        assert load(name).target == TARGETS[short].repository


@each_row("variant", ["draft", "eagle3", "dflash", "small_lm"])
def test_the_demos_draft_by_itself_is_for_its_target(variant: str) -> None:
    config = load("demo", variant)
    assert config.pretraining is None and config.target == str(demo_target())
    if variant != "small_lm":
        assert all(stage.steps and not stage.max_seconds for stage in config.stages)
    assert config.draft.kind == ("longspec" if variant == "draft" else variant)


@each_row("variant", ["full", "smoke", "tiny"])
def test_the_demo_variants_convert(variant: str) -> None:
    config = load("demo", variant)
    assert config.pretraining is not None and config.data.corpus is not None
    assert [stage.name for stage in config.stages] == ["short", "long"]
    longest = max(stage.seq_len + stage.max_offset for stage in config.stages)
    assert longest <= config.pretraining.shape.max_positions


@each_row("prefix", ["", "tiny_"])
def test_the_drafts_of_the_study_differ_in_one_thing(prefix: str) -> None:
    """From the plain one: a setting of the draft, or for ``long_only`` its stages."""
    target = load("small_scale", f"{prefix}target")
    assert target.pretraining is not None and not target.stages
    plain = load("small_scale", f"{prefix}plain")
    assert not plain.draft.anchor_offset and plain.data.begin_rows
    longest = max(stage.seq_len + stage.max_offset for stage in plain.stages)
    assert longest <= target.pretraining.shape.max_positions
    offset = load("small_scale", f"{prefix}offset")
    assert dataclasses.replace(offset.draft, anchor_offset=False) == plain.draft
    changed = {
        "offset0": {"max_sinks": 0}, "shift1": {"max_shift": 1}, "distilled": {"distillation": 1.0}
    }  # fmt: skip
    for variant, change in changed.items():
        other = load("small_scale", f"{prefix}{variant}")
        assert other == dataclasses.replace(
            offset, draft=dataclasses.replace(offset.draft, **change)
        )
    alone = load("small_scale", f"{prefix}long_only")
    assert alone.draft == offset.draft and [stage.name for stage in alone.stages] == ["long"]


@each_row("variant", ["parallel", "eagle3", "small_lm"])
def test_drafts_of_other_kinds_have_a_miniature(variant: str) -> None:
    config = load("small_scale", f"tiny_{variant}")
    target = load("small_scale", "tiny_target")
    assert target.pretraining is not None
    shape = target.pretraining.shape
    assert config.draft.kind == variant
    longest = max(stage.seq_len + stage.max_offset for stage in config.stages)
    assert longest <= shape.max_positions
    if isinstance(config.draft, Eagle3Settings):
        assert fresh_config(config.draft, shape, longest).proposable == 256
        assert not any(stage.max_offset for stage in config.stages)
    if isinstance(config.draft, SmallLMSettings):
        assert small_lm.fresh_config(config.draft, shape).vocab_size == shape.vocab_size
        assert not any(stage.max_offset for stage in config.stages)


def test_the_demos_small_model_is_small_and_reads_the_demos_tokens() -> None:
    config, demo = load("demo", "small_lm"), load("demo")
    assert demo.pretraining is not None and isinstance(config.draft, SmallLMSettings)
    assert config.data.corpus is not None
    target = demo.pretraining.shape
    small = small_lm.fresh_config(config.draft, target)
    assert 1e6 < count(target_table(small)) < 1.5e6
    assert max(stage.seq_len for stage in config.stages) == target.max_positions
    assert (FOLDER.parent / config.data.corpus.tokenizer / "tokenizer.json").is_file()


@each_row(("name", "variant"), VARIANTS)
def test_the_papers_stages(name: str, variant: str) -> None:
    config = load(name, variant)
    [stage] = config.stages
    assert stage.name == variant and stage.epochs == 1 and not stage.steps
    short = variant == "short"
    assert (stage.batch, stage.learning_rate) == ((2048, 5e-4) if short else (256, 5e-6))
    assert stage.seq_len == (1024 if short else TABLE[name][3])
    assert stage.max_offset == (TABLE[name][2] if short else 0)
    assert stage.max_offset + stage.seq_len <= preset(config).max_positions
    assert config.data.mask_prompts == (variant == "sft")
    assert config.draft.max_shift == 4 and config.draft.window == 512
    earlier = {"short": "", "long": f"runs/{name}-short/draft", "sft": f"runs/{name}-long/draft"}
    assert config.draft.init == earlier[variant]
    qwen = preset(config).architecture.startswith("Qwen")
    assert ("<|im_start|>" in config.data.turn) == qwen
    if variant == "sft":
        assert ("long_cot" in config.data.hub) == (qwen or name == "gpt_oss_20b")


@each_row("name", PAPER)
def test_all_stages_are_those_that_have_runs_of_their_own(name: str) -> None:
    """In the order of the paper, each with its data; only the draft between them is handed on."""
    assert load(name) == load(name, "all")
    parts = load(name).runs_of_stages()
    assert [part.stages[0].name for part in parts] == ["short", "long", "sft"]
    for part in parts:
        alone = load(name, part.stages[0].name)
        same = {"draft": part.draft}
        steps = {"save_every": part.save_every, "accept_every": part.accept_every}
        assert part == dataclasses.replace(alone, **same, **steps)


@pytest.mark.full
@each_row("name", PAPER)
def test_every_target_has_an_eagle3_draft(name: str) -> None:
    """Of conversations in the target's own format; only their answers are learned."""
    config = load(name, "eagle3")
    [stage] = config.stages
    assert isinstance(config.draft, Eagle3Settings) and config.draft.steps == 7
    assert config.data.mask_prompts and not stage.max_offset
    target = preset(config)
    draft = fresh_config(config.draft, target, stage.seq_len)
    assert draft.proposable == 32_000 and draft.max_positions == stage.seq_len == 4096
    if target.architecture.startswith("Qwen"):
        assert config.data.turn.startswith("<|im_start|>")
    elif "llama3" in name:
        assert config.data.turn.endswith("<|eot_id|>")
    objective = Eagle3Objective(target, draft, config.draft.steps, config.draft.decay, 8192)
    mesh = make_mesh(*config.mesh.resolve(8))
    state = state_shardings(mesh, objective, make_optimizer(config.optimizer))
    assert state.params["head"].spec == jax.sharding.PartitionSpec("tp", ("data", "fsdp"))
    rows = stage.batch // with_micro_batches(stage, mesh).accumulation
    assert rows * stage.seq_len == 8 * 16384


@pytest.mark.full
@each_row("name", PAPER)
def test_every_target_has_a_dflash_draft(name: str) -> None:
    """On the conversations of its EAGLE-3 draft, with as many blocks in a row as published."""
    config, chats = load(name, "dflash"), load(name, "eagle3")
    assert isinstance(config.draft, DFlashSettings) and config.data == chats.data
    [stage], target = config.stages, preset(config)
    assert (stage.seq_len, stage.learning_rate, stage.epochs) == (4096, 6e-4, 6)
    assert stage.seq_len // config.draft.anchor_every == 512 and config.optimizer.clip == 1.0
    draft = dflash.fresh_config(config.draft, target)
    assert draft.trunk.num_layers == 5 and draft.tokens == 15
    assert draft.features[0] == 1 and draft.features[-1] == target.num_layers - 3
    objective = dflash.DFlashObjective(target, draft, 8, 7.0, 8192)
    mesh = make_mesh(*config.mesh.resolve(8))
    state = state_shardings(mesh, objective, make_optimizer(config.optimizer))
    fuse = state.params["fuse"]["kernel"]
    assert fuse.spec == jax.sharding.PartitionSpec(None, ("data", "fsdp"))


@pytest.mark.full
@each_row("name", PAPER)
def test_every_target_has_a_small_model(name: str) -> None:
    """Of its vocabulary: full rows of text, then the conversations of its EAGLE-3 draft."""
    config, chats, target = load(name, "small_lm"), load(name, "eagle3"), preset(load(name))
    assert isinstance(config.draft, SmallLMSettings)
    text, chat = config.stages
    assert (text.name, chat.name) == ("text", "chat") and chat.data == chats.data
    assert text.data is not None and text.data.pack and not text.data.mask_prompts
    draft = small_lm.fresh_config(config.draft, target)
    assert count(target_table(draft)) < 260e6
    objective, mesh = small_lm.SmallLMObjective(target, draft, 0.9, 1), make_mesh(fsdp=8)
    state = state_shardings(mesh, objective, make_optimizer(config.optimizer))
    assert state.params["embedding"].spec == jax.sharding.PartitionSpec("tp", ("data", "fsdp"))
    for stage in config.stages:
        rows = stage.batch // with_micro_batches(stage, mesh).accumulation
        assert rows * stage.seq_len == 8 * 16384


@each_row("name", PAPER)
def test_a_parallel_draft_is_trained_in_the_same_stages(name: str) -> None:
    config, usual = load(name, "parallel"), load(name)
    assert config.draft.kind == "parallel"
    assert config == dataclasses.replace(usual, draft=config.draft)


def test_the_demos_parallel_draft_is_trained_as_its_draft() -> None:
    config, usual = load("demo", "parallel"), load("demo", "draft")
    assert config.draft.kind == "parallel"
    assert config == dataclasses.replace(usual, draft=config.draft)


@each_row("devices", [1, 2, 8])
@each_row("name", ["vicuna7b", "qwq32b"])
def test_micro_batches_follow_the_devices(name: str, devices: int) -> None:
    mesh = make_mesh(*load(name).mesh.resolve(devices))
    for stage in load(name).stages:
        settled = with_micro_batches(stage, mesh)
        tokens = stage.batch // settled.accumulation // devices * stage.seq_len
        assert tokens == max(16384, stage.seq_len)


def test_data_that_no_stage_would_read_are_refused() -> None:
    for field, value in (("files", "mine.jsonl"), ("pack", True), ("turn", "{content}")):
        config = importlib.import_module("configs.vicuna7b").get_config().to_dict()
        config["data"][field] = value
        refusal = f"--config.data.{field} is read by no stage.*short.data.{field}.*NAME:short"
        with pytest.raises(ValueError, match=refusal):
            from_config(config)


@each_row("name", PAPER)
def test_the_docstring_says_how_and_what_to_expect(name: str) -> None:
    text = importlib.import_module(f"configs.{name}").__doc__ or ""
    assert f"python -m train.run --config=configs/{name}.py\n" in text
    for variant in ("all", "short", "long", "sft", f"--config={name}:short"):
        assert f"``{variant}``" in text
    assert "An estimate" in text and "Hardware" in text


@each_row("name", PAPER)
def test_drafts_have_the_published_size(name: str) -> None:
    target = preset(load(name))
    table = draft_table(DraftConfig.for_target(target))
    dead = sum(math.prod(shape) for shape in table.dead.values())
    live = count(table)
    assert (live + dead) / 1e6 == pytest.approx(TABLE[name][0], abs=0.05)
    # The published figure leaves the biases of the living projections out.
    assert live / 1e6 == pytest.approx(TABLE[name][1], abs=0.06)
    # Three norms; query and output twice; self-attention's key and value; the MLP.
    q, kv = (n * target.head_width for n in (target.num_heads, target.num_kv_heads))
    d = target.model_width
    weights = 3 * d + 4 * d * q + 2 * d * kv + 3 * d * target.mlp_width
    assert live == weights + 2 * q + 2 * kv and dead == 2 * kv * (d + 1)


def abstract(table: Any, dtype: str) -> dict[str, Any]:
    """A parameter tree of shapes."""
    tree: dict[str, Any] = {}
    for leaf in table.leaves:
        *parents, last = leaf.path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype))
    return tree


@pytest.mark.full
@each_row("name", PAPER)
@each_row("variant", ["short", "long"])
def test_a_micro_batch_fits_the_shapes(name: str, variant: str) -> None:
    config = load(name, variant)
    [stage] = config.stages
    # All layers are alike: two of them show what the others would.
    whole = preset(config)
    target = dataclasses.replace(whole, num_layers=2, pattern=whole.pattern[:2])
    draft = DraftConfig.for_target(target, window=config.draft.window)
    objective = LongSpecObjective(target, draft, config.draft, stage.max_offset, 8192)
    params = jax.eval_shape(objective.initialize, jax.random.key(0))
    mesh = make_mesh(*config.mesh.resolve(8))
    rows = (1, stage.batch // with_micro_batches(stage, mesh).accumulation)
    draws = jax.eval_shape(lambda key: objective.draw(key, rows, stage.seq_len), jax.random.key(0))
    micro = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), draws)
    shape = (rows[1], stage.seq_len)
    batch = Batch(jax.ShapeDtypeStruct(shape, np.int32), jax.ShapeDtypeStruct(shape, np.float32))
    frozen = abstract(target_table(target), target.dtype)
    sums = jax.eval_shape(objective.sums, params, frozen, batch, micro)
    assert {name: leaf.shape for name, leaf in sums.items()} == {"loss": ()}
    assert all(leaf.dtype == jnp.float32 for leaf in sums.values())

    # Masters, optimiser and rows spread over eight devices, as the configuration says.
    state = state_shardings(mesh, objective, make_optimizer(config.optimizer))
    assert mesh.shape["fsdp"] == 8 and rows[1] % 8 == 0 and config.accept_rows % 8 == 0
    assert jax.tree.structure(state.params) == jax.tree.structure(params)


def test_an_unknown_variant_names_the_known_ones() -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match=f"{name} has no variant 'huge'; choose one of .*"):
            load(name, "huge")
