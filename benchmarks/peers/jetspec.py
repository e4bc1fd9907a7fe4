"""JetSpec: needs ``jetspec`` with transformers 4.57 next to it, and ``torch`` with CUDA.

Its engine as its README measures it: paged cache without gathers, compiled verification and a draft
head in CUDA graphs, joined matmuls. Target and head have random weights, the head the form of the
published ones: five layers that read five of the target's, blocks of 16. ``round`` verifies trees
of as many nodes as the drafter's name says, seven wide and 15 deep. With random weights nearly
every round emits one token, so ``ms`` of a round is the figure; ``tau`` is what those emitted.
Rounds keep cache and graphs from prompt to prompt, its ``session``, and are timed from the first
draft to the last token. A plain answer records its graph anew, so that its steps are timed from the
second token on. Every layer's cache has room for the blocks of all layers: 32,768 tokens of 36
layers need more than this card's memory. Drafts are computed over the next power of two of the
context: 3,968 tokens and 64 new ones stay below 4,096.
"""

import dataclasses
import gc
import importlib
import os
import statistics
import sys
import time
from typing import Any

from ..arguments import SHAPES
from ..report import Row
from ..timing import rounded, step
from .hugging_face import random_model
from .rows import Job, random_prompts, timed

BLOCK = 16
WIDTH = 7
HEAD_LAYERS = 5
BACKEND = "triton_paged_tree_cudagraph_nogather"


def main(path: str) -> None:
    """Measure a job."""
    os.environ.setdefault("JETSPEC_FUSE_GEMMS", "1")
    import torch

    llm: Any = importlib.import_module("jetspec.core.llm")
    adapters: Any = importlib.import_module("jetspec.draft_head_adapter")
    engines: Any = importlib.import_module("jetspec.inference_engine.engine")
    job = Job.read(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step(f"jetspec: {job.drafter or 'plain'}, {job.shape}, on {device}")
    target = random_model(SHAPES[job.shape], device)
    if target.config.model_type != "qwen3":
        raise ValueError(f"jetspec: its compiled verification is Qwen3's, not {job.shape}'s")
    target._jetspec_attn_implementation = "sdpa"
    engines.load_target = lambda *_, **__: (target, NoTokenizer())
    backend, graphed = ("sdpa", adapters.DraftHeadTreeDrafter)
    if device == "cuda":
        backend, graphed = (BACKEND, adapters.GraphedDraftHead)
    engine = engines.JetSpecEngine(job.model, device, torch.bfloat16, attn_backend=backend)
    engine.eos_token_ids = set()
    read = layers_read(target.config.num_hidden_layers)
    sampling = llm.SamplingParams(0.0, job.new_tokens)
    head = random_head(target, device)
    clock = Clock(graphed(head, target, block_size=BLOCK, target_layer_ids=read))

    sample, sampled = engines.sample, list[float]()
    engines.sample = lambda *given: sampled.append(time.perf_counter()) or sample(*given)

    def decoded(prompt: Any) -> tuple[float, int]:
        """Seconds of decoding and its rounds."""
        if job.drafter is None:
            sampled.clear()
            engine.generate(prompt, sampling)
            return sampled[-1] - sampled[1], job.new_tokens - 2
        clock.begin = None
        found = engine.generate_tree(
            prompt,
            clock,
            tree_depth=BLOCK - 1,
            tree_width=WIDTH,
            budget=int(job.drafter.split()[0]),
            target_layer_ids=read,
            sampling_params=sampling,
            return_stats=True,
            session=device == "cuda",
        )
        synchronize()
        assert clock.begin is not None
        return time.perf_counter() - clock.begin, found["rounds"]

    def point(context: int, batch: int) -> Row:
        if batch != 1:
            raise ValueError("jetspec: its graphs are those of one row")
        forget(engine)
        prompt = torch.tensor(random_prompts(target.config.vocab_size, context, 1), device=device)
        decoded(prompt)  # It compiles and captures.
        found = [decoded(prompt) for _ in range(job.repetitions)]
        rounds = statistics.median(rounds for _, rounds in found)
        emitted = rounds if job.drafter is None else job.new_tokens - 1
        return {
            **timed([each for each, _ in found], rounds, emitted),
            "tau": None if job.drafter is None else rounded(emitted / rounds),
            "temperature": 0.0,
        }

    job.measure(point)


def forget(engine: Any) -> None:
    """Free the cache and the graphs of the last context."""
    import torch

    engine._tree_session = None
    for kept in ("_graphed_verify", "_graphed_tree_accept"):
        getattr(engine, kept, {}).clear()
    gc.collect()
    torch.cuda.empty_cache()


@dataclasses.dataclass
class Clock:
    """A drafter that notes when it is asked first, after the prompt."""

    drafter: Any
    begin: float | None = None

    def propose_logits(self, context: Any, depth: int, target_hidden: Any = None) -> Any:
        """The drafter's logits."""
        if self.begin is None:
            synchronize()
            self.begin = time.perf_counter()
        return self.drafter.propose_logits(context, depth, target_hidden=target_hidden)

    def reset_cache(self) -> None:
        """Forget the last prompt, where the drafter keeps one."""
        forget = getattr(self.drafter, "reset_cache", None)
        if forget is not None:
            forget()


class NoTokenizer:
    """Stands where texts are joined; prompts are token ids."""

    eos_token_id = None

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        """No text."""
        return ""


def layers_read(layers: int) -> list[int]:
    """The target's layers that the head reads, as its own rule spreads them."""
    heads: Any = importlib.import_module("jetspec.models.draft_head")
    return heads.build_target_layer_ids(layers, HEAD_LAYERS)


def random_head(target: Any, device: str) -> Any:
    """A draft head of the published form, drawn on the device."""
    import torch
    from transformers.models.qwen3 import Qwen3Config

    heads: Any = importlib.import_module("jetspec.models.draft_head")
    layers = target.config.num_hidden_layers
    fields = target.config.to_dict() | {
        "num_hidden_layers": HEAD_LAYERS,
        "layer_types": ["full_attention"] * HEAD_LAYERS,
        "num_target_layers": layers,
        "block_size": BLOCK,
        "dflash_config": {
            "causal_head": True,
            "mask_token_id": 0,
            "target_layer_ids": layers_read(layers),
        },
    }
    config = Qwen3Config(**fields)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        return heads.DFlashDraftModel(config).to(torch.bfloat16).eval()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
