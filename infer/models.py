"""The models that the arguments of ``python -m infer.decode`` name."""

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from longspec_jax import PLAIN, LongSpec, cli, make_mesh
from longspec_jax.compilation import keep_programs
from longspec_jax.drafters.registry import is_name, split_module
from longspec_jax.embedded import DRAFTS, demo_target
from longspec_jax.status_line import StatusLine
from longspec_jax.weights.hub import local_model

from .arguments import Models
from .wording import command_words


def start_devices() -> threading.Thread:
    """Have jax start its devices, a second on a GPU, while other things are imported.

    Asking jax for devices waits for this start, or raises what went wrong.

    Returns:
      The thread, alive for as long as that takes.
    """

    def start() -> None:
        with contextlib.suppress(Exception):  # jax.devices() raises it again.
            jax.devices()

    thread = threading.Thread(target=start, name="devices", daemon=True)
    thread.start()
    return thread


def check_devices() -> None:
    """Refuse a platform that jax cannot start, with a message: some fail without one."""
    platforms = os.environ.get("JAX_PLATFORMS")
    try:
        jax.devices()
    except Exception as error:  # noqa: BLE001 - plugins raise anything.
        if not platforms:
            raise
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"JAX_PLATFORMS={platforms} names a platform that jax cannot start here ({reason}); "
            "unset it, or install the jax that has it, such as longspec_jax[cuda12]"
        ) from error


def fetch(models: Models) -> tuple[Path, list[str | Path]]:
    """The folder of the target, and of what proposes for it; from the hub if need be.

    Raises:
      OSError: for a model that is neither here nor there.
    """
    if models.target is None or models.is_demo:
        target = demo_target()
    else:
        target = _fetched("target", models.target, models.options["revision"])
    return target, [] if models.tree == PLAIN else [
        named
        if is_name(named)
        else DRAFTS[named]
        if named in DRAFTS
        else _fetched_draft(named, models.options["draft_revision"])
        for named in models.drafts
    ]


def _fetched(option: str, source: str, revision: str | None) -> Path:
    try:
        return local_model(source, revision)
    except (OSError, ValueError) as error:
        raise type(error)(f"--{option}: {error}") from error


def _fetched_draft(source: str, revision: str | None) -> str | Path:
    """The draft's folder, after its module where that is named."""
    module, place = split_module(source)
    folder = _fetched("draft", str(place), revision)
    return f"{module}:{folder}" if module else folder


def load_named(models: Models, status: StatusLine) -> LongSpec:
    """The models that a command names.

    Raises:
      OSError: for a model that is neither here nor on the hub.
      ValueError: for models that cannot be used, in the words of the command.
    """
    check_devices()
    status.clear()  # What follows prints where it keeps and fetches things.
    keep_programs()
    target, sources = fetch(models)
    status.show("loading the models")
    with command_words():
        return load(models, target, sources)


def load(models: Models, target: Path, sources: Sequence[str | Path]) -> LongSpec:
    """The models, from their folders."""
    own: dict[str, Any] = {"revision": None, "draft_revision": None}  # They are fetched.
    if models.is_demo and models.options["dtype"] == "auto":
        own["dtype"] = "float32"  # A model as small as the demo's gains nothing from 16 bits.
    return LongSpec.from_pretrained(
        target,
        [*sources] or None,
        draft_options=cli.as_options(models.draft_option) if sources else None,
        mesh=make_mesh(**models.mesh) if models.mesh else None,
        **{**models.options, **own},
    )
