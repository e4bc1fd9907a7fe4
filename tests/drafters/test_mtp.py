"""MTP layers: chains equal PyTorch's layers, and the published files."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax import LongSpec
from longspec_jax.config.layers import YarnRopeScaling
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.eagle3.load import Eagle3Draft
from longspec_jax.drafters.mtp.load import MIMO, SPECULATORS, Dialect, load, save
from longspec_jax.drafters.mtp.model import MtpConfig, MtpParams
from longspec_jax.drafters.registry import MTP, SMALL_LM
from longspec_jax.loading import choose_drafts
from longspec_jax.weights.hf import load_target, save_target
from tests.decoding.lossless import CONFIG
from tests.drafters.kit import assert_partitioned, assert_same_files, edit, random_tree
from tests.drafters.test_eagle import _chain
from tests.kit import normal, random_target, relative_error

torch: Any = pytest.importorskip("torch", reason="the oracle is PyTorch's")
transformers: Any = pytest.importorskip("transformers")
TARGETS: dict[str, TargetConfig] = {
    "mimo": replace(CONFIG, architecture="MiMoForCausalLM", qkv_bias=True),
    "speculators": replace(CONFIG, rope_theta=5e5),
}
DIALECTS: dict[str, Dialect] = {"mimo": MIMO, "speculators": SPECULATORS}
CLASSES = {"mimo": ("Qwen2", "qwen2"), "speculators": ("Qwen3", "qwen3")}


def config_for(target: TargetConfig, dialect: Dialect) -> MtpConfig:
    """A layer as wide as the target's; alone it has another MLP and norms of heads."""
    alone = not dialect.beside_target
    return MtpConfig(
        model_width=target.model_width,
        target_width=target.model_width,
        mlp_width=29 if alone else target.mlp_width,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_width=target.head_width,
        vocab_size=target.vocab_size,
        proposable=target.vocab_size,
        features=(target.num_layers,),
        max_positions=target.max_positions,
        rope_theta=target.rope_theta,
        norm_eps=target.norm_eps,
        dtype=target.dtype,
        qkv_bias=not alone,
        qk_norm=alone,
        normed_head=False,
        fuse_bias=False,
        hidden_first=dialect.hidden_first,
    )


def random_draft(name: str, model: Any) -> Eagle3Draft:
    """Random parameters, in which every tensor matters."""
    dialect = DIALECTS[name]
    config = config_for(TARGETS[name], dialect)
    layer = random_tree(dialect.table(config), config.dtype, 6)
    params = MtpParams.bound(layer, config, TARGETS[name], model)
    return Eagle3Draft(config, params, stored=dialect, name="mtp")


def config_of(draft: Eagle3Draft) -> MtpConfig:
    """The configuration of a draft, whose declared type is that of all EAGLE drafts."""
    config: Any = draft.config
    return config


MODELS = {name: random_target(target) for name, target in TARGETS.items()}
GIVEN = {name: Target(TARGETS[name], MODELS[name]) for name in TARGETS}
DRAFTS = {name: random_draft(name, MODELS[name]) for name in TARGETS}


class Oracle(torch.nn.Module):
    """The layer as its trainers build it, of transformers' layers."""

    def __init__(self, name: str, config: MtpConfig) -> None:
        super().__init__()
        prefix, module = CLASSES[name]
        modeling = (
            getattr(transformers.models, module).modeling_qwen2
            if name == "mimo"
            else (getattr(transformers.models, module).modeling_qwen3)
        )
        shape = getattr(transformers, f"{prefix}Config")(
            vocab_size=config.vocab_size,
            hidden_size=config.model_width,
            intermediate_size=config.mlp_width,
            num_hidden_layers=1,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_width,
            rms_norm_eps=config.norm_eps,
            rope_parameters=dict(rope_type="default", rope_theta=config.rope_theta),
            attn_implementation="eager",
        )
        width, norm = config.model_width, getattr(modeling, f"{prefix}RMSNorm")
        self.layer = getattr(modeling, f"{prefix}DecoderLayer")(shape, 0)
        self.rotary = getattr(modeling, f"{prefix}RotaryEmbedding")(shape)
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            norm(width, eps=config.norm_eps) for _ in range(3)
        )
        self.input_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.hidden_first = config.hidden_first

    def forward(self, embedded: Any, hidden: Any) -> Any:
        parts = [self.token_layernorm(embedded), self.hidden_layernorm(hidden)]
        x = self.input_proj(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        length = x.shape[1]
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        angles = self.rotary(x, torch.arange(length)[None])
        x = self.layer(x, attention_mask=mask, position_embeddings=angles)
        return self.final_layernorm(x[0] if isinstance(x, tuple) else x)

    def read(self, folder: Path, prefix: str) -> None:
        """Take the stored tensors; every one of them, and no other."""
        own = "token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj"
        state = {}
        for stored, value in load_file(folder / "model.safetensors").items():
            if stored.startswith(prefix):
                name = stored.removeprefix(prefix)
                name = name if name.startswith(own) else f"layer.{name}"
                state[name] = torch.from_numpy(value)
        self.load_state_dict(state)


@pytest.mark.parametrize("name", DRAFTS)
def test_chains_equal_pytorch(name: str, tmp_path: Path) -> None:
    """Of the stored tensors: order of the projection, norms, positions, what is fed back."""
    draft, config = DRAFTS[name], TARGETS[name]
    save(tmp_path, draft, GIVEN[name])
    random = np.random.default_rng(7)
    text, following = (random.integers(0, config.vocab_size, (1, n)) for n in (9, 3))
    hidden = normal(8, 1, 8, config.model_width)
    drafter: Any = draft.drafter(TreeConfig((1, 1, 1)))
    given = text.astype(np.int32), hidden, following.astype(np.int32)
    found = _chain(drafter, Params(None, draft.params), *given)
    oracle: Any = Oracle(name, config_of(draft))
    oracle.read(tmp_path, DIALECTS[name].prefix)
    table, head = (torch.from_numpy(np.array(MODELS[name][each])) for each in ("embedding", "head"))
    features, behind = torch.from_numpy(np.array(hidden)), [*text[0, 1:]]
    with torch.no_grad():
        for step in range(3):
            out = oracle(table[torch.tensor(behind)][None], features)[:, -1:]
            np.testing.assert_allclose(found[step], (out @ head.T)[:, 0], atol=2e-4, rtol=1e-4)
            features = torch.cat([features, out], dim=1)
            behind.append(following[0, step])
    rounded = _chain(drafter, Params(None, draft.params.in_int8()), *given)
    assert 0 < relative_error(rounded[0], found[0]) < 0.1


@pytest.mark.parametrize("name", DRAFTS)
def test_files_in_and_out(name: str, tmp_path: Path) -> None:
    """Called as published; MiMo's lie among the target's, which loads without them."""
    draft, target = DRAFTS[name], GIVEN[name]
    save(tmp_path / "one", draft, target)
    stored = load_file(tmp_path / "one" / "model.safetensors")
    prefix, width = DIALECTS[name].prefix, draft.config.model_width
    own = {each for each in stored if each.startswith(prefix)}
    norms = {"q_norm.weight", "k_norm.weight"} if name == "speculators" else set()
    biases = set() if name == "speculators" else {f"{each}_proj.bias" for each in "qkv"}
    assert {each.removeprefix(prefix) for each in own} == {
        *(f"{kind}_layernorm.weight" for kind in ("token", "hidden", "final", "input")),
        *("post_attention_layernorm.weight", "input_proj.weight"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"self_attn.{each}" for each in norms | biases),
    }
    assert stored[f"{prefix}input_proj.weight"].shape == (width, 2 * width)
    [chosen] = choose_drafts([tmp_path / "one"], {"window": 64})
    assert chosen.kind is MTP
    found = load(tmp_path / "one", target)
    assert found.config == draft.config and found.drafter(TreeConfig()).name == found.name == "mtp"
    jax.tree.map(np.testing.assert_array_equal, found.params, draft.params)
    save(tmp_path / "two", found, target)
    assert_same_files(tmp_path / "one", tmp_path / "two")
    assert_partitioned(found.params.in_int8().layer)
    with pytest.raises(ValueError, match="in 8 bits"):
        save(tmp_path / "two", replace(found, params=found.params.in_int8()), target)


def test_target_and_draft_are_one_folder(tmp_path: Path) -> None:
    """And a MiMo without its MTP layer still is a small model for another target."""
    save(tmp_path / "both", DRAFTS["mimo"], GIVEN["mimo"])
    published = {"auto_map": {"AutoModel": "modeling_mimo.Model"}, "use_sliding_window": False}
    edit(tmp_path / "both", **published)
    spec = LongSpec.from_pretrained(tmp_path / "both", tmp_path / "both", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, spec.target_params, MODELS["mimo"])
    assert spec.target_config == TARGETS["mimo"] and [each.name for each in spec.drafts] == ["mtp"]
    save_target(tmp_path / "alone", TARGETS["mimo"], MODELS["mimo"])
    [chosen] = choose_drafts([tmp_path / "alone"], {})
    assert chosen.kind is SMALL_LM


def test_a_mimo_is_a_qwen2_of_other_name(tmp_path: Path) -> None:
    """The file of one is that of the other, but for the class that it names."""
    save_target(tmp_path, TARGETS["mimo"], MODELS["mimo"])
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    assert (raw["architectures"], raw["model_type"]) == (["MiMoForCausalLM"], "mimo")
    named = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    file.write_text(json.dumps({**raw, **named, "attention_bias": None}))
    config, params = load_target(tmp_path, dtype="float32")
    assert replace(config, architecture="MiMoForCausalLM") == TARGETS["mimo"]
    jax.tree.map(np.testing.assert_array_equal, params, MODELS["mimo"])


def _edited(folder: Path, raw: dict[str, Any], renamed: tuple[str, str] = ("", "")) -> Path:
    """The folder with other keys, and other beginnings of names."""
    (old, new), weights = renamed, edit(folder, **raw) / "model.safetensors"
    tensors = load_file(weights)
    save_file({re.sub(f"^{old}", new, name): value for name, value in tensors.items()}, weights)
    return folder


NOT_COMPUTED = "has experts or a gate beside its attention"
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, str], str]] = {
    "Qwen3-Next": ("mimo", {}, (re.escape(MIMO.prefix), "mtp."), NOT_COMPUTED),
    "GLM-4.5": (
        *("mimo", {}, (re.escape(f"{MIMO.prefix}input_proj"), "model.layers.4.eh_proj")),
        NOT_COMPUTED,
    ),
    "published without": ("mimo", {}, (re.escape(MIMO.prefix), "model.layers.9."), "no MTP layer"),
    "two layers": ("mimo", {"num_nextn_predict_layers": 2}, ("", ""), "one layer for all levels"),
    "another class": (
        *("speculators", {"transformer_layer_config": {"model_type": "qwen3_next"}}, ("", "")),
        "only 'qwen3'",
    ),
    "an own embedding": (
        *("mimo", {}, (re.escape(f"{MIMO.prefix}token_"), f"{MIMO.prefix}other_")),
        "missing model.mtp_layers.0.token_layernorm.weight",
    ),
    "a window": (
        "mimo",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        ("", ""),
        "an MTP layer with a window is not computed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, tmp_path: Path) -> None:
    name, raw, renamed, words = REFUSED[case]
    save(tmp_path, DRAFTS[name], GIVEN[name])
    with pytest.raises(ValueError, match=re.escape(words)):
        load(_edited(tmp_path, raw, renamed), GIVEN[name])


def test_layers_of_another_target_are_refused(tmp_path: Path) -> None:
    draft, target = DRAFTS["speculators"], GIVEN["speculators"]
    save(tmp_path, draft, target)
    for changed, words in (
        ({"model_width": 40}, "target of hidden_size=36, the target has hidden_size=40"),
        ({"vocab_size": 103}, "target of vocab_size=101, the target has vocab_size=103"),
    ):
        with pytest.raises(ValueError, match=words):
            load(tmp_path, Target(replace(target.config, **changed), target.params))
    yarn = YarnRopeScaling.usual(2.0, 64)
    stretched = replace(DRAFTS["mimo"], config=replace(DRAFTS["mimo"].config, rope_scaling=yarn))
    with pytest.raises(ValueError, match="differs from its target's in rope_scaling"):
        save(tmp_path, stretched, GIVEN["mimo"])
