"""transformers: needs ``torch``.

Plain steps are those of ``python -m benchmarks transformers``: a static cache and a step compiled
with CUDA graphs. Texts are decoded by ``generate`` with its dynamic cache, since prompt lookup
takes no static one; ``prompt_lookup`` proposes ten tokens. Its decoding is timed as the difference
between the whole answer and one token, after one answer that warms up.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from .. import hugging_face
from ..arguments import SHAPES
from ..report import Row
from ..timing import step
from .rows import REAL, Job, text_row

LOOKUP_TOKENS = 10


def main(path: str) -> None:
    """Measure a job."""
    job = Job.read(path)
    step(f"transformers: {job.drafter or 'plain'}, {job.shape}")
    if job.what == REAL:
        texts(job)
        return
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = hugging_face.random_model(SHAPES[job.shape], device)
    options = argparse.Namespace(new_tokens=job.new_tokens, repetitions=job.repetitions)

    def point(context: int, batch: int) -> Row:
        row = hugging_face.measure(model, context, batch, options)
        rate = row["tokens_per_second"]
        return {"ms": row["ms_per_token"], "tokens_per_second": rate, "temperature": 0.0}

    job.measure(point)


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
