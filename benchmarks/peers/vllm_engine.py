"""vLLM 0.26: needs ``vllm``, and ``torch`` with CUDA, on an NVIDIA GPU.

Its default CUDA graphs and its default attention; plain decoding of ``plain``, with
``VLLM_BATCH_INVARIANT=1`` the peer ``vllm-invariant``. ``eagle3`` is its EAGLE-3 of random weights
in chains of three, the shortest that holds an acceptance length of up to four: with the schedule of
least variance, which is vLLM's own, no longer chain is faster. ``ngram`` is its prompt lookup.
Times are those of the engine's core, first token to last, with the prompt in its prefix cache; that
of a prompt is the first call's.
"""

import importlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import Row
from ..timing import rounded, step
from .rows import DRAFT, REAL, ROUND, Job, random_prompts, rounds_of, text_row, timed

CHAIN = 3
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": 8}
"""Of ``ngram``: as many tokens as its documentation's examples propose, or a few more."""


def main(path: str) -> None:
    """Measure a job."""
    job = Job.read(path)
    vllm: Any = importlib.import_module("vllm")
    step(f"vllm: starting the engine, {job.drafter or 'plain'}, {job.shape}")
    room = max([*job.contexts, *map(len, job.texts)]) + job.new_tokens + 64
    engine = vllm.LLM(
        model=job.model,
        load_format="auto" if job.what == REAL else "dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_model_len=room,
        max_num_seqs=max(job.batches),
        gpu_memory_utilization=0.85,
        disable_log_stats=False,
        speculative_config=speculation(job),
    )
    if job.what == REAL:
        texts(job, vllm, engine)
        return
    vocabulary = json.loads((Path(job.model) / "config.json").read_text())["vocab_size"]

    def point(context: int, batch: int) -> Row:
        prompts = random_prompts(vocabulary, context, batch)
        prefill, seconds, accepted = 0.0, list[float](), list[int]()
        for turn in range(1 + job.repetitions):
            before = drafted(engine)
            times = [answer.metrics for answer in decoded(vllm, engine, prompts, job)]
            if turn == 0:  # It compiles what it has not met, and fills the prefix cache.
                prefill = max(t.first_token_ts - t.scheduled_ts for t in times)
                continue
            begin = min(t.first_token_ts for t in times)
            seconds.append(max(t.last_token_ts for t in times) - begin)
            accepted.append(drafted(engine) - before)
        emitted = job.new_tokens - 1
        rounds = rounds_of(emitted * batch, round(statistics.median(accepted))) / batch
        return {
            **timed(seconds, rounds, emitted * batch),
            "tau": rounded(emitted / rounds) if job.what == ROUND else None,
            "temperature": 0.0,
            "prefill_ms": rounded(1e3 * prefill),
        }

    job.measure(point)


def speculation(job: Job) -> dict[str, Any] | None:
    """Its ``speculative_config``; None for plain decoding.

    Raises:
      ValueError: for an acceptance length that chains of three do not hold.
    """
    if job.drafter is None:
        return None
    if job.what == REAL and job.drafter == DRAFT:
        return {"method": DRAFT, "model": job.draft, "num_speculative_tokens": CHAIN}
    if job.what != ROUND:
        return {"method": job.drafter, **LOOKUP}
    if not 1 <= job.tau <= CHAIN + 1:
        raise ValueError(f"vllm: chains of {CHAIN} emit 1 to {CHAIN + 1} tokens, not {job.tau:g}")
    return {
        "method": job.drafter,
        "model": eagle3_folder(Path(job.model)),
        "num_speculative_tokens": CHAIN,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": job.tau,
    }


def eagle3_folder(target: Path) -> str:
    """The configuration of a one-layer draft of the target's widths, which proposes 32,000 ids."""
    config = json.loads((target / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": min(32_000, config["vocab_size"]),
        "tie_word_embeddings": False,
    }
    folder = target / "eagle3"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def decoded(
    vllm: Any, engine: Any, prompts: Sequence[Sequence[int]], job: Job, temperature: float = 0.0
) -> Any:
    """The outputs of prompts that are decoded at once, past every stop token."""
    sampling = vllm.SamplingParams(
        temperature=temperature,
        max_tokens=job.new_tokens,
        ignore_eos=True,
        detokenize=False,
        seed=0 if temperature else None,
    )
    ids = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return engine.generate(ids, sampling, use_tqdm=False)


def drafted(engine: Any) -> int:
    """Accepted tokens since the engine has started."""
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(int(each.value) for each in engine.get_metrics() if each.name == name)


def texts(job: Job, vllm: Any, engine: Any) -> None:
    """A row for every text and temperature."""
    decoded(vllm, engine, [job.texts[0][: len(job.texts[0]) // 2]], job)  # It warms up.
    for temperature in job.temperatures:
        for number, prompt in enumerate(job.texts):
            before = drafted(engine)
            [answer] = decoded(vllm, engine, [prompt], job, temperature)
            times, accepted = answer.metrics, drafted(engine) - before
            row = text_row(
                job,
                answer.outputs[0].token_ids,
                times.last_token_ts - times.first_token_ts,
                times.first_token_ts - times.scheduled_ts,
                None if job.drafter is None else accepted,
            )
            job.add(row | {"context": len(prompt), "text": number, "temperature": temperature})


if __name__ == "__main__":
    main(sys.argv[1])
