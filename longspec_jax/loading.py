"""Loading: a target and its tokenizer, drafts of any kind, and whether memory suffices."""

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

from longspec_jax.checks import LARGEST_NUMBER, shown_bytes
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.draft import Draft, Target
from longspec_jax.drafters.registry import (
    ARCHITECTURES,
    LONGSPEC,
    NAMED,
    SMALL_LM,
    Kind,
    is_name,
    options_of,
    separated,
)
from longspec_jax.drafters.retrieval.draft import RetrievalDraft, RetrievalOptions
from longspec_jax.generation.memory import free_bytes
from longspec_jax.ops.hardware import AMPERE, compute_capability
from longspec_jax.weights import hf
from longspec_jax.weights.checkpoint import holds
from longspec_jax.weights.hf_config import FAMILIES, target_config
from longspec_jax.weights.hub import local_folder
from longspec_jax.weights.json_files import JsonObject, read_json
from longspec_jax.weights.tables import target_table


def load_target(
    source: str | Path, dtype: str, *, mesh: Mesh | None = None, revision: str | None = None
) -> tuple[TargetConfig, Any]:
    """Load a target, if the device has memory for it.

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

    The tokenizer's library takes seconds to import, and a GPU takes seconds to start.

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
    # Here, not in the thread: the environment must not change while the start of a GPU reads it.
    with _without_advice():
        try:
            reading = pool.submit(load_tokenizer, source, revision)
            config, params = load_target(source, dtype, mesh=mesh, revision=revision)
            return Target(config, params, reading.result())
        finally:
            pool.shutdown(wait=False)  # A bad target is refused at once.


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
    return tuple(
        load_draft(source, target, own, mesh=mesh, revision=version)
        for source, own, version in _with_options(sources, options, revision)
    )


def check_draft_options(
    sources: Sequence[str | Path], options: Mapping[str, Any], revision: str | None = None
) -> None:
    """Raise for a draft that is missing or options that it does not have, before weights are read.

    Arguments as of :func:`load_drafts`.
    """
    for source, own, version in _with_options(sources, options, revision):
        _kind_and_options(source, own, version)


def load_draft(
    source: str | Path,
    target: Target,
    options: Mapping[str, Any],
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> Draft:
    """Load a draft of any kind.

    With ``retrieve`` among the options the target verifies its trees over retrieved context before
    it verifies in full.

    Args:
      source: the name of a kind without weights, or a folder or hub id.
      target: what it proposes for.
      options: of its kind, and those of
        :class:`~longspec_jax.drafters.retrieval.draft.RetrievalOptions`, by name.
      mesh: devices to spread it over; the first device if absent.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileNotFoundError: if there is no such draft, or one of its files is missing.
      ValueError: for an unknown option or a wrong value, or a draft of another target.
    """
    kind, chosen, retrieval = _kind_and_options(source, options, revision)
    draft = chosen
    if not is_name(source):
        draft = kind.load(source, target, chosen, mesh=mesh, revision=revision)
    return draft if retrieval is None else RetrievalDraft(draft, target.config, retrieval)


def _with_options(
    sources: Sequence[str | Path], options: Mapping[str, Any], revision: str | None
) -> Iterator[tuple[str | Path, Mapping[str, Any], str | None]]:
    """Every draft with its options and its version."""
    for source in sources:
        named = is_name(source)
        yield source, {} if named and len(sources) > 1 else options, None if named else revision


def _kind_and_options(
    source: str | Path, options: Mapping[str, Any], revision: str | None
) -> tuple[Kind, Any, RetrievalOptions | None]:
    """A draft's kind, its own options and those about retrieval; reads no weights."""
    own, retrieval = separated(options, str(source))
    kind = NAMED[str(source)] if is_name(source) else _kind_of(local_folder(source, revision))
    return kind, options_of(kind, own, str(source)), retrieval


_EMBEDDING = "model.embed_tokens.weight"
"""A tensor of every language model, and of no LongSpec draft."""


def _kind_of(folder: Path) -> Kind:
    """The kind of a folder's draft."""
    names = read_json(folder / "config.json").texts("architectures")
    if kind := next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None):
        return kind
    # The published LongSpec drafts may name their target's architecture; they have no embedding.
    whole = any(name in FAMILIES for name in names) and holds(folder, _EMBEDDING)
    return SMALL_LM if whole else LONGSPEC


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
    """Whether tokenizer.json alone defines the tokenizer, as Llama 3's does.

    Its class is the one that transformers' automatic class would choose. Naming it avoids the
    imports of the automatic one, such as PyTorch, which take seconds.
    """
    config = folder / "config.json"
    if settings.values.get("tokenizer_class") != _GENERIC or not config.is_file():
        return False
    llama = read_json(config).values.get("model_type") == "llama"
    return llama and (folder / "tokenizer.json").is_file()


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence a warning of transformers, unless it is switched off already.

    Without PyTorch it warns that no models are available, which is wrong for ours.
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
    """Refuse a tokenizer with code of its own: transformers would ask and then run it."""
    settings.text("tokenizer_class", "")
    settings.number("model_max_length", LARGEST_NUMBER)
    named = settings.values.get("auto_map")
    if named.get("AutoTokenizer") if isinstance(named, dict) else named:
        raise settings.error(
            "auto_map",
            "names code that would split the text, and code that comes with a model is never run",
            "remove the entry if tokenizer.json is complete, or load the tokenizer yourself and "
            "pass tokenizer=",
        )


def _culprit(folder: Path, error: Exception) -> Path:
    """The file that most likely made a tokenizer fail."""
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
