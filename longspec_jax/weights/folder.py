"""A draft's folder while it is open: its ``config.json``, and the tensors of a table."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from longspec_jax.weights.checkpoint import Tensors
from longspec_jax.weights.hub import local_model
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.model_files import open_model, read_config
from longspec_jax.weights.params import load_params
from longspec_jax.weights.tables import Table, check_tensors


@dataclass(eq=False)
class OpenFolder:
    """What is read of a folder."""

    source: str | Path
    """As the user named it."""
    raw: JsonObject
    """Its ``config.json``."""
    mesh: Mesh | None
    path: Path
    stack: ExitStack
    """Closes its files."""

    @cached_property
    def tensors(self) -> Tensors:
        """All that are stored; raises as :func:`.model_files.open_model` does."""
        return open_model(self.path, self.stack)

    def params(self, table: Table, tensors: Tensors, dtype: str) -> Any:
        """The parameters of a table; raises ValueError unless these tensors are its own."""
        check_tensors(table, tensors, str(self.source))
        return load_params(table, tensors, dtype, self.mesh)


@contextmanager
def open_folder(
    source: str | Path, mesh: Mesh | None = None, revision: str | None = None
) -> Iterator[OpenFolder]:
    """Open a folder that has ``config.json`` and weights.

    Args:
      source: the folder, or a hub id.
      mesh: devices to shard over by the project's rules; the first device if absent.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileNotFoundError: if there is no such folder, or it has no ``config.json``.
      ValueError: if that file is damaged.
    """
    model = local_model(source, revision)
    raw = read_config(model)
    with ExitStack() as stack:
        yield OpenFolder(source, raw, mesh, model, stack)
