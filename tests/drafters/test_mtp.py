"""MTP layers: chains equal PyTorch's layers, of files as they are published."""

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
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.checkpoints.mtp import load
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.eagle import MtpConfig, MtpParams
from longspec_jax.drafters.registry import MTP, SMALL_LM
from longspec_jax.loading import choose_drafts
from longspec_jax.weights.hf import load_target, save_target
from tests.decoding.lossless import CONFIG
from tests.drafters.kit import assert_holds, assert_partitioned, drawn, llama_layer, publish
from tests.drafters.test_eagle import _chain
from tests.kit import normal, random_target, relative_error

torch: Any = pytest.importorskip("torch", reason="the oracle is PyTorch's")
transformers: Any = pytest.importorskip("transformers")
TARGETS: dict[str, TargetConfig] = {
    "mimo": replace(CONFIG, architecture="MiMoForCausalLM", qkv_bias=True),
    "speculators": replace(CONFIG, rope_theta=5e5),
}
PREFIXES = {"mimo": "model.mtp_layers.0.", "speculators": "mtp_layers.0."}
CLASSES = {"mimo": ("Qwen2", "qwen2"), "speculators": ("Qwen3", "qwen3")}


def config_for(name: str) -> MtpConfig:
    """A layer as wide as the target's; alone it has another MLP and norms of heads."""
    target, alone = TARGETS[name], name == "speculators"
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
        hidden_first=not alone,
    )


MODELS = {name: random_target(target) for name, target in TARGETS.items()}
GIVEN = {name: Target(TARGETS[name], MODELS[name]) for name in TARGETS}


def published(folder: Path, name: str, **raw: Any) -> dict[str, np.ndarray]:
    """A layer as its trainers leave it, MiMo's with its target; returns its random tensors.

    Args:
      raw: other keys of ``config.json``.
    """
    config = config_for(name)
    shapes, layer = llama_layer(config)
    for kind in ("token", "hidden", "final", "input"):
        shapes[f"{kind}_layernorm.weight"] = (config.model_width,)
    shapes["input_proj.weight"] = config.model_width, 2 * config.model_width
    keys: dict[str, Any] = {"num_nextn_predict_layers": 1}
    if name == "mimo":
        save_target(folder, TARGETS[name], MODELS[name])
    else:
        keys |= {
            "architectures": ["MTPDraftModel"],
            "speculators_config": {"algorithm": "mtp", "proposal_methods": []},
            "speculators_model_type": "mtp",
            "torch_dtype": "float32",
            "transformer_layer_config": layer | {"model_type": "qwen3", "rope_theta": 5e5},
        }
    tensors = drawn({f"{PREFIXES[name]}{each}": shape for each, shape in shapes.items()})
    publish(folder, tensors, keys | raw)
    return tensors


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

    def read(self, tensors: dict[str, np.ndarray], prefix: str) -> None:
        """Take the stored tensors; every one of them, and no other."""
        own = "token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj"
        state = {}
        for stored, value in tensors.items():
            name = stored.removeprefix(prefix)
            name = name if name.startswith(own) else f"layer.{name}"
            state[name] = torch.from_numpy(value)
        self.load_state_dict(state)


@pytest.mark.parametrize("name", TARGETS)
def test_chains_equal_pytorch(name: str, tmp_path: Path) -> None:
    """Of the stored tensors: order of the projection, norms, positions, what is fed back."""
    config, tensors = TARGETS[name], published(tmp_path, name)
    draft = load(tmp_path, GIVEN[name])
    random = np.random.default_rng(7)
    text, following = (random.integers(0, config.vocab_size, (1, n)) for n in (9, 3))
    hidden = normal(8, 1, 8, config.model_width)
    drafter: Any = draft.drafter(TreeConfig((1, 1, 1)))
    given = text.astype(np.int32), hidden, following.astype(np.int32)
    found = _chain(drafter, Params(None, draft.params), *given)
    oracle: Any = Oracle(name, config_for(name))
    oracle.read(tensors, PREFIXES[name])
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


@pytest.mark.parametrize("name", TARGETS)
def test_files_as_published(name: str, tmp_path: Path) -> None:
    """MiMo's lie among the target's, which loads without them."""
    tensors = published(tmp_path, name)
    [chosen] = choose_drafts([tmp_path], {"window": 64})
    assert chosen.kind is MTP
    found = load(tmp_path, GIVEN[name])
    assert found.config == config_for(name) and isinstance(found.params, MtpParams)
    assert found.drafter(TreeConfig()).name == found.name == "mtp"
    assert_holds(found.params.layer, tensors)
    assert found.params.embedding is MODELS[name]["embedding"]
    assert_partitioned(found.params.in_int8().layer)


def test_target_and_draft_are_one_folder(tmp_path: Path) -> None:
    """And a MiMo without its MTP layer still is a small model for another target."""
    code = {"AutoModel": "modeling_mimo.Model"}
    published(tmp_path / "both", "mimo", auto_map=code, use_sliding_window=False)
    spec = LongSpec.from_pretrained(tmp_path / "both", tmp_path / "both", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, spec.target_params, MODELS["mimo"])
    assert spec.target_config == TARGETS["mimo"] and [each.name for each in spec.drafts] == [
        "mtp",
        "ngram",
    ]
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


def _renamed(folder: Path, old: str, new: str) -> Path:
    """The folder with other beginnings of names."""
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({re.sub(f"^{old}", new, name): value for name, value in tensors.items()}, weights)
    return folder


NOT_COMPUTED = "has experts or a gate beside its attention"
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, str], str]] = {
    "Qwen3-Next": ("mimo", {}, (re.escape(PREFIXES["mimo"]), "mtp."), NOT_COMPUTED),
    "GLM-4.5": (
        *("mimo", {}, (re.escape(f"{PREFIXES['mimo']}input_proj"), "model.layers.4.eh_proj")),
        NOT_COMPUTED,
    ),
    "published without": (
        "mimo",
        {},
        (re.escape(PREFIXES["mimo"]), "model.layers.9."),
        "no MTP layer",
    ),
    "two layers": ("mimo", {"num_nextn_predict_layers": 2}, ("", ""), "one layer for all levels"),
    "another class": (
        *("speculators", {"transformer_layer_config": {"model_type": "qwen3_next"}}, ("", "")),
        "only 'qwen3'",
    ),
    "an own embedding": (
        *("mimo", {}, (re.escape(f"{PREFIXES['mimo']}token_"), f"{PREFIXES['mimo']}other_")),
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
    published(tmp_path, name, **raw)
    with pytest.raises(ValueError, match=re.escape(words)):
        load(_renamed(tmp_path, *renamed), GIVEN[name])


def test_layers_of_another_target_are_refused(tmp_path: Path) -> None:
    target = GIVEN["speculators"]
    published(tmp_path, "speculators")
    for changed, words in (
        ({"model_width": 40}, "target of hidden_size=36, the target has hidden_size=40"),
        ({"vocab_size": 103}, "target of vocab_size=101, the target has vocab_size=103"),
    ):
        with pytest.raises(ValueError, match=words):
            load(tmp_path, Target(replace(target.config, **changed), target.params))
