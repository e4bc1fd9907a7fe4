"""The models that the arguments of ``python -m infer.decode`` name."""

import argparse
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
from longspec_jax.embedded import DEMO, DRAFTS
from longspec_jax.status_line import StatusLine
from longspec_jax.weights.hub import local_model

from .arguments import drafts, is_demo
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


def fetch(arguments: argparse.Namespace) -> tuple[Path, list[str | Path]]:
    """The folder of the target, and of what proposes for it; from the hub if need be.

    Raises:
      OSError: for a model that is neither here nor there.
    """
    target = DEMO / "target"
    if not is_demo(arguments):
        target = _fetched("target", arguments.target, arguments.revision)
    return target, [] if arguments.tree == PLAIN else [
        named
        if is_name(named)
        else DRAFTS[named]
        if named in DRAFTS
        else _fetched_draft(named, arguments.draft_revision)
        for named in drafts(arguments)
    ]


def _fetched(option: str, source: str, revision: str | None) -> Path:
    try:
        return local_model(source, revision)
    except (OSError, ValueError) as error:
        raise type(error)(f"--{option}: {error}") from error


def _fetched_draft(source: str, revision: str | None) -> str | Path:
    """The draft's folder, behind its module where that is named."""
    module, place = split_module(source)
    folder = _fetched("draft", str(place), revision)
    return f"{module}:{folder}" if module else folder


def load_named(
    arguments: argparse.Namespace, status: StatusLine
) -> tuple[LongSpec, Path, list[str | Path]]:
    """The models that the arguments name, the target's folder, and those of the drafts.

    Raises:
      OSError: for a model that is neither here nor on the hub.
      ValueError: for models that cannot be used, in the words of the command.
    """
    check_devices()
    status.clear()  # What follows prints where it keeps and fetches things.
    keep_programs()
    target, drafts = fetch(arguments)
    status.show("loading the models")
    with command_words():
        return load(arguments, target, drafts), target, drafts


def load(arguments: argparse.Namespace, target: Path, sources: Sequence[str | Path]) -> LongSpec:
    """The models the arguments name, from their folders; the demo if they name none."""
    options: dict[str, Any] = dict(
        attention=arguments.attention,
        prefill_chunk=arguments.prefill_chunk,
        max_num_seqs=arguments.max_num_seqs,
        offload=arguments.offload,
        batch_invariant=arguments.batch_invariant,
        kv_dtype=arguments.kv_dtype,
        adapter=arguments.adapter,
        mesh=make_mesh(**arguments.mesh) if arguments.mesh else None,
        draft=list(sources) or None,
        draft_options=cli.as_options(arguments.draft_option) if sources else None,
    )
    if arguments.dtype != "auto":  # Else what suits the model.
        options["dtype"] = arguments.dtype
    if is_demo(arguments):
        return LongSpec.demo(**options)
    return LongSpec.from_pretrained(target, **options)
