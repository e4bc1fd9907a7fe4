"""A model's folder: a local one as it is, a hub id through Hugging Face's cache."""

import errno
from pathlib import Path

from huggingface_hub import snapshot_download

from longspec_jax.checks import first_line, shown
from longspec_jax.weights.checkpoint import MEDUSA_FILES

FILES = ("*.json", "tokenizer*", "*.model", "*.jinja", "*.txt", "draft_vocabulary.safetensors")
_SAFETENSORS = ("model.safetensors", "model-*.safetensors", MEDUSA_FILES[0])
_PICKLES = ("pytorch_model*.bin", "draft_model_weights.pth", MEDUSA_FILES[1])


def local_folder(source: str | Path, revision: str | None = None) -> Path:
    """The folder that holds a model.

    Args:
      source: a folder, or a hub id such as ``lmsys/vicuna-7b-v1.5-16k``.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileNotFoundError: if there is no such folder and the hub does not have it or is out of reach.
      NotADirectoryError: if a file is named.
      ValueError: if a revision is given for a folder.
    """
    folder = _expanded(source)
    try:
        is_file, is_folder = folder.is_file(), folder.is_dir()
    except (OSError, ValueError) as error:  # A name that is too long, or that has a null byte.
        raise FileNotFoundError(
            f"{shown(str(source))} is not a folder ({_reason(error)}); name a folder with "
            "config.json and weights, or a hub id of the form owner/model"
        ) from error
    if is_file:
        raise NotADirectoryError(
            f"{folder} is a file, not a folder; name the folder that holds config.json and the "
            "weights"
        )
    if is_folder:
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} chooses a version of a hub id, but {source} is a folder; "
                "leave it out"
            )
        return folder
    name = str(source)
    if "://" in name:
        owner_and_model = "/".join(name.split("/")[3:5]) or "owner/model"
        raise FileNotFoundError(f"{name} is an address; name the model alone: {owner_and_model}")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"{folder} is not a folder; name a folder with config.json and weights, or a hub id of "
            "the form owner/model"
        )
    return _download(name, revision)


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
    """A hub model in the local cache; pickles only if it has no safetensors."""
    try:
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=[*FILES, *_SAFETENSORS])
        )
        if not any(any(folder.glob(pattern)) for pattern in _SAFETENSORS):
            snapshot_download(name, revision=revision, allow_patterns=[*FILES, *_PICKLES])
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name!r} is neither a folder here nor could it be fetched from the Hugging Face hub "
            f"({_reason(error)}). Check the name; for a gated model log in with `hf auth login`; "
            "offline (HF_HUB_OFFLINE), download it first and pass its folder"
        ) from error
    return folder
