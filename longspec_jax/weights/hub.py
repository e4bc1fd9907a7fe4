"""A model's folder or GGUF file: a local one as it is, a hub id through Hugging Face's cache."""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import list_repo_files, snapshot_download

from longspec_jax.checks import first_line, nearest, shown
from longspec_jax.released import DRAFTS, RELEASED
from longspec_jax.weights.checkpoint import MEDUSA_FILES, WEIGHT_FILES
from longspec_jax.weights.fetching import fetched
from longspec_jax.weights.gguf.file import SUFFIX, parts_of

FILES = ("*.json", "tokenizer*", "*.model", "*.jinja", "*.txt", "draft_vocabulary.safetensors")
_SAFETENSORS = ("model.safetensors", "model-*.safetensors", MEDUSA_FILES[0])
_PICKLES = ("pytorch_model*.bin", "draft_model_weights.pth", MEDUSA_FILES[1])


def local_folder(source: str | Path, revision: str | None = None) -> Path:
    """The folder that holds a model; arguments and errors as in :func:`local_model`.

    Raises:
      NotADirectoryError: also for a GGUF file.
    """
    model = local_model(source, revision)
    if model.is_file():
        raise NotADirectoryError(
            f"{model} is a file, and a folder with config.json and weights is needed here; name one"
        )
    return model


def local_model(source: str | Path, revision: str | None = None) -> Path:
    """The folder that holds a model, or the GGUF file that is one; of a split one, any part.

    Args:
      source: a folder, a GGUF file, a name of :mod:`longspec_jax.released`, a hub id such as
        ``lmsys/vicuna-7b-v1.5-16k``, or that of a file such as ``owner/model/FILE.gguf``. A folder
        or a hub id whose only weights are a GGUF file stands for that file.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileNotFoundError: if there is no such model and the hub does not have it or is out of reach.
      NotADirectoryError: if another file is named.
      ValueError: if a revision is given for a folder or file, or the model has several GGUF files.
    """
    path = _expanded(source)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError) as error:  # A name that is too long, or that has a null byte.
        raise FileNotFoundError(
            f"{shown(str(source))} is not a folder ({_reason(error)}); name a folder with "
            "config.json and weights, a GGUF file, or a hub id of the form owner/model"
        ) from error
    if not (is_file or is_folder) and (name := str(source)) in {*RELEASED, *DRAFTS}:
        if revision is not None:
            raise ValueError(f"revision={revision!r} is of a hub id, and {name} has one version")
        return DRAFTS[name] if name in DRAFTS else fetched(name)
    if is_file and path.suffix != SUFFIX:
        raise NotADirectoryError(
            f"{path} is a file, not a folder; name the folder that holds config.json and the "
            f"weights, or a {SUFFIX} file"
        )
    if is_file or is_folder:
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} chooses a version of a hub id, but {source} is a "
                f"{'file' if is_file else 'folder'}; leave it out"
            )
        return path if is_file else _alone(path, str(source)) or path
    name = str(source)
    if "://" in name:
        owner_and_model = "/".join(name.split("/")[3:5]) or "owner/model"
        raise FileNotFoundError(f"{name} is an address; name only the model: {owner_and_model}")
    parts = name.split("/")
    names_file = len(parts) == 3 and name.endswith(SUFFIX)
    if (len(parts) != 2 and not names_file) or name.startswith((".", "/", "~")):
        meant = nearest(name, (*RELEASED, *DRAFTS))
        raise FileNotFoundError(
            f"{path} is not a folder; name a folder with config.json and weights, a GGUF file, or "
            f"a hub id of the form owner/model{f' (did you mean {meant}?)' if meant else ''}"
        )
    return (
        _download(name, revision)
        if not names_file
        else _file("/".join(parts[:2]), parts[2], revision)
    )


def _alone(folder: Path, name: str) -> Path | None:
    """The GGUF file in a folder without other weights; None if it has none, or others.

    Raises:
      ValueError: if it has several.
    """
    if any((folder / file).is_file() for file in (*WEIGHT_FILES, *MEDUSA_FILES)):
        return None
    return _only([path.name for path in folder.glob(f"*{SUFFIX}")], folder, name)


def _only(names: Iterable[str], folder: Path, source: str) -> Path | None:
    """The one model among names of GGUF files, what models see with aside."""
    files = {parts_of(folder / name)[0] for name in names if not name.startswith("mmproj")}
    if len(files) > 1:
        first, *_ = found = sorted(file.name for file in files)
        raise ValueError(
            f"{source} has {len(found)} GGUF files and no other weights: "
            f"{', '.join(found[:12])}{' ...' * (len(found) > 12)}; name one of them: "
            f"{source}/{first}"
        )
    return next(iter(files), None)


def _expanded(source: str | Path) -> Path:
    """The path, ``~`` being a home folder."""
    if not isinstance(source, str | Path) or not str(source).strip():
        raise ValueError(
            "a model is a folder or a hub id of the form owner/model, got "
            f"{shown(source)}; name one"
        )
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(
            f"{source} is not a folder: {error}; write the folder out instead of ~"
        ) from error


def _reason(error: Exception) -> str:
    """An error's first line without the system's number and the path, or its type."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return f"{first_line(error)}: make room, or name another folder for the cache with HF_HOME"
    return getattr(error, "strerror", None) or first_line(error)


def _download(name: str, revision: str | None) -> Path:
    """A hub model in the local cache; pickles only if it has no safetensors, then GGUF."""
    with _reaching(name):
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=[*FILES, *_SAFETENSORS])
        )
        if any(any(folder.glob(pattern)) for pattern in _SAFETENSORS):
            return folder
        snapshot_download(name, revision=revision, allow_patterns=[*FILES, *_PICKLES])
        if any(any(folder.glob(pattern)) for pattern in _PICKLES):
            return folder
        listed = [file for file in list_repo_files(name, revision=revision) if "/" not in file]
        names = [file for file in listed if file.endswith(SUFFIX)]
    found = _only(names, folder, name)
    return folder if found is None else _file(name, found.name, revision)


def _file(name: str, file: str, revision: str | None) -> Path:
    """A GGUF file of a hub model in the local cache, all its parts if it is split."""
    wanted = [part.name for part in parts_of(Path(file))]
    with _reaching(f"{name}/{file}"):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    if not (folder / wanted[0]).is_file():
        raise FileNotFoundError(f"the hub's {name} has no {wanted[0]}; check the name")
    return folder / wanted[0]


@contextmanager
def _reaching(name: str) -> Iterator[None]:
    """Say what to do where the hub cannot be reached, or lacks a model."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name!r} is neither a folder here nor could it be fetched from the Hugging Face hub "
            f"({_reason(error)}). Check the name; for a gated model log in with `hf auth login`; "
            "offline (HF_HUB_OFFLINE), download it first and pass its folder"
        ) from error
