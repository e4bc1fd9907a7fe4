"""What our kernels ask of the machine, in one place."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

AMPERE = (8, 0)
"""The first NVIDIA generation with bfloat16 matrix units and asynchronous copies."""
HOPPER = (9, 0)
MULTIPROCESSORS = 132
"""Of an H100 or H200; what matters is that tiles are a pure function of the shape."""
SHARED_BYTES = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (8, 6): 99 << 10}
"""Shared memory a program may use, by compute capability; the least of them where unknown."""
WARPGROUP_ROWS = 64
"""Rows of one warpgroup: the height of Hopper's matrix instruction."""
DECODE_ROWS = 512
"""Up to so many rows a layer's small ops are bound by their launches."""


def compute_capability() -> tuple[int, int] | None:
    """The CUDA compute capability of the default device; None where that is no NVIDIA GPU."""
    if jax.default_backend() != "gpu":
        return None
    major, _, minor = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def require_ampere(kernel: str) -> tuple[int, int]:
    """Return the compute capability, or refuse with the reason."""
    found = compute_capability()
    if found is None:
        raise NotImplementedError(
            f"{kernel} compiles for NVIDIA GPUs and this process computes on "
            f"{jax.default_backend()!r}; choose implementation='xla'"
        )
    if found < AMPERE:
        raise NotImplementedError(
            f"{kernel} needs compute capability {AMPERE[0]}.{AMPERE[1]} or newer, this GPU has "
            f"{found[0]}.{found[1]}; choose implementation='xla'"
        )
    return found


def require_hopper(kernel: str) -> None:
    """Refuse other machines with the reason."""
    found = compute_capability()
    if found is None or found[0] != HOPPER[0]:
        raise NotImplementedError(
            f"{kernel} is written for compute capability 9.x and this process computes on "
            f"{jax.default_backend()!r} ({found}); choose another implementation"
        )


def decodes_on_ampere(rows: int, dtype: Any) -> bool:
    """Whether an op over so many rows belongs to a decode step on a GPU that our kernels serve."""
    return rows <= DECODE_ROWS and has_kernels(dtype)


def has_kernels(dtype: Any) -> bool:
    """Whether this is a GPU that our Triton kernels serve, in this dtype."""
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return False
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return False
    return (compute_capability() or (0, 0)) >= AMPERE


def is_hopper() -> bool:
    """Whether the default device is of the generation the Mosaic GPU kernels are written for."""
    return (compute_capability() or (0, 0))[0] == HOPPER[0]


def mosaic_is_supported() -> bool:
    """Whether this jax has the Mosaic GPU interface that the Hopper kernel is written for."""
    return jax.__version_info__ >= (0, 11)
