"""A stored tensor as every file format offers it: its shape and dtype now, its values by slice."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

Index: TypeAlias = tuple[slice, ...]


class Tensor(NamedTuple):
    """One stored tensor: what it is, and how to read a part of it."""

    shape: tuple[int, ...]
    dtype: str
    """NumPy's name, such as ``bfloat16``."""
    read: Callable[[Index], np.ndarray]
    file: Path


Tensors: TypeAlias = dict[str, Tensor]
