"""Lossless long-context speculative decoding (LongSpec) in JAX.

This file lists the public names. Each is imported on first use, so ``import longspec_jax`` is
quick, and the configurations can be read without a device.
"""

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

_CONTENTS = {
    # Load, generate, stream, compare, inspect.
    "LongSpec": "longspec_jax.api",
    "demo_prompts": "longspec_jax.embedded",
    "GenerateOptions": "longspec_jax.generation.options",
    "EngineOptions": "longspec_jax.config.serving",
    "LoadOptions": "longspec_jax.config.loading",
    "GenerateResult": "longspec_jax.generation.result",
    "StreamRound": "longspec_jax.generation.result",
    "Stats": "longspec_jax.generation.result",
    "TreeUse": "longspec_jax.generation.result",
    "Comparison": "longspec_jax.generation.comparison",
    "RoundView": "longspec_jax.generation.inspection",
    "MemoryPlan": "longspec_jax.generation.memory",
    # Shapes.
    "TargetConfig": "longspec_jax.config.target",
    "DraftConfig": "longspec_jax.drafters.longspec",
    "TreeConfig": "longspec_jax.config.tree",
    "PLAIN": "longspec_jax.config.tree",
    "PRESETS": "longspec_jax.config.known",
    # Weights and devices.
    "load_target": "longspec_jax.weights.hf",
    "load_draft": "longspec_jax.drafters.checkpoints.longspec",
    "save_target": "longspec_jax.weights.hf",
    "save_draft": "longspec_jax.drafters.checkpoints.longspec",
    "make_mesh": "longspec_jax.sharding",
}
# The imports below, which only type checkers see, repeat the names for them.
__all__ = list(_CONTENTS)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from longspec_jax.api import LongSpec  # noqa: F401
    from longspec_jax.config.known import PRESETS  # noqa: F401
    from longspec_jax.config.loading import LoadOptions  # noqa: F401
    from longspec_jax.config.serving import EngineOptions  # noqa: F401
    from longspec_jax.config.target import TargetConfig  # noqa: F401
    from longspec_jax.config.tree import PLAIN, TreeConfig  # noqa: F401
    from longspec_jax.drafters.checkpoints.longspec import (
        load_draft,  # noqa: F401
        save_draft,  # noqa: F401
    )
    from longspec_jax.drafters.longspec import DraftConfig  # noqa: F401
    from longspec_jax.embedded import demo_prompts  # noqa: F401
    from longspec_jax.generation.comparison import Comparison  # noqa: F401
    from longspec_jax.generation.inspection import RoundView  # noqa: F401
    from longspec_jax.generation.memory import MemoryPlan  # noqa: F401
    from longspec_jax.generation.options import GenerateOptions  # noqa: F401
    from longspec_jax.generation.result import GenerateResult, Stats, StreamRound, TreeUse  # noqa: F401
    from longspec_jax.sharding import make_mesh  # noqa: F401
    from longspec_jax.weights.hf import load_target, save_target  # noqa: F401


def _check_versions(jax: str, flax: str) -> None:
    """Refuse a pair of releases that pip installs together and that fails at import."""
    new_jax, old_flax = _numbers(jax) >= (0, 11, 1), _numbers(flax) <= (0, 12, 8)
    if new_jax and old_flax:
        raise ImportError(
            f"flax {flax} cannot be imported with jax {jax}: jax >= 0.11.1 needs flax >= 0.12.9. "
            "Fix: pip install -U 'flax>=0.12.9' (Python 3.12 or newer), or pip install "
            "'jax==0.10.2'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    parts = [part for part in version.split(".")[:3] if part.isdigit()]
    return tuple(map(int, parts))


def _required(package: str) -> str:
    """The installed version of a required package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"longspec_jax needs {package}, which this Python does not have: pip install -e . in "
            "the checkout, or run the Python of the environment that has it"
        ) from None


_check_versions(_required("jax"), _required("flax"))


def _version() -> str:
    """The installed release; ``0+not.installed`` for a checkout that was never installed."""
    try:
        return metadata.version("longspec_jax")
    except metadata.PackageNotFoundError:
        return "0+not.installed"


__version__ = _version()


def __getattr__(name: str) -> Any:
    if name not in _CONTENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_CONTENTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_CONTENTS)
