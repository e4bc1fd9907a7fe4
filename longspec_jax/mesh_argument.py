"""A mesh of devices as the commands take it: ``tp=2``, ``data=2,tp=4``."""

import argparse
import re
from collections.abc import Mapping

from longspec_jax.config import MESH_AXES

GRAMMAR = f"sizes of the axes {', '.join(MESH_AXES)}, such as tp=2 or data=2,tp=4"
_AXIS = re.compile(rf"({'|'.join(MESH_AXES)})=([1-9]\d{{0,5}})")


def mesh_argument(text: str) -> dict[str, int]:
    """The sizes of the axes that an argument names, for ``argparse``."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or match[1] in axes:
            raise argparse.ArgumentTypeError(f"{text!r:.60} must be {GRAMMAR}, each axis once")
        axes[match[1]] = int(match[2])
    return axes


def written(axes: Mapping[str, int]) -> str:
    """The argument that names these axes; empty for none."""
    return ",".join(f"{axis}={size}" for axis, size in axes.items())
