"""``config.json`` in both dialects to our configurations and back."""

import json
from typing import Any

import pytest

from benchmarks.shapes import SHAPES
from longspec_jax.config.known import PRESETS
from longspec_jax.config.layers import (
    HeadsConfig,
    LinearRopeScaling,
    ProportionalRopeScaling,
    Rotary,
)
from longspec_jax.drafters.checkpoints import longspec as checkpoint
from longspec_jax.drafters.checkpoints.longspec import hf_draft_config
from longspec_jax.drafters.longspec import DraftConfig
from longspec_jax.weights import hf_config
from longspec_jax.weights.json_files import JsonObject
from tests.kit import each_row, tiny_target_config

BASE = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=101,
    hidden_size=36,
    intermediate_size=53,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    torch_dtype="float32",
)
LLAMA3 = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512
)
FAMILIES = {
    "Llama": dict(),
    "Mistral": dict(sliding_window=None),
    "Qwen2": dict(sliding_window=512, use_sliding_window=False),
    "Qwen3": dict(head_dim=10, tie_word_embeddings=True),
}
ROPES = {
    "plain": (dict(rope_theta=5e5), dict(rope_type="default", rope_theta=5e5)),
    "linear": (
        dict(rope_scaling=dict(type="linear", factor=4.0)),
        dict(rope_type="linear", factor=4.0, rope_theta=10000.0),
    ),
    "llama3": (
        dict(rope_theta=5e5, rope_scaling=dict(rope_type="llama3", **LLAMA3)),
        dict(rope_type="llama3", rope_theta=5e5, **LLAMA3),
    ),
}
"""The same rotary embedding as transformers 4 and as transformers 5 write it."""

_SEVEN_B = dict(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
)
_THIRTEEN_B = dict(
    hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40
)
_LLAMA_2 = dict(architectures=["LlamaForCausalLM"], vocab_size=32000, torch_dtype="bfloat16")
QWEN_3 = dict(
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    head_dim=128,
    max_position_embeddings=40960,
    max_window_layers=36,
    model_type="qwen3",
    num_attention_heads=32,
    num_hidden_layers=36,
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    use_sliding_window=False,
    vocab_size=151936,
)
RELEASED = {
    "vicuna-7b-v1.5-16k": _LLAMA_2
    | _SEVEN_B
    | dict(
        num_key_value_heads=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_scaling=dict(type="linear", factor=4.0),
    ),
    # Neither key/value heads nor a rotary scaling: the oldest dialect.
    "longchat-13b-16k": _LLAMA_2
    | _THIRTEEN_B
    | dict(
        max_position_embeddings=2048,
        max_sequence_length=16384,
        rms_norm_eps=1e-6,
        rope_condense_ratio=8,
        rope_scaling=None,
    ),
    "llama-3.1-8b-instruct": dict(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="llama3", **LLAMA3 | dict(original_max_position_embeddings=8192)
        ),
        torch_dtype="bfloat16",
    ),
    "qwq-32b-preview": dict(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        use_sliding_window=False,
        sliding_window=32768,
        max_window_layers=64,
        torch_dtype="bfloat16",
    ),
    "qwen3-8b": QWEN_3 | dict(hidden_size=4096, intermediate_size=12288),
    # The heads together are wider than the model: 32 of 128 next to 2560.
    "qwen3-4b": QWEN_3 | dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
}


def target_config(values, dtype=None):
    """The target that a parsed file describes."""
    return hf_config.target_config(JsonObject(values), dtype)


def draft_config(values, target):
    """The draft that a parsed file describes."""
    return checkpoint.draft_config(JsonObject(values), target)


def stop_tokens(values, generation=None):
    """The stop tokens of one or two parsed files."""
    second = JsonObject(generation, "generation_config.json") if generation is not None else None
    return hf_config.stop_tokens(JsonObject(values), second)


def _raw(family="Llama", **overrides):
    architecture = dict(architectures=[f"{family}ForCausalLM"], model_type=family.lower())
    return BASE | architecture | FAMILIES[family] | overrides


@each_row("family", FAMILIES)
@each_row("rope", ROPES)
def test_both_dialects_mean_the_same(family, rope):
    four, five = ROPES[rope]
    old = target_config(_raw(family, **four))
    new = {k: v for k, v in _raw(family).items() if k != "torch_dtype"}
    new |= dict(dtype="float32", rope_parameters=five)
    assert target_config(new) == old
    assert target_config(new | dict(rope_scaling=four.get("rope_scaling"))) == old


@each_row(("family", "rope"), [*zip(FAMILIES, [*ROPES, "plain"], strict=True), ("Llama", "llama3")])
def test_transformers_reads_our_config_as_we_do(tmp_path, family, rope):
    """Whatever version is installed here, its own reading of our file describes the same model."""
    transformers = pytest.importorskip("transformers", reason="reads the written config.json")
    config = target_config(_raw(family, **ROPES[rope][0]))
    (tmp_path / "config.json").write_text(json.dumps(hf_config.hf_config(config, (7, 9))))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(read).__name__ == f"{family}Config"
    assert target_config(read.to_dict()) == config
    assert stop_tokens(read.to_dict()) == (7, 9)


@each_row("name", [*PRESETS, *SHAPES])
def test_round_trip_of_presets(name):
    config = PRESETS.get(name) or SHAPES[name]
    assert target_config(hf_config.hf_config(config)) == config


def test_a_target_inside_a_model_that_also_sees():
    """What Mistral 3 holds as ``text_config`` is the target; the rest stands next to it."""
    inner = hf_config.hf_config(SHAPES["ministral3-8b"])
    del inner["architectures"], inner["torch_dtype"]
    raw = dict(
        architectures=["Mistral3ForConditionalGeneration"],
        model_type="mistral3",
        text_config=inner,
        vision_config=dict(hidden_size=16),
        dtype="bfloat16",
    )
    assert target_config(raw) == SHAPES["ministral3-8b"]
    assert stop_tokens(raw, {"eos_token_id": [2]}) == (2,)


@each_row("name", RELEASED)
def test_released_configs_are_the_presets(name):
    assert target_config(RELEASED[name]) == PRESETS[name]


def test_defaults_of_absent_and_null_keys():
    sparse = {k: v for k, v in BASE.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    config = target_config(sparse | dict(head_dim=None, rope_scaling=None, mlp_bias=None))
    assert (config.num_kv_heads, config.head_width, config.norm_eps) == (6, 6, 1e-6)
    assert config.rope_theta == 10000.0 and config.rope_scaling is None
    assert target_config({k: v for k, v in sparse.items() if k != "architectures"}) == config
    assert target_config(_raw("Qwen3", head_dim=None)).head_width == 128


def test_dtype_of_the_file_and_of_the_caller():
    assert target_config(BASE | dict(torch_dtype="torch.bfloat16")).dtype == "bfloat16"
    assert target_config(BASE, "float16").dtype == "float16"


def test_condense_ratio_beside_the_scaling_that_replaced_it():
    linear = dict(type="linear", factor=8.0)
    config = target_config(_raw(rope_condense_ratio=8, rope_scaling=linear))
    assert config.rope_scaling == LinearRopeScaling(8.0)


REFUSED = {
    f"'MixtralForCausalLM' is not supported; supported are {', '.join(hf_config.FAMILIES)}": dict(
        architectures=["MixtralForCausalLM"]
    ),
    "'Gemma4AssistantForCausalLM' is not supported: it has keys and values of another model": dict(
        architectures=["Gemma4AssistantForCausalLM"]
    ),
    "'qwen4_exp' is not supported: it has embeddings of several tokens": dict(
        architectures=None, model_type="qwen4_exp"
    ),
    "model_type='qwen2' contradicts architectures, LlamaForCausalLM: its model_type is": dict(
        model_type="qwen2"
    ),
    "supported are Llama": dict(architectures=None, model_type=None),
    "lacks hidden_size, num_hidden_layers": dict(hidden_size=None, num_hidden_layers=None),
    "attention_bias=True.*only attention_bias=False": dict(attention_bias=True),
    "mlp_bias=True": dict(mlp_bias=True),
    "hidden_act='gelu'.*silu": dict(hidden_act="gelu"),
    "load the unquantised checkpoint": dict(quantization_config=dict(bits=4)),
    "partial_rotary_factor=0.5": dict(partial_rotary_factor=0.5),
    "partial_rotary_factor=0.5 is .*: heads are rotated whole": dict(
        rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)
    ),
    "full_attention=.* is not supported: all layers rotate alike": dict(
        rope_parameters=dict(full_attention=dict(rope_type="default"))
    ),
    "rope_scaling=.*is not what rope_parameters says; move its numbers into rope_parameters": dict(
        rope_scaling=dict(type="yarn", factor=4.0),
        rope_parameters=dict(rope_type="default", rope_theta=1e6),
    ),
    "rope_theta=1000000.0 is not the rope_theta=500000.0 of config.json, rope_scaling;": dict(
        rope_theta=1e6, rope_scaling=dict(rope_type="default", rope_theta=5e5)
    ),
    "rope_theta=1000000.0 is not the rope_theta=500000.0 of config.json, rope_parameters": dict(
        rope_theta=1e6, rope_parameters=dict(rope_type="default", rope_theta=5e5)
    ),
    "original_max_position_embeddings=256 is not the .*=512 of config.json, rope_scaling": dict(
        original_max_position_embeddings=256, rope_scaling=dict(rope_type="llama3", **LLAMA3)
    ),
    "type='linear' is not its rope_type='llama3'": dict(
        rope_scaling=dict(rope_type="llama3", type="linear", **LLAMA3)
    ),
    "attention_factor=1.2 is not used by a rotary embedding of rope_type 'linear'; remove": dict(
        rope_scaling=dict(rope_type="linear", factor=4.0, attention_factor=1.2)
    ),
    "factor=4.0 is not used by a rotary embedding of rope_type 'default'": dict(
        rope_scaling=dict(factor=4.0)
    ),
    "llama_4_scaling_beta=0.1 is not used by a rotary embedding": dict(
        rope_scaling=dict(type="linear", factor=4.0, llama_4_scaling_beta=0.1)
    ),
    "partial_rotary_factor=0.5 is not supported": dict(
        rope_scaling=dict(rope_type="default", partial_rotary_factor=0.5)
    ),
    "mscale=0.7 is not used without mscale_all_dim.* attention_factor": dict(
        rope_scaling=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=512, mscale=0.7
        )
    ),
    "rotary_emb_base=1000000.0 is not us": dict(rotary_emb_base=1e6),
    "use_rope=False is not used by the rotary embedding": dict(use_rope=False),
    "rope_interleaved=True is not supported, only .*Fa": dict(rope_interleaved=True),
    "linear.* lacks factor": dict(rope_scaling=dict(type="linear")),
    "lacks low_freq_factor, high_freq_factor, original_max_position_embeddings": dict(
        rope_scaling=dict(rope_type="llama3", factor=8.0)
    ),
    "rope_condense_ratio=4 is not supported": dict(
        rope_condense_ratio=4, rope_scaling=dict(type="linear", factor=8.0)
    ),
    "'float8_e4m3fn' is not supported.*bfloat16": dict(torch_dtype="float8_e4m3fn"),
    "pass dtype=": dict(torch_dtype=None),
    "num_heads=6 must be a multiple of num_kv_heads=4": dict(num_key_value_heads=4),
    "'dynamic'.*linear, llama3, yarn, longrope and proportional.*removed from config.json": dict(
        rope_scaling=dict(rope_type="dynamic", factor=4.0)
    ),
    "lacks short_factor, long_factor": dict(rope_scaling=dict(rope_type="longrope", factor=4.0)),
}


def test_what_says_nothing_of_the_rotation_is_read():
    """Null, pairs that are no neighbours, and how the three positions of pictures are shared."""
    sections = dict(rope_type="default", type="default", mrope_section=[1, 1, 1], factor=None)
    more = dict(rope_scaling=sections, rope_interleaved=False, rope_local_base_freq=None)
    assert target_config(_raw(**more)) == target_config(_raw())
    # Phi-3 of 4k names the range of a scaling that it has not.
    assert target_config(_raw(original_max_position_embeddings=512)) == target_config(_raw())


def test_bases_of_layers_with_windows_are_given_once():
    """Beside both types of layers, and next to what is read of each, nothing is passed over."""
    full, near = (
        dict(rope_type="default", rope_theta=5e5),
        dict(rope_type="default", rope_theta=2e4),
    )
    parts = dict(full_attention=full, sliding_attention=near)
    gemma = dict(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", rope_parameters=parts
    )
    gemma |= dict(sliding_window=512, hidden_act="gelu_pytorch_tanh", head_dim=6)
    gemma |= dict(layer_types=["sliding_attention", "full_attention"])
    config = target_config(BASE | gemma)
    assert config.rope_theta == 5e5 and config.layer(0).rotary.theta == 2e4
    for more, words in (
        (dict(rope_theta=1e6), "rope_theta=1000000.0 is not the rope_theta=500000.0"),
        (dict(rope_local_base_freq=1e4), "rope_local_base_freq=10000.0 is not the rope_theta=2"),
        (dict(rope_parameters=parts | dict(factor=8.0)), "factor=8.0 is not used by"),
        (
            dict(rope_parameters=parts | dict(sliding_attention=near | dict(factor=8.0))),
            "sliding_attention: factor=8.0 is not used by layers with a window",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            target_config(BASE | gemma | more)


FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA4 = BASE | dict(
    architectures=["Gemma4ForCausalLM"],
    model_type="gemma4_text",
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=6,
    layer_types=[SLIDING, FULL, FULL],
    final_logit_softcapping=30.0,
)


def test_layers_of_gemma_4_have_heads_of_two_widths() -> None:
    """Files name those of full layers by keys of their own, or layer by layer as transformers."""
    published = dict(global_head_dim=8, num_global_key_value_heads=2, attention_k_eq_v=True)
    config = target_config(GEMMA4 | published)
    near, full = config.layer(0), config.layer(2)
    assert config.heads(near) == HeadsConfig(3, 6) and config.heads(full) == HeadsConfig(2, 8)
    assert full.keys_are_values and not near.keys_are_values
    assert near.rotary == Rotary(1e4)
    assert full.rotary == Rotary(1e6, ProportionalRopeScaling(), 2) and near.window == 512
    heads = dict(head_dim=8, num_key_value_heads=2)
    by_layer = dict(per_layer_config={"01": heads, "2": heads}, attention_k_eq_v=True)
    assert target_config(GEMMA4 | by_layer) == config
    # Without the first key transformers does not read the second.
    alone = target_config(GEMMA4 | dict(global_head_dim=8, num_global_key_value_heads=2))
    assert alone.num_kv_heads == 3 and not alone.layer(2).keys_are_values
    assert target_config(GEMMA4).head_width == 512


@each_row(
    ("more", "words"),
    [
        (dict(hidden_size_per_layer_input=8), "vocab_size_per_layer_input=None must be vocab_size"),
        (dict(num_kv_shared_layers=2), "must leave a layer of sliding_attention and one of full"),
        (dict(enable_moe_block=True), "lacks num_experts"),
        (dict(use_bidirectional_attention="all"), "='all' is not supported"),
        (dict(layer_types=[SLIDING, FULL, SLIDING]), "and end with one of full_attention"),
        (dict(layer_types=[FULL] * 3), "must name layers of sliding_attention"),
        (dict(per_layer_config={"1": dict(head_dim=8)}), "the same of all, and of no other"),
        (dict(per_layer_config={"2": dict(mlp=8)}), "the same of all, and of no other"),
        (dict(hidden_activation="gelu"), "hidden_activation='gelu' is not supported"),
        (dict(global_head_dim=7), "of a head of 7 dimensions must be a number of pairs"),
        (dict(num_attention_heads=4), "num_heads=4 must be a multiple of num_kv_heads=3"),
    ],
)
def test_what_gemma_4_asks_for_and_is_not_computed(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        target_config(GEMMA4 | dict(global_head_dim=8) | more)


def test_a_model_that_also_sees_rotates_as_its_text_part_says():
    inner = {key: value for key, value in BASE.items() if key not in ("architectures",)}
    outer = dict(architectures=["Mistral3ForConditionalGeneration"], rope_theta=5e5)
    inner |= dict(model_type="mistral")
    with pytest.raises(ValueError, match="rope_theta=500000.0 is not used by a file whose layers"):
        target_config(outer | dict(text_config=inner))


def test_a_draft_may_hold_its_base_in_the_scaling():
    """LongSpec's reader is the target's, and takes all that a target's file may hold."""
    target = target_config(BASE | dict(rope_theta=5e5))
    held = dict(rope_scaling=dict(rope_type="default", rope_theta=5e5), no_rope_layers=[1, 1])
    held |= dict(rope_interleaved=False)
    assert draft_config(held, target).rope_theta == 5e5
    with pytest.raises(ValueError, match="rotary_base=5000.0 is not used by"):
        draft_config(dict(rotary_base=5e3), target)


@each_row("message", REFUSED)
def test_refusals_name_values_rule_and_remedy(message):
    with pytest.raises(ValueError, match=message):
        target_config(BASE | REFUSED[message])


@each_row(
    ("family", "overrides", "windows"),
    [
        ("Mistral", dict(sliding_window=512), [512, 512]),
        ("Qwen2", dict(sliding_window=512, use_sliding_window=True), [None, None]),
        (
            "Qwen3",
            dict(sliding_window=512, use_sliding_window=True, max_window_layers=1),
            [None, 512],
        ),
        (
            "Qwen3",
            dict(
                sliding_window=512,
                use_sliding_window=True,
                layer_types=["sliding_attention", "full_attention"],
            ),
            [512, None],
        ),
    ],
)
def test_an_active_window_is_that_of_its_layers(family, overrides, windows):
    config = target_config(_raw(family, **overrides))
    assert [config.layer(index).window for index in range(2)] == windows
    assert target_config(hf_config.hf_config(config)) == config
    # Where it hides no position, no layer has one.
    assert not target_config(_raw(family, **overrides, max_position_embeddings=512)).kinds


def test_layer_types_are_checked():
    raw = _raw("Qwen3", sliding_window=512, use_sliding_window=True)
    for types in (["full_attention"], ["full_attention", "chunked_attention"]):
        with pytest.raises(ValueError, match="layer_types.* for each of the 2 layers"):
            target_config(raw | dict(layer_types=types))


def test_a_hybrid_inside_a_model_that_also_sees():
    """As Qwen3.5 is published: the rotation of text in three parts, and layers for several tokens.

    Files without ``layer_types`` have a layer of attention every fourth.
    """
    inner = hf_config.hf_config(SHAPES["qwen35-4b"])
    rope = dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
        mrope_section=[11, 11, 10], mrope_interleaved=True,
    )  # fmt: skip
    for key in ("architectures", "torch_dtype", "layer_types", "rope_theta", "rope_scaling"):
        del inner[key]
    more = dict(rope_parameters=rope, full_attention_interval=4, mtp_num_hidden_layers=1)
    raw = dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        model_type="qwen3_5",
        text_config=inner | more,
        vision_config=dict(hidden_size=16),
        dtype="bfloat16",
        tie_word_embeddings=True,
    )
    assert target_config(raw) == SHAPES["qwen35-4b"]
    assert SHAPES["qwen35-4b"].read_layer == 31
    for own, named in (
        (dict(layer_types=["linear_attention"] * 32), "layer_types.* full_attention somewhere"),
        (dict(linear_num_value_heads=24), "=24 must be a multiple of.* linear_num_value_heads"),
        (dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim=1 must be .* from 2 to 64"),
    ):
        with pytest.raises(ValueError, match=named):
            target_config(raw | dict(text_config=inner | more | own))


def test_a_mistral_file_without_the_key_means_4096():
    raw = {k: v for k, v in _raw("Mistral").items() if k != "sliding_window"}
    assert target_config(raw).max_positions == 1024 and not target_config(raw).kinds
    config = target_config(raw | dict(max_position_embeddings=32768))
    assert config.layer(0).window == config.layer(1).window == 4096
    with pytest.raises(ValueError, match="LongSpec draft reads .* all layers of this target"):
        DraftConfig.for_target(config)


def test_export_refuses_a_configuration_that_its_architecture_cannot_say():
    with pytest.raises(ValueError, match="always has qkv_bias=False.*has qkv_bias=True"):
        hf_config.hf_config(tiny_target_config(qkv_bias=True))
    with pytest.raises(ValueError, match="'GPT' is not supported; supported are"):
        hf_config.hf_config(tiny_target_config(architecture="GPT"))


@each_row("name", PRESETS)
def test_draft_round_trip(name):
    target = PRESETS[name]
    draft = DraftConfig.for_target(target, window=256)
    assert draft_config(hf_draft_config(draft, target), target) == draft
    assert draft_config(hf_draft_config(draft), target) == draft


def test_a_released_draft_config_is_its_targets():
    """The release saves the target's configuration next to the draft."""
    raw = RELEASED["longchat-13b-16k"]
    target = target_config(raw)
    draft = draft_config(raw, target)
    assert draft == DraftConfig.for_target(target)
    draft.check_fits(target)


def test_a_bare_draft_config_follows_the_target():
    target = tiny_target_config(head_width=10, rope_scaling=LinearRopeScaling(2.0))
    assert draft_config({"model_type": "llama"}, target) == DraftConfig.for_target(target)


def test_a_draft_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size=102, the target has 101.*belongs to this"):
        draft_config({"vocab_size": 102}, tiny_target_config())


def test_stop_tokens():
    stop = stop_tokens
    assert stop({"eos_token_id": 2}) == (2,)
    assert stop({"eos_token_id": [1, 2]}) == (1, 2)
    assert stop({"eos_token_id": 2}, {"eos_token_id": [3, 4]}) == (3, 4)
    assert stop({"eos_token_id": 2}, {"temperature": 0.7}) == (2,)
    assert stop({"eos_token_id": None}) == ()
