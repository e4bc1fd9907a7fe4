"""Load targets from Hugging Face folders, GGUF files or hub ids, and save them as folders.

Nothing is guessed, skipped or cast in silence: the configuration must be one this library computes
exactly, the tensors must be exactly those it describes, and every value must be finite.
"""

import dataclasses
import re
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from longspec_jax.config.target import TargetConfig
from longspec_jax.ops.matmul.packed_shares import packed_params
from longspec_jax.weights import hf_config
from longspec_jax.weights.adapter import own_name, with_adapter
from longspec_jax.weights.checkpoint import LM_HEAD, Tensor, Tensors, each_expert
from longspec_jax.weights.families import FAMILIES
from longspec_jax.weights.gguf.model import stored_matrices
from longspec_jax.weights.gguf.packed import as_packed
from longspec_jax.weights.hub import local_model
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.model_files import (
    open_model,
    read_config,
    read_generation_config,
    stored_types,
)
from longspec_jax.weights.params import load_params, write_model
from longspec_jax.weights.quantised.cached import cached_scales
from longspec_jax.weights.quantised.formats import quantisation
from longspec_jax.weights.quantised.table import as_stored, stored_bytes, with_matrices
from longspec_jax.weights.tables import Table, check_layers, check_tensors, target_table

EMBEDDING = "model.embed_tokens.weight"
ROWS = 4096
"""Rows of a table that are compared at once."""


def load_target(
    source: str | Path,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
    kv_dtype: str | None = None,
    adapter: str | Path | None = None,
    packed: bool | None = None,
) -> tuple[TargetConfig, Any]:
    """Load a target.

    Args:
      source: a folder with ``config.json`` and weights, a GGUF file, or a hub id.
      dtype: ``bfloat16``, ``float16`` or ``float32``, to which the weights are cast; if absent,
        what ``config.json`` says, in which the weights must then be stored.
      mesh: devices to shard over by the project's rules; the first device if absent.
      revision: branch, tag or commit of a hub id.
      kv_dtype: what keys and values are rounded to, as in the configuration: with the scales of the
        checkpoint where it has some, which are not used otherwise.
      adapter: the folder of a LoRA adapter, which is merged into the weights.
      packed: whether a GGUF file's matrices stay in their own bits. If absent they do where a
        kernel reads them so: on a GPU, in 16 bits. Elsewhere every step would dequantise them.

    Returns:
      The configuration and the parameters of :class:`longspec_jax.models.target.Target`.

    Raises:
      FileNotFoundError: if the model or one of its files is missing.
      ValueError: if the model is not supported, or its files are damaged or do not fit together.
    """
    model = local_model(source, revision)
    raw = read_config(model)
    described = hf_config.target_config(raw, dtype)
    if adapter is not None and (model.is_file() or quantisation(hf_config.text_part(raw))):
        raise ValueError(
            f"{source}: an adapter is merged into 16-bit or 32-bit weights of a folder, and these "
            "are quantised or a GGUF file; take the target that they were made of"
        )
    with ExitStack() as stack:
        tensors = _of_target(open_model(model, stack), raw, described)
        config, tensors = _as_tied(described, tensors)
        if adapter is not None:
            folder = Path(adapter).expanduser()
            tensors = with_adapter(tensors, folder, stack, tied=config.tied_embeddings)
        if config != described:
            warnings.warn(
                f"{raw.origin}: tie_word_embeddings=true, and the weights hold an LM head that "
                "differs from the embeddings; as in transformers 5 the stored head is used. Write "
                "false into the file if that is right",
                stacklevel=2,
            )
        check_layers(config, tensors, raw.origin)
        if kv_dtype is not None:
            scales = cached_scales(config, tensors)
            config = dataclasses.replace(config, kv_dtype=kv_dtype, kv_scales=scales)
        any_dtype = dtype is not None or quantisation(raw) or model.is_file()
        shares = 1 if mesh is None else mesh.shape["tp"]
        table, tensors, groups = _stored(model, raw, config, tensors, packed, shares)
        check_tensors(table, tensors, str(source), dtype=None if any_dtype else config.dtype)
        params = with_matrices(load_params(table, tensors, config.dtype, mesh), groups)
        return config, packed_params(params, config.dtype)


def _stored(
    model: Path,
    raw: JsonObject,
    config: TargetConfig,
    tensors: Tensors,
    packed: bool | None,
    shares: int = 1,
) -> tuple[Table, Tensors, dict[str, int]]:
    """The table and tensors of a target, and the group sizes of its quantised kernels, by path."""
    table, quantised = target_table(config), quantisation(hf_config.text_part(raw))
    if quantised is not None:
        return as_stored(table, tensors, quantised)
    if packed is None:
        packed = jax.default_backend() == "gpu" and jnp.dtype(config.dtype).itemsize == 2
    if model.is_file() and packed:
        return as_packed(table, tensors, stored_matrices(model), shares)
    return table, tensors, {}


def target_bytes(
    source: str | Path, *, dtype: str, revision: str | None = None, packed: bool | None = None
) -> int:
    """Bytes of a target's parameters as they are loaded; arguments as in :func:`load_target`."""
    model = local_model(source, revision)
    raw = read_config(model)
    described = hf_config.target_config(raw, dtype)
    with ExitStack() as stack:
        tensors = _of_target(open_model(model, stack), raw, described)
        config, tensors = _as_tied(described, tensors)
        table, _, _ = _stored(model, raw, config, tensors, packed)
    return stored_bytes(table, config.dtype)


def _as_tied(config: TargetConfig, tensors: Tensors) -> tuple[TargetConfig, Tensors]:
    """Configuration and tensors of a target whose file ties its tables, as transformers 5 has them.

    A stored LM head that differs from the embeddings is used, and the tables are not tied. A head
    that is stored alone is both tables.
    """
    head = tensors.get(LM_HEAD)
    if not config.tied_embeddings or head is None:
        return config, tensors
    if EMBEDDING not in tensors:
        others = {name: tensor for name, tensor in tensors.items() if name != LM_HEAD}
        return config, others | {EMBEDDING: head}
    if _equal(head, tensors[EMBEDDING]):
        return config, tensors
    return dataclasses.replace(config, tied_embeddings=False), tensors


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two stored tables hold the same values; reads no more than shows that they differ."""
    if one.shape != other.shape:
        return False
    for row in range(0, one.shape[0], ROWS):
        piece = slice(row, min(row + ROWS, one.shape[0])), slice(None)
        if not np.array_equal(one.read(piece), other.read(piece)):
            return False
    return True


def _of_target(tensors: Tensors, raw: JsonObject, config: TargetConfig) -> Tensors:
    """Only the tensors of the target, under its own names."""
    if beside := hf_config.wrapped(raw):
        tensors = {
            own_name(name): tensor
            for name, tensor in tensors.items()
            if not any(re.fullmatch(pattern, name) for pattern in beside)
        }
    if FAMILIES[config.architecture].names.stacked_experts:
        return tensors
    return each_expert(tensors, (f"model.layers.{index}." for index in range(config.num_layers)))


def load_target_config(
    source: str | Path, *, dtype: str | None = None, revision: str | None = None
) -> TargetConfig:
    """Only a target's configuration; arguments and errors as in :func:`load_target`."""
    model = local_model(source, revision)
    raw = read_config(model)
    config = hf_config.target_config(raw, dtype)
    if not config.tied_embeddings:
        return config
    with ExitStack() as stack:  # The tensors tell whether they are.
        return _as_tied(config, _of_target(open_model(model, stack), raw, config))[0]


def save_target(
    folder: str | Path, config: TargetConfig, params: PyTree, *, stop_tokens: tuple[int, ...] = ()
) -> None:
    """Save a target so that this library and transformers can load it.

    Args:
      folder: made if absent; weights in it are replaced, other files stay.
      stop_tokens: written as ``eos_token_id``.
    """
    raw = hf_config.hf_config(config, stop_tokens)
    write_model(Path(folder).expanduser(), target_table(config), params, config.dtype, raw)


def load_stop_tokens(source: str | Path, *, revision: str | None = None) -> tuple[int, ...]:
    """Tokens that end a generation: of ``generation_config.json``, ``config.json`` or a GGUF."""
    model = local_model(source, revision)
    return hf_config.stop_tokens(read_config(model), read_generation_config(model))


def dequantised_types(source: str | Path, *, revision: str | None = None) -> tuple[str, ...]:
    """The types that a GGUF file's matrices are dequantised from; empty for other targets."""
    return stored_types(local_model(source, revision))
