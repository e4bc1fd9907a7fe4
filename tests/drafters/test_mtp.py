"""MTP layers: chains equal PyTorch's layers, of files as they are published."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax import PLAIN, LongSpec
from longspec_jax.config.layers import ExpertsConfig, LayerConfig, Rotary, YarnRopeScaling
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.checkpoints import mtp
from longspec_jax.drafters.checkpoints.mtp import load
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.eagle import EagleOptions, MtpConfig, MtpDraft, MtpParams
from longspec_jax.drafters.registry import MTP, SMALL_LM
from longspec_jax.loading import choose_drafts
from longspec_jax.weights.hf import load_target, save_target
from tests.decoding.layers import SIZES
from tests.decoding.lossless import CONFIG
from tests.drafters.kit import (
    assert_holds,
    assert_partitioned,
    drawn,
    llama_layer,
    publish,
    random_tree,
)
from tests.drafters.test_eagle import _chain
from tests.kit import each_row, in_tiers, normal, random_target, relative_error
from tests.weights.quantised import files as quantised
from tests.weights.quantised.test_load import dequantised, matrices

torch: Any = pytest.importorskip("torch", reason="the oracle is PyTorch's")
transformers: Any = pytest.importorskip("transformers")
HYBRID: dict[str, Any] = dict(
    head_width=8, rotary_width=4, qk_norm=True, offset_norms=True, gated_attention=True
)
YARN = YarnRopeScaling.usual(4.0, 16)
MIXTURE = ExpertsConfig(count=5, chosen=2, width=22, shared=19)
TARGETS: dict[str, TargetConfig] = {
    "mimo": replace(CONFIG, architecture="MiMoForCausalLM", qkv_bias=True),
    "speculators": replace(CONFIG, rope_theta=5e5),
    "qwen3.5": replace(
        CONFIG,
        architecture="Qwen3_5ForCausalLM",
        rope_theta=1e7,
        rope_scaling=YARN,
        kinds=(LayerConfig(recurrence=SIZES), LayerConfig(Rotary(1e7, YARN, 4))),
        pattern=(0, 1),
        **HYBRID,
    ),
    "qwen3.5-moe": replace(
        CONFIG,
        architecture="Qwen3_5MoeForCausalLM",
        mlp_width=MIXTURE.width,
        kinds=(LayerConfig(Rotary(width=4), experts=MIXTURE),),
        pattern=(0, 0),
        **HYBRID,
    ),
    "qwen3-next": replace(
        CONFIG,
        architecture="Qwen3NextForCausalLM",
        kinds=(
            LayerConfig(recurrence=SIZES, experts=MIXTURE),
            LayerConfig(Rotary(width=4), experts=MIXTURE),
        ),
        pattern=(0, 1),
        **HYBRID,
    ),
}
TREE = TreeConfig((4, 6, 4), budget=16, lookup=3)
DIALECTS = dict.fromkeys(TARGETS, mtp.QWEN) | {"mimo": mtp.MIMO, "speculators": mtp.SPECULATORS}
CLASSES = {
    "mimo": ("Qwen2", "qwen2"),
    "speculators": ("Qwen3", "qwen3"),
    "qwen3.5": ("Qwen3_5", "qwen3_5"),
    "qwen3.5-moe": ("Qwen3_5Moe", "qwen3_5_moe"),
    "qwen3-next": ("Qwen3Next", "qwen3_next"),
}


def config_for(name: str) -> MtpConfig:
    """A layer like the target's; alone it has another MLP and norms of heads."""
    config = config_of(TARGETS[name])
    if name == "speculators":
        return replace(config, mlp_width=29, qk_norm=True)
    return replace(config, hidden_first=name == "mimo")


def config_of(target: TargetConfig) -> MtpConfig:
    """The layer of a target of Qwen's."""
    return MtpConfig.of(target, target.layer(target.read_layer), target.num_layers)


def random_draft(target: TargetConfig, params: Any) -> MtpDraft:
    """A random layer for a target."""
    config = config_of(target)
    layer = random_tree(mtp.QWEN.table(config), config.dtype)
    bound = MtpParams.bound(layer, config, target, params)
    return MtpDraft.bind(config, bound, target, EagleOptions())


MODELS = {name: random_target(target) for name, target in TARGETS.items()}
GIVEN = {name: Target(TARGETS[name], MODELS[name]) for name in TARGETS}


def stored_shapes(config: MtpConfig, dialect: mtp.MtpDialect) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer and of what is around it, by their whole names."""
    layer, width = llama_layer(config)[0], config.model_width
    layer["input_layernorm.weight"] = (width,)
    if config.gated_attention:
        layer["self_attn.q_proj.weight"] = 2 * config.num_heads * config.head_width, width
    if (experts := config.experts) is not None:
        layer = {key: shape for key, shape in layer.items() if not key.startswith("mlp.")}
        sizes = {f"experts.{each}": experts.width for each in range(experts.count)}
        for part, size in (sizes | {"shared_expert": experts.shared or 0}).items():
            layer |= {f"mlp.{part}.{each}_proj.weight": (size, width) for each in ("gate", "up")}
            layer[f"mlp.{part}.down_proj.weight"] = width, size
        layer["mlp.gate.weight"] = experts.count, width
        layer["mlp.shared_expert_gate.weight"] = 1, width
    fuse, *norms = dialect.names
    around = {f"{fuse}.weight": (width, 2 * width)} | {f"{each}.weight": (width,) for each in norms}
    return {f"{dialect.layer}{each}": shape for each, shape in layer.items()} | {
        f"{dialect.around}{each}": shape for each, shape in around.items()
    }


def published(folder: Path, name: str, **raw: Any) -> dict[str, np.ndarray]:
    """A layer as its trainers leave it, maybe with its target; returns its random tensors.

    Args:
      raw: other keys of ``config.json``.
    """
    keys: dict[str, Any] = {}
    if name == "speculators":
        keys = {
            "architectures": ["MTPDraftModel"],
            "num_nextn_predict_layers": 1,
            "speculators_config": {"algorithm": "mtp", "proposal_methods": []},
            "speculators_model_type": "mtp",
            "torch_dtype": "float32",
            "transformer_layer_config": llama_layer(config_for(name))[1]
            | {"model_type": "qwen3", "rope_theta": 5e5},
        }
    else:
        save_target(folder, TARGETS[name], MODELS[name])
        own = "num_nextn_predict_layers" if name == "mimo" else "mtp_num_hidden_layers"
        keys[own] = 1
    tensors = drawn(stored_shapes(config_for(name), DIALECTS[name]))
    publish(folder, tensors, keys | raw)
    return tensors


PARTS = "gate", "up", "down"


def stacked(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors with the experts of every layer in two, as transformers 5 holds them."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.partition("experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (
            [tensors[f"{prefix}experts.{each}.{part}_proj.weight"] for each in range(MIXTURE.count)]
            for part in PARTS
        )
        both = [np.concatenate(pair) for pair in zip(gate, up, strict=True)]
        found[f"{prefix}experts.gate_up_proj"] = np.stack(both)
        found[f"{prefix}experts.down_proj"] = np.stack(down)
    return found


def see_too(folder: Path) -> Path:
    """The folder as Qwen publishes its models, such as Qwen3.8-27B, which also see; returns it."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    inner = json.loads(file.read_text())
    for key in ("architectures", "torch_dtype"):
        del inner[key]
    rope = {key: inner.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "rope_type": "default"}
    rope |= inner.pop("rope_scaling", None) or {}
    inner |= {
        "attn_output_gate": True,
        "dtype": "float32",
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish",  # Of the recurrent layers, whatever its name.
        "rope_parameters": rope,
    }
    kind = inner["model_type"].removesuffix("_text")
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    outer = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": 7,
        "language_model_only": False,
        "text_config": inner,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 1, "model_type": "qwen3_5"},
    }
    file.write_text(json.dumps(outer))
    seen = {"model.visual.merger.norm.weight": np.zeros(3, np.float32)}
    named = {
        re.sub(r"^model\.", "model.language_model.", each): value
        for each, value in stacked(load_file(weights)).items()
    }
    save_file(named | seen, weights)
    return folder


class Oracle(torch.nn.Module):
    """The layer as its trainers build it, of transformers' layers."""

    def __init__(self, name: str, config: MtpConfig) -> None:
        super().__init__()
        prefix, module = CLASSES[name]
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        inner, rope = "Text" * ("qwen3.5" in name), dict[str, Any](rope_type="default")
        if config.rope_scaling == YARN:
            rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        if config.rotary_width:
            rope["partial_rotary_factor"] = config.rotary_width / config.head_width
        more: dict[str, Any] = {}
        if config.gated_attention:
            more["layer_types"] = ["full_attention"]
        if config.experts is not None:
            more |= {
                "num_experts": config.experts.count,
                "num_experts_per_tok": config.experts.chosen,
                "moe_intermediate_size": config.experts.width,
                "shared_expert_intermediate_size": config.experts.shared,
            }
        shape = getattr(transformers, f"{prefix}{inner}Config")(
            vocab_size=config.vocab_size,
            hidden_size=config.model_width,
            intermediate_size=config.mlp_width,
            num_hidden_layers=1,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_width,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope | {"rope_theta": config.rope_theta},
            max_position_embeddings=64,
            attn_implementation="eager",
            **more,
        )
        width, norm = config.model_width, getattr(modeling, f"{prefix}RMSNorm")
        self.layer = getattr(modeling, f"{prefix}DecoderLayer")(shape, 0)
        self.rotary = getattr(modeling, f"{prefix}{inner}RotaryEmbedding")(shape)
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

    def read(self, tensors: dict[str, np.ndarray], dialect: mtp.MtpDialect) -> None:
        """Take the stored tensors; every one of them, and no other."""
        ours = "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"
        around = {
            f"{dialect.around}{stored}.weight": f"{each}.weight"
            for stored, each in zip(dialect.names, ours, strict=True)
        }
        state = {
            around.get(name) or f"layer.{name.removeprefix(dialect.layer)}": torch.from_numpy(value)
            for name, value in stacked(tensors).items()
        }
        self.load_state_dict(state)


@pytest.mark.parametrize("name", in_tiers(TARGETS, "mimo"))
def test_chains_equal_pytorch(name: str, tmp_path: Path) -> None:
    """Of the stored tensors: order of the projection, norms, positions, what is fed back.

    And after sinks and a window, where the chain is that over the text without what lies between.
    """
    config, tensors = TARGETS[name], published(tmp_path, name)
    draft = load(tmp_path, GIVEN[name])
    random = np.random.default_rng(7)
    text, following = (random.integers(0, config.vocab_size, (1, n)) for n in (9, 3))
    hidden = normal(8, 1, 8, config.model_width)
    drafter: Any = draft.drafter(TreeConfig((1, 1, 1)))
    given = text.astype(np.int32), hidden, following.astype(np.int32)
    found = _chain(drafter, Params(None, draft.params), *given)
    windowed = _chain(replace(drafter, window=3, sinks=2), Params(None, draft.params), *given)
    oracle: Any = Oracle(name, config_for(name))
    oracle.read(tensors, DIALECTS[name])
    table, head = (torch.from_numpy(np.array(MODELS[name][each])) for each in ("embedding", "head"))
    for logits, seen in ((found, [*range(8)]), (windowed, [0, 1, 4, 5, 6, 7])):
        features, behind = torch.from_numpy(np.array(hidden))[:, seen], [*text[0, 1:][seen]]
        for step in range(3):
            with torch.no_grad():
                out = oracle(table[torch.tensor(behind)][None], features)[:, -1:]
            np.testing.assert_allclose(logits[step], (out @ head.T)[:, 0], atol=2e-4, rtol=1e-4)
            features = torch.cat([features, out], dim=1)
            behind.append(following[0, step])
    rounded = _chain(drafter, Params(None, draft.params.in_int8()), *given)
    assert 0 < relative_error(rounded[0], found[0]) < 0.1


@each_row("name", TARGETS)
def test_files_as_published(name: str, tmp_path: Path) -> None:
    """Most lie among the target's, which loads without them."""
    tensors = published(tmp_path, name)
    [chosen] = choose_drafts([tmp_path], {"window": 64}, target=tmp_path)
    assert chosen.kind is MTP
    found = load(tmp_path, GIVEN[name])
    assert found.config == config_for(name) and isinstance(found.params, MtpParams)
    assert found.drafter(TreeConfig()).name == found.name == "mtp"
    assert_holds(found.params.layer, tensors)
    assert found.params.embedding is MODELS[name]["embedding"]
    assert_partitioned(found.params.in_int8().layer)


@each_row(("name", "draft"), [("qwen3.5", "mtp"), ("qwen3.5-moe", "folder")])
def test_the_layer_of_a_model_that_also_sees(name: str, draft: str, tmp_path: Path) -> None:
    """As Qwen publishes it, by name and by folder; for another target it is a small model."""
    tensors = published(tmp_path, name)
    folder = see_too(tmp_path)
    source = draft if draft == "mtp" else folder
    options = {"window": 6, "sinks": 2}
    spec = LongSpec.from_pretrained(folder, source, dtype="float32", draft_options=options)
    assert spec.target_config == TARGETS[name]
    jax.tree.map(np.testing.assert_array_equal, spec.target_params, MODELS[name])
    model, lookup = spec.drafts
    assert [model.name, lookup.name] == ["mtp", "ngram"]
    assert_holds(model.params.layer, tensors)
    found, plain = (
        spec.generate([[5, 3, 8] * 4], max_new_tokens=12, tree=tree) for tree in (TREE, PLAIN)
    )
    assert found.sequences == plain.sequences
    [chosen] = choose_drafts([tmp_path], {}, target=tmp_path.parent)
    assert chosen.kind is SMALL_LM
    layer, _ = choose_drafts(["mtp", "ngram"], options, target=folder)
    assert (layer.kind, layer.source, layer.options.window) == (MTP, folder, 6)


def test_the_layer_of_a_quantised_target_stays_so(tmp_path: Path) -> None:
    """Its projection is whole, as in published files, and columns in another order are read so."""
    like = quantised.CONFIG
    kinds = LayerConfig(recurrence=SIZES), LayerConfig(Rotary(width=8))
    more = HYBRID | dict(rotary_width=8, head_width=like.head_width, kinds=kinds, pattern=(0, 1))
    config = replace(like, architecture="Qwen3_5ForCausalLM", **more)
    tensors = drawn(stored_shapes(config_of(config), mtp.QWEN))
    folder = quantised.write(tmp_path, "fp8 by block", config=config, beside=tensors)
    target = Target(*load_target(folder, dtype="float32"))
    found, whole = load(folder, target), load(folder.parent / "whole", target)
    own = matrices(found.params.layer)
    assert len(own) == 3 and not matrices(whole.params.layer)
    assert len(matrices(found.params.in_int8().layer)) == 5
    jax.tree.map(
        lambda one, other: np.testing.assert_array_equal(one.reshape(other.shape), other),
        dequantised(found.params.layer),
        whole.params.layer,
    )
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    damaged = tmp_path / "damaged"
    quantised.write(damaged, "fp8 by block", config=config, beside=tensors)
    with pytest.raises(ValueError, match=r"mtp\.layers\.0\.mlp\.up_proj is quantised as"):
        load(damaged / "quantised", target)


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


_LAYER = re.escape(mtp.MIMO.layer)
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "an MTP layer mtp.layers.0.* of MiMoForCausalLM is not computed": (
        "mimo",
        {},
        (_LAYER, "mtp.layers.0."),
    ),
    "the MTP layer of MiMoForCausalLM has model.layers.4.eh_proj.weight": (
        "mimo",
        {},
        (f"{_LAYER}input_proj", "model.layers.4.eh_proj"),
    ),
    "no MTP layer": ("mimo", {}, (_LAYER, "model.layers.9.")),
    "Qwen3_5ForCausalLM has no MTP layer among its tensors (mtp.*, ": (
        "qwen3.5",
        {},
        ("mtp\\.", "model.layers.9."),
    ),
    "one layer for all levels": ("mimo", {"num_nextn_predict_layers": 2}, ("", "")),
    "unexpected mtp.layers.1.mlp.up_proj.weight (53, 36)": (
        "qwen3.5",
        {},
        ("mtp.layers.0.mlp.up", "mtp.layers.1.mlp.up"),
    ),
    "mtp_use_dedicated_embeddings=True is not supported": (
        "qwen3.5",
        {"mtp_use_dedicated_embeddings": True},
        ("", ""),
    ),
    "missing mtp.layers.0.mlp.experts.4.down_proj.weight (36, 22)": (
        "qwen3-next",
        {},
        ("mtp.layers.0.mlp.experts.4", "model.layers.9.mlp.experts.4"),
    ),
    "only 'qwen3'": (
        "speculators",
        {"transformer_layer_config": {"model_type": "qwen3_next"}},
        ("", ""),
    ),
    "an MTP layer with a window is not computed": (
        "mimo",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        ("", ""),
    ),
}
"""Words of the refusal, the target, other keys of its file, and tensors under other names."""


@each_row("words", REFUSED)
def test_refusals(words: str, tmp_path: Path) -> None:
    name, raw, renamed = REFUSED[words]
    published(tmp_path, name, **raw)
    with pytest.raises(ValueError, match=re.escape(words)):
        load(_renamed(tmp_path, *renamed), GIVEN[name])


def test_a_layer_of_another_target_is_refused(tmp_path: Path) -> None:
    target = GIVEN["speculators"]
    published(tmp_path, "speculators")
    with pytest.raises(ValueError, match="target of hidden_size=36, the target has hidden_size=40"):
        load(tmp_path, Target(replace(target.config, model_width=40), target.params))
