"""What processes that a test starts see of their environment."""

import os
from pathlib import Path

WITHOUT_TORCH = Path(__file__).parent / "without_torch"


def environment(*import_from: Path, devices: int = 1, **variables: str) -> dict[str, str]:
    """This process's, with fewer devices, no PyTorch, and these folders to import from."""
    folders = [*import_from, WITHOUT_TORCH]
    # Of an option given twice the last counts.
    devices_option = f"--xla_force_host_platform_device_count={devices}"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices_option}",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        **variables,
    }
