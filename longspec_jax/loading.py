"""What loading needs beside the weights: a dtype, a tokenizer, room in memory, the demo's folder."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.generation.memory import free_bytes, tree_bytes
from longspec_jax.models.target import Target
from longspec_jax.ops.hardware import AMPERE, compute_capability
from longspec_jax.weights.checkpoint import read_json
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.hub import local_folder

DEMO = Path(__file__).parent / "demo"
"""The embedded demo: a small target, its draft and sample prompts."""


def best_dtype() -> str:
    """The dtype ``auto`` stands for: what this machine computes fast and well."""
    if jax.default_backend() == "cpu":
        return "float32"
    capability = compute_capability()
    return "float16" if capability is not None and capability < AMPERE else "bfloat16"


def load_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """The tokenizer beside a target; None if there is none."""
    from transformers import AutoTokenizer  # Slow to import, and not needed for token ids.

    folder = local_folder(source, revision)
    if not any(folder.glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the tokenizer in {folder} cannot be read ({error}); download it again, or pass "
            "tokenizer="
        ) from error


def check_weights_fit(source: str | Path, dtype: str, revision: str | None = None) -> None:
    """Raise before loading a target that the default device cannot hold."""
    free = free_bytes()
    if free is None:
        return
    config = target_config(read_json(local_folder(source, revision) / "config.json"), dtype)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    init = functools.partial(Target(config).init, method="initialize")
    needed = tree_bytes(jax.eval_shape(init, jax.random.key(0), tokens))
    if needed > free:
        raise MemoryError(
            f"the weights of {source} take {needed / 2**30:.2f} GiB in {dtype} and "
            f"{free / 2**30:.2f} GiB are free on the device; spread them over several devices with "
            "mesh=make_mesh(tp=...), or free memory"
        )


@functools.cache
def demo_prompts() -> dict[str, str]:
    """The sample prompts that come with the package, held out from the demo's training."""
    return {path.stem: path.read_text("utf-8") for path in sorted(DEMO.glob("prompts/*.txt"))}
