"""The models that the arguments of ``python -m infer.decode`` name."""

import argparse
import os
from pathlib import Path
from typing import Any

import jax

from longspec_jax import PLAIN, LongSpec
from longspec_jax.embedded import DEMO
from longspec_jax.weights.hub import local_folder

from .arguments import DTYPES, is_demo


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
            f"unset "
            "it, or install the jax that has it, such as longspec_jax[cuda12]"
        ) from error


def fetch(arguments: argparse.Namespace) -> dict[str, Path]:
    """The folders of ``target`` and ``draft`` as far as they are named; from the hub if need be.

    Raises:
      OSError: for a model that is neither here nor there.
    """
    named = {"target": arguments.revision, "draft": arguments.draft_revision}
    if is_demo(arguments):
        del named["target"]
    if arguments.draft is None or arguments.tree == PLAIN:
        del named["draft"]
    folders = {}
    for option, revision in named.items():
        try:
            folders[option] = local_folder(getattr(arguments, option), revision)
        except (OSError, ValueError) as error:
            raise type(error)(f"--{option}: {error}") from error
    return folders


def load(arguments: argparse.Namespace, folders: dict[str, Path]) -> LongSpec:
    """The models the arguments name, from their folders; the demo if they name none."""
    options: dict[str, Any] = dict(
        attention=arguments.attention,
        prefill_chunk=arguments.prefill_chunk,
        draft_vocabulary=arguments.draft_vocabulary,
        draft_int8=arguments.draft_int8,
    )
    if arguments.dtype != "auto":  # What suits a model is its own to know.
        options["dtype"] = DTYPES.get(arguments.dtype, arguments.dtype)
    if is_demo(arguments) and arguments.draft is None:
        return LongSpec.demo(**options)
    return LongSpec.from_pretrained(
        folders.get("target", DEMO / "target"), folders.get("draft"), **options
    )
