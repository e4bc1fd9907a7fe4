"""Test session set-up: eight fake CPU devices, and shape annotations that are executed.

Device settings must precede the first use of jax. With ``-m gpu`` the real devices are used.
"""

import os
import sys


def _wants_gpu() -> bool:
    return any("gpu" in a and "not gpu" not in a for a in sys.argv) or bool(
        os.environ.get("LONGSPEC_TEST_GPU")
    )


if not _wants_gpu():
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    import beartype  # noqa: F401
    from jaxtyping import install_import_hook
except ImportError:  # The GPU machine may lack beartype; the CPU suite always has it.
    pass
else:
    install_import_hook(
        ["longspec_jax.ops", "longspec_jax.decoding", "longspec_jax.drafters"], "beartype.beartype"
    )
