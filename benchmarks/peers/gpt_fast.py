"""gpt-fast: needs its ``generate.py``, ``model.py`` and ``tokenizer.py`` in a folder ``gptfast``.

Plain steps of batch 1 as its README measures them: ``torch.compile`` with CUDA graphs, flex
attention, temperature 0.8 of the 200 likeliest tokens. Weights are random and so is the cache,
which stands for a prompt. It turns positions by the original rule, whatever the shape's.
"""

import importlib
import importlib.util
import sys
import time
from typing import Any

from longspec_jax.config.target import TargetConfig

from ..arguments import SHAPES
from ..report import Row
from ..timing import step
from .rows import Job, timed

WARM_TOKENS = 6
"""Steps before the first timed one: compilation, and the recordings of a CUDA graph."""
SAMPLING = {"temperature": 0.8, "top_k": 200}


def main(path: str) -> None:
    """Measure a job."""
    import torch

    spec = importlib.util.find_spec("gptfast")
    assert spec is not None and spec.submodule_search_locations is not None
    sys.path[:0] = spec.submodule_search_locations  # Its modules import each other by name.
    models: Any = importlib.import_module("model")
    decoder: Any = importlib.import_module("generate")
    job = Job.read(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step(f"gpt-fast: {job.shape}, on {device}")
    decoder.decode_one_token = torch.compile(
        decoder.decode_one_token,
        **({"mode": "reduce-overhead", "fullgraph": True} if device == "cuda" else {}),
    )

    def point(context: int, batch: int) -> Row:
        if batch != 1:
            raise ValueError("gpt-fast: its steps are those of one row")
        torch.compiler.reset()
        room = context + WARM_TOKENS + (2 + job.new_tokens) * job.repetitions
        arguments = models.ModelArgs(**fields(SHAPES[job.shape], room))
        with torch.device(device), torch.no_grad():
            torch.set_default_dtype(torch.bfloat16)
            model = models.Transformer(arguments).eval()
            model.setup_caches(max_batch_size=1, max_seq_length=room)
            for layer in model.layers:
                for cache in layer.attention.kv_cache.buffers():
                    cache.normal_()
            token = torch.zeros((1, 1), dtype=torch.int, device=device)
            position = torch.tensor([context], dtype=torch.int, device=device)

            def decode(steps: int) -> float:
                begin = time.perf_counter()
                tokens, _ = decoder.decode_n_tokens(model, token, position, steps, **SAMPLING)
                tokens[-1].tolist()  # Waits for the device.
                return time.perf_counter() - begin

            decode(WARM_TOKENS)
            # Every answer makes its mask anew, over all pairs of tokens; one of one token, too.
            pairs = [(decode(1 + job.new_tokens), decode(1)) for _ in range(job.repetitions)]
        seconds = [whole - one for whole, one in pairs]
        return timed(seconds, job.new_tokens, job.new_tokens) | {
            "temperature": SAMPLING["temperature"]
        }

    job.measure(point)


def fields(config: TargetConfig, room: int) -> dict[str, Any]:
    """Its ``ModelArgs`` of a shape, whose positions are as many as the room."""
    if config.head_width * config.num_heads != config.model_width:
        raise ValueError("gpt-fast: heads share the model's width")
    return {
        "block_size": room,
        "vocab_size": config.vocab_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_local_heads": config.num_kv_heads,
        "dim": config.model_width,
        "intermediate_size": config.mlp_width,
        "rope_base": config.rope_theta,
        "norm_eps": config.norm_eps,
    }


if __name__ == "__main__":
    main(sys.argv[1])
