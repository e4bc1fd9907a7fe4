"""The models that the arguments of ``python -m infer.decode`` name."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from longspec_jax import PLAIN, LongSpec, make_mesh
from longspec_jax.drafters.registry import is_name
from longspec_jax.embedded import DEMO, DRAFTS
from longspec_jax.weights.hub import local_folder

from .arguments import DTYPES, drafters, is_demo


def check_devices() -> None:
    """Refuse a platform that jax cannot start, in words: some fail without any."""
    platforms = os.environ.get("JAX_PLATFORMS")
    try:
        jax.devices()
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises.
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
        else _fetched("drafter", named, arguments.drafter_revision)
        for named in drafters(arguments)
    ]


def _fetched(option: str, source: str, revision: str | None) -> Path:
    try:
        return local_folder(source, revision)
    except (OSError, ValueError) as error:
        raise type(error)(f"--{option}: {error}") from error


def load(arguments: argparse.Namespace, target: Path, drafts: Sequence[str | Path]) -> LongSpec:
    """The models the arguments name, from their folders; the demo if they name none."""
    options: dict[str, Any] = dict(
        attention=arguments.attention,
        prefill_chunk=arguments.prefill_chunk,
        row_slots=arguments.row_slots,
        offload=arguments.offload,
        mesh=make_mesh(**arguments.mesh) if arguments.mesh else None,
        draft=list(drafts) or None,
        draft_options=dict(arguments.drafter_option or ()) if drafts else None,
    )
    if arguments.dtype != "auto":  # What suits a model is its own to know.
        options["dtype"] = DTYPES.get(arguments.dtype, arguments.dtype)
    if is_demo(arguments):
        return LongSpec.demo(**options)
    return LongSpec.from_pretrained(target, **options)
