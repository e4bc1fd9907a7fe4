"""What loading needs beside the weights: a dtype, a tokenizer, room in memory."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from longspec_jax.checks import LARGEST_NUMBER
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.draft import Draft, Target
from longspec_jax.drafters.kinds import is_name
from longspec_jax.drafters.registry import load_draft
from longspec_jax.generation.memory import free_bytes
from longspec_jax.ops.hardware import AMPERE, compute_capability
from longspec_jax.sizes import shown_bytes
from longspec_jax.weights import hf
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.hub import local_folder
from longspec_jax.weights.json_files import JsonObject, read_json
from longspec_jax.weights.tables import target_table


def load_target(
    source: str | Path, dtype: str, *, mesh: Mesh | None = None, revision: str | None = None
) -> tuple[TargetConfig, Any]:
    """Load a target, if there is room for it.

    Args:
      source: a folder or hub id.
      dtype: of parameters and activations; ``auto`` for what this machine computes well.
      mesh: devices to spread it over; the first device if absent.
      revision: branch, tag or commit of a hub id.
    """
    dtype = best_dtype() if dtype == "auto" else dtype
    if mesh is None:
        check_weights_fit(source, dtype, revision)
    return hf.load_target(source, dtype=dtype, mesh=mesh, revision=revision)


def load_with_tokenizer(
    source: str | Path,
    dtype: str,
    *,
    tokenizer: Any = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> Target:
    """Load a target, and the tokenizer beside it at the same time.

    What tokenizers are read with takes seconds to import; a GPU takes seconds to start.

    Args:
      source: a folder or hub id.
      dtype: as of :func:`load_target`.
      tokenizer: instead of the one beside the target.
      mesh: as of :func:`load_target`.
      revision: as there.
    """
    if tokenizer is not None:
        return Target(*load_target(source, dtype, mesh=mesh, revision=revision), tokenizer)
    pool = ThreadPoolExecutor(1)
    # Here, not in the thread: a variable must not be set while a GPU's start reads others.
    with _without_advice():
        try:
            reading = pool.submit(load_tokenizer, source, revision)
            config, params = load_target(source, dtype, mesh=mesh, revision=revision)
            return Target(config, params, reading.result())
        finally:
            pool.shutdown(wait=False)  # A target that is refused is so at once.


def load_drafts(
    sources: Sequence[str | Path],
    target: Target,
    options: Mapping[str, Any],
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> tuple[Draft, ...]:
    """Load drafts of any kind for a target.

    Args:
      sources: names of kinds without weights, folders or hub ids.
      target: what they propose for.
      options: of their kinds, by name; of several drafts, of those that have weights.
      mesh: devices to spread them over; the first device if absent.
      revision: branch, tag or commit of the hub.
    """

    def load(source: str | Path) -> Draft:
        own = {} if is_name(source) and len(sources) > 1 else options
        version = None if is_name(source) else revision
        return load_draft(source, target, own, mesh=mesh, revision=version)

    return tuple(map(load, sources))


_SETTINGS = "tokenizer_config.json"
_GENERIC = "PreTrainedTokenizerFast"
_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def best_dtype() -> str:
    """The dtype ``auto`` stands for: what this machine computes fast and well."""
    if jax.default_backend() == "cpu":
        return "float32"
    capability = compute_capability()
    return "float16" if capability is not None and capability < AMPERE else "bfloat16"


def load_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """The tokenizer beside a target; None if there is none.

    Raises:
      ValueError: if it is damaged, or comes with code of its own, which is never run.
    """
    folder = local_folder(source, revision)
    if not any(folder.glob("tokenizer*")):
        return None
    name = "AutoTokenizer"
    if (folder / _SETTINGS).is_file():
        settings = read_json(folder / _SETTINGS)
        _check_settings(settings)
        name = _GENERIC if _is_generic(folder, settings) else name
    with _without_advice():
        import transformers  # Late: it is slow, and token ids do not need it.

        loader = getattr(transformers, name)
    try:
        return loader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # A damaged file raises anything there, bare Exceptions too.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"{_culprit(folder, error)}: the tokenizer cannot be read ({reason}); download it "
            "again, or pass tokenizer="
        ) from error


def _is_generic(folder: Path, settings: JsonObject) -> bool:
    """Whether tokenizer.json says all there is to know of a tokenizer, as Llama 3's does.

    Then its own class, by which transformers would read it in the end, spares the automatic one's
    imports: PyTorch, where it is installed, and what belongs to it, which take seconds.
    """
    config = folder / "config.json"
    if settings.values.get("tokenizer_class") != _GENERIC or not config.is_file():
        return False
    llama = read_json(config).values.get("model_type") == "llama"
    return llama and (folder / "tokenizer.json").is_file()


@contextmanager
def _without_advice() -> Iterator[None]:
    """Import transformers without its advice, unless it is switched off already.

    Without PyTorch it says that models will not be available, which is untrue of ours; whoever
    imports it alone is still told.
    """
    before = os.environ.get(_ADVICE)
    if before:
        yield
        return
    os.environ[_ADVICE] = "1"
    try:
        yield
    finally:
        del os.environ[_ADVICE]
        if before is not None:
            os.environ[_ADVICE] = before


def _check_settings(settings: JsonObject) -> None:
    """Refuse a tokenizer that is code: transformers would ask for leave and then run it."""
    settings.text("tokenizer_class", "")
    settings.number("model_max_length", LARGEST_NUMBER)
    named = settings.values.get("auto_map")
    if named.get("AutoTokenizer") if isinstance(named, dict) else named:
        raise settings.error(
            "auto_map",
            "names code that would split the text, and code that comes with a model is never run",
            "remove the entry if tokenizer.json says it all, or load the tokenizer yourself and "
            "pass tokenizer=",
        )


def _culprit(folder: Path, error: Exception) -> Path:
    """The file that made a tokenizer fail, as far as that can be told."""
    if any(kind.__name__ == "StrictDataclassError" for kind in type(error).__mro__):
        return folder / "config.json"  # Which transformers reads to choose the tokenizer's class.
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        Tokenizer.from_file(str(file))
    except Exception:
        return file
    return folder / _SETTINGS


def check_weights_fit(source: str | Path, dtype: str, revision: str | None = None) -> None:
    """Raise before loading a target that the default device cannot hold."""
    free = free_bytes()
    if free is None:
        return
    config = target_config(read_json(local_folder(source, revision) / "config.json"), dtype)
    values = sum(math.prod(leaf.shape) for leaf in target_table(config).leaves)
    needed = values * jnp.dtype(config.dtype).itemsize
    if needed > free:
        raise MemoryError(
            f"the weights of {source} take {shown_bytes(needed)} in {config.dtype} and "
            f"{shown_bytes(free)} are free on the device; spread them over several devices with "
            "mesh=make_mesh(tp=...), or free memory"
        )
