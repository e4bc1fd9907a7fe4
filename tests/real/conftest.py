"""Programs of released models are compiled as users compile them.

The suite's own flags make programs quick to compile and slow to run, and these run for minutes.
"""

import os
from typing import Any


def pytest_configure(config: Any) -> None:
    """Before the first program, in a run of only these tests."""
    if config.getoption("markexpr").startswith("real"):
        os.environ["XLA_FLAGS"] = ""
