"""Released models and their oracles: transformers' classes, carrying what ``gguf`` decodes.

The models lie in packages that pip can download (:mod:`longspec_jax.released`) and are kept in the
user's own cache, where later runs find them. Without an index the tests are skipped.
"""

import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspec_jax.compilation import VARIABLE
from longspec_jax.weights.fetching import fetched
from longspec_jax.weights.gguf.file import read_gguf

torch = pytest.importorskip("torch", reason="the oracle is transformers' PyTorch models")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers' own models")
gguf = pytest.importorskip("gguf", reason="the package that decodes GGUF files")

_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": (
        "Llama",
        dict(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=100000.0),
            tie_word_embeddings=True,
        ),
    ),
    "gemma3-270m": (
        "Gemma3Text",
        dict(
            vocab_size=262144,
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            max_position_embeddings=32768,
            sliding_window=512,
            query_pre_attn_scalar=256,
            rms_norm_eps=1e-6,
            rope_parameters=dict(
                full_attention=dict(rope_type="default", rope_theta=1e6),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
            layer_types=[
                f"{'full' if (layer + 1) % 6 == 0 else 'sliding'}_attention" for layer in range(18)
            ],
        ),
    ),
    "qwen-coder": (
        "Qwen2",
        dict(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
            tie_word_embeddings=False,
        ),
    ),
}
"""Classes and configurations as the models were published; Qwen's file alone is untied."""
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def model_file(name: str) -> Path:
    """The file of a model; skips the test where it can neither be found nor downloaded."""
    with pytest.MonkeyPatch.context() as patch:
        # The tests' own setting keeps nothing.
        patch.delenv(VARIABLE, raising=False)
        try:
            return fetched(name)
        except FileNotFoundError as error:
            if os.environ.get("LONGSPEC_TEST_REAL"):
                raise
            pytest.skip(str(error))


def oracle(name: str) -> Any:
    """The model in float32, in transformers."""
    kind, shape = _SHAPES[name]
    config = getattr(transformers, f"{kind}Config")(**shape)
    with torch.device("meta"):
        cls = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
        model = cls._from_config(config, dtype=torch.float32)
    names = _NAMES | (_GEMMA if kind == "Gemma3Text" else {})
    state = {}
    # The package's own reader takes as long for the vocabulary as all else here.
    for full, tensor in read_gguf(model_file(name)).tensors.items():
        kind_of_blocks = gguf.GGMLQuantizationType[tensor.type.name]
        values = gguf.quants.dequantize(np.array(tensor.rows()), kind_of_blocks)
        stem, _, suffix = full.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
        prefix, stem = (f"model.layers.{layer[1]}.", layer[2]) if layer else ("", stem)
        if kind == "Llama" and stem in ("attn_q", "attn_k"):
            width = shape["hidden_size"] // shape["num_attention_heads"]
            values = values.reshape(-1, width // 2, 2, values.shape[-1]).swapaxes(1, 2)
            values = values.reshape(-1, values.shape[-1])
        if kind == "Gemma3Text" and stem.endswith("norm"):
            values = values - np.float32(1)
        state[f"{prefix}{names[stem]}.{suffix}"] = torch.from_numpy(np.array(values))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    # What is computed and not loaded was left on no device.
    for module in model.modules():
        if hasattr(module, "inv_freq") or "RotaryEmbedding" in type(module).__name__:
            module.__init__(config=config)
        if type(module).__name__.endswith("ScaledWordEmbedding"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
    return model.eval()


def greedy(model: Any, prompt: Sequence[int], new: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens of transformers, and the logits ``[new, V]`` that they were drawn from."""
    given = torch.tensor([list(prompt)])
    with torch.no_grad():
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits).numpy()


CHATS = [
    "What is a prime number? Give examples.",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child in two sentences.",
    "Translate 'good morning' into French, German and Spanish.",
    "List three uses of a paperclip.",
]
CODE = [
    "def quicksort(values):\n    if len(values) <= 1:\n        return values\n",
    "import re\n\nPATTERN = re.compile(r'\\d{4}-\\d{2}-\\d{2}')\n\n\ndef dates(text):\n",
    "class Node:\n    def __init__(self, value, left=None, right=None):\n",
    "SELECT name, COUNT(*) FROM users WHERE age > 18 GROUP BY",
    'for (int i = 0; i < 10; i++) {\n\tprintf("%d\\n", i);\n',
]
PROSE = [
    "The history of the Roman Empire begins with",
    "Water boils at 100 degrees Celsius, but at high altitude",
    "It was a bright cold day in April, and the clocks were striking",
    "1. Preheat the oven to 180 degrees.\n2. Mix the flour",
    "The three laws of motion, published by Isaac Newton in 1687, are:",
]
UNICODE = [
    "Die größte Stadt Österreichs ist",
    "日本の首都は",
    "Café au lait, naïve, Ångström — “quotes” and … ellipses:",
    "Привет, как дела? Меня зовут",
    "👩‍👩‍👧 🎉 emoji: 😀 means happy, 😢 means",
]


def prompts(tokenizer: Any, chats: bool = True) -> list[list[int]]:
    """Twenty prompts: chats, code, prose and unicode."""
    texts = [*CODE, *PROSE, *UNICODE]
    encoded = [tokenizer(text)["input_ids"] for text in texts]
    if not chats:
        return [*encoded, *(tokenizer(f"Q: {text}\nA:")["input_ids"] for text in CHATS)]
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in CHATS
    ]
    return [
        *encoded,
        *(tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered),
    ]


@cache
def document(characters: int) -> str:
    """A long text: this project's own source."""
    files = sorted((Path(__file__).parents[2] / "longspec_jax").glob("decoding/*.py"))
    return "\n\n".join(path.read_text("utf-8") for path in files)[:characters]
