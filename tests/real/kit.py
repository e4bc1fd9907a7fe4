"""Released models and their oracles: what transformers reads of the same files.

The models lie in packages that pip can download (:mod:`longspec_jax.released`) and are kept in the
user's own cache, where later runs find them. Without an index the tests are skipped.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspec_jax.compilation import VARIABLE
from longspec_jax.weights.fetching import fetched

torch = pytest.importorskip("torch", reason="the oracle is transformers' PyTorch models")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers' own models")
pytest.importorskip("gguf", reason="the package by which transformers decodes GGUF files")


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
    """The model in float32, as transformers reads its file: configuration, names and weights."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = model_file(name)
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # As the argument ``gguf_file`` of ``from_pretrained`` does, which wants accelerate besides.
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    state = read["tensors"]
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


@contextmanager
def serving(name: str, *options: str) -> Iterator[Any]:
    """OpenAI's client of the command's server over a model, with options as they are typed."""
    from openai import OpenAI

    from infer.serve.arguments import parser
    from infer.serve.command import Service
    from infer.serve.http_server import HttpServer

    typed = [f"--target={model_file(name)}", f"--served_model_name={name}", *options]
    listener, ready = socket.create_server(("127.0.0.1", 0)), threading.Event()
    service = Service(parser().parse_args(typed), listener)
    service.load()
    server = HttpServer(service.served(), listener, 5.0)
    running = threading.Thread(target=lambda: asyncio.run(server.run(ready.set)))
    running.start()
    try:
        assert ready.wait(60)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with OpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
            yield client
    finally:
        server.stop()
        running.join(60)
