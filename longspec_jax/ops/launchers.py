"""Functions that launch a kernel: each is lowered once for all programs that run it.

Lowering a kernel is Python, 0.1 to 0.3 s of it and with Mosaic up to some seconds, and jax does it
again in every program: a round over Vicuna-7B has 40 kernels and takes 4 s to lower, of which 3 are
spent on kernels that the last program had as well. A server compiles some hundred programs. So a
launcher exports its kernel (:mod:`jax.export`) when it first meets a shape, and programs take in
the exported module. Where programs are kept between processes, so are these modules.

On a mesh it is called in the share of a device (:func:`longspec_jax.ops.partitioned.partitioned`),
which is as good as one device. A CPU interprets kernels: there a launcher is ``jax.jit``.
"""

import contextlib
import functools
import hashlib
import importlib.util
import zlib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax
import jaxlib.version
from jax import export
from jax.sharding import AbstractMesh

from longspec_jax.axes import Array
from longspec_jax.files import make_private, not_private, replace
from longspec_jax.ops.hardware import compute_capability
from longspec_jax.ops.partitioned import one_device

Given = ParamSpec("Given")
R = TypeVar("R")
_CUSTOM_CALLS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton", "triton_kernel_call")
"""What kernels become. jax does not promise to read them in later versions; they stay in here."""


def _digest(folder: Path) -> str:
    """A digest of the source below a folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# When this is imported: it may be edited before the first kernel is lowered.
_SOURCES = _digest(Path(__file__).parents[1])


def launcher(*static: str) -> Callable[[Callable[Given, R]], Callable[Given, R]]:
    """``jax.jit`` for a function that launches a kernel.

    Args:
      static: names of its static arguments, all by keyword; ``interpret`` among them says that
        there will be no kernel.
    """

    def decorate(function: Callable[Given, R]) -> Callable[Given, R]:
        jitted = jax.jit(function, static_argnames=static)
        exported = functools.cache(functools.partial(_exported, jitted))

        @functools.wraps(function)
        def launch(*operands: Given.args, **options: Given.kwargs) -> R:
            if options.get("interpret") or compute_capability() is None or not one_device():
                return jitted(*operands, **options)
            fixed = {name: options.pop(name) for name in static if name in options}
            leaves, structure = jax.tree.flatten((operands, options))
            shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
            return exported(structure, shapes, tuple(fixed.items()))(*leaves)

        launch.lower = jitted.lower  # type: ignore[attr-defined]
        return launch

    return decorate


def _exported(
    jitted: Callable[..., Any],
    structure: Any,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    fixed: tuple[tuple[str, Hashable], ...],
) -> Callable[..., Any]:
    """The lowered function of these shapes, as a function of the leaves."""

    def flat(*leaves: Array) -> Any:
        operands, options = structure.unflatten(leaves)
        return jitted(*operands, **options, **dict(fixed))

    file = _file(jitted.__name__, jitted.__module__, structure, shapes, fixed)
    whole = None if file is None else _read(file)
    if whole is None:
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]
        device = jax.sharding.get_abstract_mesh().abstract_device
        exporting = export.export(jax.jit(flat), platforms=("cuda",), disabled_checks=checks)
        # Its caller may be on a mesh; the kernel runs on one device.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            whole = exporting(*shapes)
        if file is not None:
            _keep(file, whole)

    def call(*leaves: Array) -> Any:
        return whole.call(*leaves)

    call.__name__ = jitted.__name__  # Which profiles show.
    return jax.jit(call)  # Lowered once in a program, however many layers call it.


def _file(name: str, *key: object) -> Path | None:
    """Where a kernel is kept; None where no programs are.

    The name depends on all that a kernel follows from, the source of this library included.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or "://" in folder or importlib.util.find_spec("flatbuffers") is None:
        return None
    kernels = Path(folder) / "kernels"
    if not_private(kernels):  # Whose kernels would run here.
        return None
    machine = compute_capability(), jax.__version__, jaxlib.version.__version__
    followed = *key, *machine, jax.config.values["jax_enable_x64"], _SOURCES
    digest = hashlib.sha256(repr(followed).encode()).hexdigest()
    return kernels / f"{name}-{digest}"


def _read(file: Path) -> export.Exported | None:
    """A kernel that was kept; None if it was not, or the file is damaged."""
    try:
        return export.deserialize(bytearray(zlib.decompress(file.read_bytes())))
    except (OSError, zlib.error):
        return None


def _keep(file: Path, whole: export.Exported) -> None:
    """Keep a kernel, if the disk takes it."""
    # ValueError: its results are of a type that jax cannot write.
    with contextlib.suppress(OSError, ValueError):
        make_private(file.parent)
        replace(file, zlib.compress(whole.serialize()))
