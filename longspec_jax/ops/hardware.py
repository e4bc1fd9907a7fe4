"""What the attention kernels ask of the machine, in one place."""

import jax

AMPERE = (8, 0)
"""The first NVIDIA generation with bfloat16 matrix units and asynchronous copies."""
HOPPER = (9, 0)


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


def mosaic_is_supported() -> bool:
    """Whether this jax has the Mosaic GPU interface that the Hopper kernel is written for."""
    return jax.__version_info__ >= (0, 11)
