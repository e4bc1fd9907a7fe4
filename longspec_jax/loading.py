"""Loading: a target and its tokenizer, drafts of any kind, and whether memory suffices."""

import importlib
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from longspec_jax.checks import LARGEST_NUMBER, Tokenizer, shown_bytes
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.draft import Draft, Target
from longspec_jax.drafters.joined import JoinedDraft
from longspec_jax.drafters.ngram import NgramDraft
from longspec_jax.drafters.registry import (
    CONTRIBUTED,
    MTP,
    NAMED,
    OWN,
    Kind,
    is_name,
    kind_of_config,
    kind_of_module,
    kind_of_tensors,
    options_of,
    separated,
    split_module,
)
from longspec_jax.drafters.retrieval.hierarchy import RetrievalDraft, RetrievalOptions
from longspec_jax.generation.memory import free_bytes
from longspec_jax.ops.hardware import AMPERE, compute_capability
from longspec_jax.weights import hf
from longspec_jax.weights.adapter import own_name
from longspec_jax.weights.families import FAMILIES, WRAPPERS
from longspec_jax.weights.gguf.file import read_gguf
from longspec_jax.weights.gguf.tokenizer import gguf_tokenizer
from longspec_jax.weights.hub import local_model
from longspec_jax.weights.json_files import JsonObject, read_json
from longspec_jax.weights.model_files import names_of_tensors, read_config

_SETTINGS = "tokenizer_config.json"
SENTENCES = "tokenizer.model"
"""A tokenizer of sentencepiece; some folders have only this one."""
_GENERIC = "PreTrainedTokenizerFast"
_importing = threading.Lock()


def load_target(
    source: str | Path,
    dtype: str,
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
    kv_dtype: str | None = None,
    adapter: str | Path | None = None,
    packed: bool | None = None,
) -> tuple[TargetConfig, Any]:
    """Load a target, if the device has memory for it.

    Arguments as in :meth:`longspec_jax.LongSpec.from_pretrained`; ``packed`` as in
    :func:`longspec_jax.weights.hf.load_target`.
    """
    dtype = best_dtype() if dtype == "auto" else dtype
    if mesh is None:
        check_weights_fit(source, dtype, revision, packed)
    return hf.load_target(
        source,
        dtype=dtype,
        mesh=mesh,
        revision=revision,
        kv_dtype=kv_dtype,
        adapter=adapter,
        packed=packed,
    )


def load_with_tokenizer(
    source: str | Path,
    dtype: str,
    *,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
    kv_dtype: str | None = None,
    adapter: str | Path | None = None,
) -> Target:
    """Load a target, and the tokenizer next to it at the same time.

    The tokenizer's library takes seconds to import, and a GPU takes seconds to start. Arguments as
    of :meth:`longspec_jax.LongSpec.from_pretrained`.
    """
    load = partial(load_target, source, dtype, mesh=mesh, revision=revision)
    load = partial(load, kv_dtype=kv_dtype, adapter=adapter)
    if tokenizer is not None:
        config, params = load()
        return Target(config, params, tokenizer)
    pool = ThreadPoolExecutor(1)
    try:
        reading = pool.submit(load_tokenizer, source, revision)
        config, params = load()
        return Target(config, params, reading.result())
    finally:
        pool.shutdown(wait=False)  # A bad target is refused at once.


class ChosenDraft(NamedTuple):
    """A draft that was found, with its options checked; its weights are not read yet."""

    source: str | Path
    revision: str | None
    kind: Kind
    options: Any
    """Of its kind; of a kind without weights the draft itself."""
    retrieval: RetrievalOptions | None
    """With them the target verifies trees over retrieved context before it verifies in full."""

    def load(self, target: Target, mesh: Mesh | None = None) -> Draft:
        """Read its weights.

        Raises:
          FileNotFoundError: if one of its files is missing.
          ValueError: for a draft of another target.
        """
        draft = self.options
        if self.kind.loader:
            load = self.kind.load
            draft = load(self.source, target, draft, mesh=mesh, revision=self.revision)
        if self.retrieval is None:
            return draft
        tree = self.retrieval.retrieve_tree
        if tree is not None and TreeConfig.parse(tree).lookup:
            draft = JoinedDraft(with_lookup((draft,)))
        return RetrievalDraft(draft, target.config, self.retrieval)


def choose_drafts(
    sources: Sequence[str | Path],
    options: Mapping[str, Any],
    revision: str | None = None,
    target: Path | None = None,
) -> tuple[ChosenDraft, ...]:
    """Find drafts of any kind and check their options; reads no weights.

    Args:
      sources: names of kinds without weights, folders or hub ids, these also as ``MODULE:FOLDER``;
        or ``mtp``, the target's own layer.
      options: of their kinds and about retrieval, by name; of several drafts, of those that have
        weights.
      revision: branch, tag or commit of the hub.
      target: the target's folder or GGUF file. Named as a draft it stands for its own layer, and
        another whole model for itself.

    Raises:
      FileNotFoundError: if there is no such draft.
      ValueError: for an unknown option or a wrong value, or a module that brings no kind.
    """
    chosen = []
    for source in sources:
        named = is_name(source)
        given = {} if source in NAMED and len(sources) > 1 else options
        own, retrieval = separated(given, str(source))
        module, place = split_module(source)
        if source == OWN:
            kind, place = MTP, target or place
        elif named:
            kind = NAMED[str(source)]
        elif module:
            kind = kind_of_module(module)
        else:
            kind = _kind_of(local_model(source, revision), target)
        found = options_of(kind, own, str(source))
        chosen.append(ChosenDraft(place, None if named else revision, kind, found, retrieval))
    return tuple(chosen)


def with_lookup(drafts: tuple[Draft, ...]) -> tuple[Draft, ...]:
    """The drafts with prompt lookup next to them, which costs next to nothing.

    Not next to drafts that look up themselves, nor next to partial verification, which proposes a
    single path (:mod:`longspec_jax.drafters.retrieval`).
    """
    if not drafts or any(draft.looks_up or not draft.joins for draft in drafts):
        return drafts
    return (*drafts, NgramDraft())


def _kind_of(model: Path, target: Path | None) -> Kind:
    """The kind of a draft in a folder, or in a GGUF file."""
    raw = read_config(model)
    names = raw.texts("architectures")
    for mark, module in CONTRIBUTED.items():
        if mark in names or raw.values.get(mark):
            raise ValueError(
                f"{raw.origin}: {mark} marks a draft of {module}, which is in a checkout of the "
                f"project and not installed with it; name {module}:{model} there"
            )
    if (kind := kind_of_config(names, raw.values)) is not None:
        return kind
    tensors = names_of_tensors(model)
    # The published LongSpec drafts may name their target's architecture; they have no embedding.
    known = any(name in FAMILIES or name in WRAPPERS for name in names)
    whole = known and hf.EMBEDDING in map(own_name, tensors)
    own = target is not None and model.samefile(target)
    return kind_of_tensors(tensors, whole=whole, own=own)


def best_dtype() -> str:
    """The dtype ``auto`` stands for: what this machine computes fast and well."""
    if jax.default_backend() == "cpu":
        return "float32"
    capability = compute_capability()
    return "float16" if capability is not None and capability < AMPERE else "bfloat16"


def load_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """The tokenizer next to a target, or in its GGUF file; None if there is none.

    Raises:
      ValueError: if it is damaged, or comes with code of its own, which is never run.
    """
    folder = local_model(source, revision)
    if folder.is_file():
        return gguf_tokenizer(read_gguf(folder))
    if not any(folder.glob("tokenizer*")):
        return None
    name = "AutoTokenizer"
    if (folder / _SETTINGS).is_file():
        settings = read_json(folder / _SETTINGS)
        _check_settings(settings)
        name = _GENERIC if _is_generic(folder, settings) else name
    loader = _imported(name)
    try:
        return loader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # A damaged file raises anything there, bare Exceptions too.
        culprit = _culprit(folder, error)
        if culprit.name == SENTENCES and (absent := _absent_readers()):
            raise ValueError(
                f"{culprit}: the tokenizer cannot be read without packages that are not installed: "
                f"pip install {absent}"
            ) from error
        if culprit.name == SENTENCES:  # Transformers speaks of its last attempt, another format.
            error = _sentencepiece_error(culprit) or error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"{culprit}: the tokenizer cannot be read ({reason}); download it again, or, if it is "
            "newer than the packages here, pip install --upgrade transformers tokenizers, or pass "
            "tokenizer="
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


def _imported(name: str) -> Any:
    """A class of transformers, which is imported late: it is slow, and token ids do not need it.

    One thread at a time imports it. It puts another module into its place at the end, so a second
    thread that meets the import under way would get the first module, which has no classes.
    """
    logger = logging.getLogger("transformers")
    with _importing:
        # Without PyTorch it says that no models are available. The environment could silence it,
        # but must not change while the start of a GPU reads it.
        logger.addFilter(_is_not_about_torch)
        try:
            import transformers

            return getattr(transformers, name)
        finally:
            logger.removeFilter(_is_not_about_torch)


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch" not in record.getMessage()


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
    if not file.is_file() and (folder / SENTENCES).is_file():
        return folder / SENTENCES
    try:
        Tokenizer.from_file(str(file))
    except Exception:
        return file
    return folder / _SETTINGS


def _absent_readers() -> str:
    """What is not installed of the packages that read a ``tokenizer.model``, for pip."""
    readers = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
    return " ".join(name for module, name in readers.items() if not _is_installed(module))


def _is_installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _sentencepiece_error(file: Path) -> Exception | None:
    """Why sentencepiece cannot read a file; None if it can."""
    from sentencepiece import SentencePieceProcessor

    try:
        SentencePieceProcessor(model_file=str(file))
    except Exception as error:
        return error
    return None


def check_weights_fit(
    source: str | Path, dtype: str, revision: str | None = None, packed: bool | None = None
) -> None:
    """Raise before loading a target that the default device cannot hold."""
    free = free_bytes()
    if free is None:
        return
    needed = hf.target_bytes(source, dtype=dtype, revision=revision, packed=packed)
    if needed > free:
        raise MemoryError(
            f"the weights of {source} take {shown_bytes(needed)} in {dtype} and "
            f"{shown_bytes(free)} are free on the device; spread them over several devices with "
            "mesh=make_mesh(tp=...), or free memory"
        )
