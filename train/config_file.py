"""Find a configuration by name or path, and load it.

A configuration is a Python file with ``get_config([variant])``. Those of the project lie beside
this folder, in a checkout and in a wheel alike, and are found by name from anywhere.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

BUNDLED = Path(__file__).parents[1] / "configs"


def bundled_names() -> list[str]:
    """The configurations that come with the project."""
    return sorted(path.stem for path in BUNDLED.glob("*.py") if not path.stem.startswith("_"))


def find(name: str) -> Path:
    """The file that ``vicuna7b``, ``vicuna7b.py``, ``configs/vicuna7b.py`` or any other path means.

    A file that exists is taken as it is; the bundled ones are for names that are no file.

    Raises:
      FileNotFoundError: for a name of neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if is_bundled(name):
        return BUNDLED / f"{path.stem}.py"
    raise FileNotFoundError(
        f"there is no configuration file {name!r}; the project's own are "
        f"{', '.join(bundled_names())}"
    )


def is_bundled(name: str) -> bool:
    """Whether a name or ``configs/NAME.py`` is one of the project's configurations."""
    path = Path(name)
    by_name = str(path.parent) in (".", "configs") and path.suffix in ("", ".py")
    return by_name and path.stem in bundled_names()


def load(argument: str) -> ConfigDict:
    """The configuration that ``NAME[:VARIANT]`` stands for.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it gives no configuration, with its own words where it refuses a variant.
    """
    name, colon, variant = argument.partition(":")
    path = find(name)
    try:
        with _loaded(path) as get_config:
            config = get_config(*[variant] if colon else [])
    except ValueError:
        raise
    except Exception as error:  # Whatever a user's file may do: it is named, and what went wrong.
        raise ValueError(
            f"the configuration {name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"get_config of {name} returned {type(config).__name__}, not a ConfigDict; "
            "longspec_jax.recipes makes one"
        )
    return config


@contextmanager
def _loaded(path: Path) -> Iterator[Callable[..., Any]]:
    """The function a configuration file defines; its module is known while it is called."""
    loader = SourceFileLoader(f"longspec_configuration_{path.stem}", str(path))
    module = types.ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # Dataclasses look their module up.
    try:
        loader.exec_module(module)
        yield module.get_config
    finally:
        sys.modules.pop(loader.name, None)
