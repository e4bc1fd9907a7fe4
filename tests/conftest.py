"""Test session set-up: eight fake CPU devices, shape annotations that are executed, bounded memory.

Device settings must precede the first use of jax. With ``-m gpu`` the real devices are used.
"""

import gc
import os
import signal
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Begun with ``&`` by a shell, and so would be every process that a test begins and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A trace makes so many objects that by default a fifteenth of the time would go into walking all
# those of jax, PyTorch and transformers again and again.
gc.set_threshold(100_000)


HERE = Path(__file__).parent
OUTSIDE_THE_WHEEL = "benchmarks", "contrib"
"""Folders of tests of what users do not get installed."""
SECOND_TIER = "multiproc", "browser"
"""Marks that imply it."""


def _wants_gpu() -> bool:
    # A file or a test may have these letters in its name.
    marked = (a for a in sys.argv[1:] if "/" not in a and ".py" not in a)
    return any("gpu" in a and "not gpu" not in a for a in marked) or bool(
        os.environ.get("LONGSPEC_TEST_GPU")
    )


def pytest_configure(config: Any) -> None:
    from tests.footprint import FootprintCheck

    if not _wants_gpu() and not config.getoption("markexpr").startswith("real"):
        config.pluginmanager.register(FootprintCheck())


@pytest.hookimpl(tryfirst=True)  # Before tests are left out by their marks.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the wheel leaves out, further processes and browsers are of the second tier."""
    for item in items:
        outside = item.path.relative_to(HERE).parts[0] in OUTSIDE_THE_WHEEL
        if outside or any(map(item.get_closest_marker, SECOND_TIER)):
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    gc.freeze()  # What was imported stays, and is not walked at all.


@pytest.fixture(scope="session", autouse=True)
def _programs_are_compiled_once(pytestconfig: pytest.Config) -> None:
    """Keep programs for all processes of this run and of later ones, in pytest's own cache folder.

    ``pytest --cache-clear`` forgets them; ``JAX_COMPILATION_CACHE_DIR`` names another folder. jax
    does not write its files in one step. A file that is read too early is a warning, which
    ``pyproject.toml`` lists, and the program is compiled.
    """
    if _wants_gpu() or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = str(pytestconfig.cache.mkdir("compiled"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder  # Read when jax is imported.
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_compilation_cache_dir", folder)


if _wants_gpu():
    os.environ["LONGSPEC_TEST_GPU"] = "1"  # The workers of pytest-xdist have no such arguments.
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Tests compile many tiny programs once: the compiler's own time is what they cost.
    os.environ["XLA_FLAGS"] = " ".join(
        [
            "--xla_force_host_platform_device_count=8",
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_parallel_codegen_split_count=1",
            # A quarter of the time that a program with loops takes, to make the loops faster.
            "--xla_disable_hlo_passes=while-loop-invariant-code-motion,simplify-while-loops,"
            "while-loop-trip-count-annotator,while-loop-constant-sinking",
            # Of two code generators, the older one takes a quarter of the time; later jaxlibs lack
            # it.
            "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
            os.environ.get("XLA_FLAGS", ""),
        ]
    )
    # Nobody reads which line a program's operations come from.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    if "real" not in sys.argv:
        # Each worker has a core. Threads of PyTorch that wait for each other take it away: four
        # steps of a DFlash draft were 22 seconds of the processors, and are 5.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["LONGSPEC_CACHE"] = "off"  # Nothing that an earlier run kept, nothing timed.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TritonModules(MetaPathFinder):
    """Finds modules with Triton kernels before the hook that executes annotations does.

    Triton compiles the source of the function that it decorates, and cannot read a wrapper.
    """

    NAMES = ("longspec_jax.ops.attention.prefix_triton",)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, path, target) if fullname in self.NAMES else None


try:
    from tests.annotations import execute_annotations
except ImportError:  # The GPU machine may lack beartype; the CPU suite always has it.
    pass
else:
    execute_annotations(
        [
            *("longspec_jax.ops", "longspec_jax.decoding", "longspec_jax.drafters"),
            *("contrib.medusa", "contrib.tokenswift"),
        ]
    )
    sys.meta_path.insert(0, TritonModules())
