"""Tensors of ``.bin`` and ``.pth`` files, for those who have torch installed.

Such files are pickles; they are read with ``weights_only=True``, which runs no code of theirs.
"""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from longspec_jax.weights.tensors import Index, Tensor, Tensors


def open_torch(path: Path) -> Tensors:
    """The tensors of one file, memory-mapped where its format allows.

    Raises:
      ValueError: if torch is not installed, the file is damaged or holds anything but tensors.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"{path} is a torch pickle and torch is not installed; install torch, or convert the "
            "model to safetensors"
        ) from error
    try:
        # Files older than torch 1.6 are no zip archives and cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        # Torch's own message advises to switch the protection off: it is chained, not repeated.
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is damaged, or holds more than tensors, which "
            "weights_only=True does not load; download it again, or use safetensors"
        ) from error
    strange = _strange(state, torch)
    if strange:
        raise ValueError(f"{path} must be a flat dictionary of tensors, but holds {strange}")
    return {name: _tensor(path, tensor, torch) for name, tensor in state.items()}


def _strange(state: Any, torch: Any) -> str | None:
    """What in a loaded file is not a named tensor."""
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    others = {k: type(v).__name__ for k, v in state.items() if not isinstance(v, torch.Tensor)}
    return str(others) if others else None


def _tensor(path: Path, tensor: Any, torch: Any) -> Tensor:
    """One torch tensor as a readable one."""
    dtype = str(tensor.dtype).removeprefix("torch.")

    def read(index: Index) -> np.ndarray:
        part = tensor.detach()[index].contiguous()  # Saved parameters still want gradients.
        if dtype == "bfloat16":  # NumPy has no bfloat16 of its own: pass the bits.
            return part.view(torch.int16).numpy().view(jnp.bfloat16)
        return part.numpy()

    return Tensor(tuple(tensor.shape), dtype, read, path)
