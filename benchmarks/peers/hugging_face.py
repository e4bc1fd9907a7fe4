"""transformers: needs ``torch``.

Plain steps begin after a random prompt that was prefilled in chunks. Their cache is static and the
step compiled by ``torch.compile(mode="reduce-overhead")``, that is with CUDA graphs; attention is
torch's ``scaled_dot_product_attention``. Texts are decoded by ``generate`` with its dynamic cache,
since prompt lookup takes no static one; ``prompt_lookup`` proposes ten tokens. Its decoding is
timed as the difference between the whole answer and one token, after one answer that warms up.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from longspec_jax.config.target import TargetConfig
from longspec_jax.weights.hf_config import hf_config

from ..arguments import SHAPES
from ..report import Row
from ..timing import step
from .rows import REAL, Job, text_row, timed

LOOKUP_TOKENS = 10
WARM_TOKENS = 6
"""Tokens before the first timed one: compilation, and the two recordings of a CUDA graph."""
ALIGNMENT = 64
"""Slots of a static cache are a multiple of this; odd sizes have slower kernels."""
PREFILL_CHUNK = 2048


def main(path: str) -> None:
    """Measure a job."""
    job = Job.read(path)
    step(f"transformers: {job.drafter or 'plain'}, {job.shape}")
    if job.what == REAL:
        texts(job)
        return
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(SHAPES[job.shape], device)

    def point(context: int, batch: int) -> Row:
        found = plain_steps(model, context, batch, job)
        torch.compiler.reset()  # Frees what the row took: graphs, compiled programs, memory.
        return found

    job.measure(point)


def plain_steps(model: Any, context: int, batch: int, job: Job) -> Row:
    """The figures of plain steps; the cache is gone when it returns."""
    import torch
    from transformers import StaticCache

    tokens = WARM_TOKENS + job.new_tokens * job.repetitions
    slots = math.ceil((context + tokens) / ALIGNMENT) * ALIGNMENT
    cache = StaticCache(config=model.config, max_cache_len=slots)
    advance = greedy_step(model, cache, torch.cuda.is_available())
    last = torch.zeros((batch, 1), dtype=torch.long, device=model.device)
    position = torch.full((1, 1), context, dtype=torch.long, device=model.device)

    def decode(steps: int) -> float:
        nonlocal last, position
        begin = time.perf_counter()
        for _ in range(steps):
            last, position = advance(last, position), position + 1
        last.tolist()  # Waits for the device.
        return time.perf_counter() - begin

    with torch.no_grad():
        prefill(model, cache, context, batch, PREFILL_CHUNK)
        decode(WARM_TOKENS)
        seconds = [decode(job.new_tokens) for _ in range(job.repetitions)]
    return timed(seconds, job.new_tokens, batch * job.new_tokens) | {"temperature": 0.0}


def random_model(config: TargetConfig, device: str) -> Any:
    """Transformers' own model of this shape, with random weights drawn on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = hf_config(config)
    named = {key: raw[key] for key in raw if key not in ("architectures", "torch_dtype")}
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**named),
            dtype=getattr(torch, config.dtype),
            attn_implementation="sdpa",
        ).eval()


def prefill(model: Any, cache: Any, context: int, batch: int, chunk: int) -> None:
    """Fill the cache with a random prompt, uncompiled."""
    import torch

    prompt = torch.randint(model.config.vocab_size, (batch, context), device=model.device)
    for start in range(0, context, chunk):
        fresh = prompt[:, start : start + chunk]
        positions = torch.arange(start, start + fresh.shape[1], device=model.device)[None]
        model(fresh, position_ids=positions, past_key_values=cache, logits_to_keep=1)


def greedy_step(model: Any, cache: Any, compiled: bool) -> Callable[[Any, Any], Any]:
    """``(tokens[B, 1], position[1, 1]) -> tokens[B, 1]``: one token more in the cache."""
    import torch

    def step(tokens: Any, position: Any) -> Any:
        output = model(tokens, position_ids=position, past_key_values=cache, use_cache=True)
        return output.logits[:, -1:].argmax(-1)

    if not compiled:
        return step
    # Shapes stay as they are: dynamic ones, which torch infers from a second context, are slower.
    fast = torch.compile(step, mode="reduce-overhead", dynamic=False)

    def replayed(tokens: Any, position: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return fast(tokens, position).clone()  # The next replay overwrites the graph's output.

    return replayed


def texts(job: Job) -> None:
    """A row for every text and temperature."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.to(device).eval()
    forwards = [0]
    model.register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))

    def answered(prompt: Sequence[int], tokens: int, temperature: float) -> tuple[float, list[int]]:
        torch.manual_seed(0)
        ids = torch.tensor([prompt], device=device)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if job.drafter is not None:
            sampling["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        begin = time.perf_counter()
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            **sampling,
        )
        answer = found[0, len(prompt) :].tolist()  # It waits for the device.
        return time.perf_counter() - begin, answer

    answered(job.texts[0], 16, 0.0)
    for temperature in job.temperatures:
        for number, prompt in enumerate(job.texts):
            prefill, _ = answered(prompt, 1, temperature)
            forwards[0] = 0
            seconds, answer = answered(prompt, job.new_tokens, temperature)
            accepted = len(answer) - forwards[0] if job.drafter is not None else None
            row = text_row(job, answer, seconds - prefill, prefill, accepted)
            job.add(row | {"context": len(prompt), "text": number, "temperature": temperature})


if __name__ == "__main__":
    main(sys.argv[1])
