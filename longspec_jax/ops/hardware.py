"""What our kernels need to know about the machine, in one place.

The ``require_...`` functions refuse with a sentence, as :mod:`longspec_jax.ops.dispatch` wants it.
"""

import importlib.util

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

AMPERE = (8, 0)
"""The first NVIDIA generation with bfloat16 matrix units and asynchronous copies."""
FLOAT8 = (8, 9)
"""The first with instructions that convert e4m3."""
HOPPER = (9, 0)
MULTIPROCESSORS = 132
"""Of an H100 or H200. Tiles must be a pure function of the shape, whatever the GPU."""
SHARED_BYTES = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (8, 6): 99 << 10}
"""Shared memory a program may use, by compute capability; the least of them where unknown."""
WARPGROUP_ROWS = 64
"""Rows of one warpgroup: the height of Hopper's matrix instruction."""
KERNEL_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
"""What our Triton kernels compute in."""
DECODE_ROWS = 4096
"""Rows of the largest decode step whose small ops are kernels of our own, the nodes of all trees
counted. These give a row the same bits in every step; XLA's norms choose their order by the number
of rows."""


def compute_capability() -> tuple[int, int] | None:
    """The CUDA compute capability of the default device; None where that is no NVIDIA GPU."""
    if jax.default_backend() != "gpu":
        return None
    major, _, minor = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def triton_comes_first() -> bool:
    """Whether Triton's kernels are taken where Mosaic has one, too, that serves from 8.0 on.

    They are while this jax has them: with the others a prompt takes 8 % longer and a round 1 %
    (Llama-3-8B at 4k, ``docs/results/without_triton_h200.json``).
    """
    return triton_is_supported()


def require_mosaic(kernel: str) -> tuple[int, int]:
    """Return the compute capability; refuse machines, and a jax, without kernels for Mosaic."""
    found = require_ampere(kernel)
    _require_mosaic(kernel)
    return found


def require_ampere(kernel: str) -> tuple[int, int]:
    """Return the compute capability; refuse machines without the features of our kernels."""
    found = compute_capability()
    if found is None:
        raise NotImplementedError(
            f"{kernel} needs an NVIDIA GPU and this process computes on "
            f"{jax.default_backend()!r}; choose 'xla'"
        )
    if found < AMPERE:
        raise NotImplementedError(
            f"{kernel} needs compute capability {AMPERE[0]}.{AMPERE[1]} or newer, this GPU has "
            f"{found[0]}.{found[1]}; choose 'xla'"
        )
    return found


def require_hopper(kernel: str) -> None:
    """Refuse machines that are not of the Hopper generation, and older versions of jax."""
    found = compute_capability()
    if found is None or found[0] != HOPPER[0]:
        raise NotImplementedError(
            f"{kernel} is written for compute capability 9.x and this process computes on "
            f"{jax.default_backend()!r} ({found}); choose another attention="
        )
    _require_mosaic(kernel)


def require_one_order(kernel: str) -> bool:
    """Whether this GPU has Hopper's instructions; refuse those without Ampere's, and older jax."""
    return require_mosaic(kernel)[0] == HOPPER[0]


def _require_mosaic(kernel: str) -> None:
    if not mosaic_is_supported():
        raise NotImplementedError(
            f"{kernel} needs jax 0.11 or newer, which needs Python 3.12 or newer, and this is jax "
            f"{jax.__version__}"
        )


def missing_kernels() -> str | None:
    """What this GPU computes slowly for want of kernels, and the remedy; None if it lacks none."""
    found = compute_capability()
    if found is None:
        return None
    if found < AMPERE:
        return (
            f"compute capability {found[0]}.{found[1]} has no bfloat16 and none of our kernels: "
            "XLA computes everything, best in float16. Kernels need a GPU of "
            f"{AMPERE[0]}.{AMPERE[1]} or newer"
        )
    if not triton_is_supported():
        return (
            f"jax {jax.__version__} lacks Pallas' Triton backend: quantised weights, recurrent "
            "layers, windows and caches in 8 bits are slower. Install jax 0.12"
        )
    if found[0] == HOPPER[0] and not mosaic_is_supported():
        return (
            f"jax {jax.__version__} has no Hopper kernels: this GPU decodes more slowly, and in "
            "16 bits the text may differ from plain decoding. Install jax 0.11 or newer, which "
            "needs Python 3.12 or newer"
        )
    return None


def require_decode_step(kernel: str, rows: int, dtype: DTypeLike) -> None:
    """Refuse machines without our kernels, and ops over more rows than a decode step has."""
    require_ampere(kernel)
    if dtype not in KERNEL_DTYPES:
        raise NotImplementedError(f"{kernel} takes bfloat16, float16 and float32, not {dtype}")
    if rows > DECODE_ROWS:
        raise NotImplementedError(f"{kernel} takes up to {DECODE_ROWS} rows, not {rows}")


def has_kernels(dtype: DTypeLike) -> bool:
    """Whether this is a GPU whose attention in this dtype is a kernel of ours."""
    served = dtype in KERNEL_DTYPES and (compute_capability() or (0, 0)) >= AMPERE
    return served and (triton_is_supported() or mosaic_is_supported())


def triton_is_supported() -> bool:
    """Whether this jax has the Triton interface that most kernels are written for."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def mosaic_is_supported() -> bool:
    """Whether this jax has the Mosaic GPU interface that our kernels are written for."""
    return jax.__version_info__ >= (0, 11)
