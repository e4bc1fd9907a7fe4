"""A GGUF file as a Hugging Face folder: its ``config.json``, and its tensors under those names.

Whatever reads a folder reads a file so. A key of the architecture's or a tensor that no rule of
:mod:`longspec_jax.weights.gguf.architectures` names is refused.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longspec_jax.checks import shown
from longspec_jax.weights.checkpoint import Tensors
from longspec_jax.weights.families import FAMILIES
from longspec_jax.weights.gguf.architectures import (
    ARCHITECTURES,
    KEYS,
    NOT_TARGETS,
    SHAPES,
    Architecture,
)
from longspec_jax.weights.gguf.blocks import decoded, packed
from longspec_jax.weights.gguf.experts import is_mxfp4
from longspec_jax.weights.gguf.file import GgufFile, StoredTensor, read_gguf
from longspec_jax.weights.gguf.layouts import Change, moves_rows, same
from longspec_jax.weights.gguf.metadata import Metadata, Raw
from longspec_jax.weights.gguf.packed import Blocks
from longspec_jax.weights.gguf.tokens import stop_tokens
from longspec_jax.weights.json_files import JsonObject

_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
_DRAFT, _DRAFTS = "mtp.", "mtp.layers."
"""What the tensors around a layer that predicts several tokens are called, and those of it."""


def gguf_config(path: Path) -> JsonObject:
    """The ``config.json`` that describes a file's model; its errors name the file.

    Raises:
      ValueError: if the model is of no architecture that is read, or a key is not.
    """
    file, name, architecture = _opened(path)
    _check_keys(file, name, architecture)
    factors = {stem: _values(file, f"{stem}.weight") for stem in architecture.factors}
    present = {stem: values for stem, values in factors.items() if values is not None}
    metadata = Metadata(file.metadata, f"{name}.", present, file.tensors)
    raw: Raw = {"architectures": [architecture.name], "dtype": "float32"}
    alike = (key for key in KEYS if key not in architecture.by_layer and metadata.has(key))
    raw |= {KEYS[key]: _of_all_layers(metadata, key) for key in alike}
    # As many as llama.cpp takes.
    raw.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
    raw |= _shapes(file, metadata)
    for key, value in architecture.only.items():
        metadata.only(key, value)
    sizes = architecture.renamed.items()
    raw |= {ours: metadata.whole(key, least=1) for key, ours in sizes}
    raw |= architecture.read(metadata, raw)
    raw["model_type"] = FAMILIES[raw["architectures"][0]].model_type
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    raw["eos_token_id"] = [*stop_tokens(file)]
    if architecture.name == "GptOssForCausalLM" and is_mxfp4(file.tensors):
        raw["quantization_config"] = {"quant_method": "mxfp4"}
    return JsonObject(raw, str(file.path))


def open_gguf(path: Path) -> Tensors:
    """A file's tensors by the names that a Hugging Face folder of the model has.

    Raises:
      ValueError: for a tensor that no rule names.
    """
    sizes, tensors = gguf_config(path).values, {}
    experts: dict[str, dict[str, StoredTensor]] = {}
    file, _, architecture = _opened(path)
    for place in _places(file, architecture, sizes):
        if place.expert:
            experts.setdefault(place.prefix, {})[place.name] = place.stored
        else:
            tensors[place.prefix + place.name] = place.change(decoded(place.stored), sizes)
    for prefix, own in experts.items():
        tensors |= {f"{prefix}{name}": each for name, each in architecture.stacked(own).items()}
    return tensors


def stored_matrices(path: Path) -> dict[str, Blocks]:
    """A file's quantised matrices by the same names, in the bits that they are stored in.

    Those whose inputs come in another order, and experts, are left out.
    """
    sizes = gguf_config(path).values
    file, _, architecture = _opened(path)
    return {
        place.prefix + place.name: Blocks(
            place.stored.type.name, place.change(packed(place.stored), sizes)
        )
        for place in _places(file, architecture, sizes)
        if place.of_rows and not place.expert and place.stored.type.elements > 1
    }


class _Place(NamedTuple):
    """A tensor of a file, and what a Hugging Face folder has in its place."""

    prefix: str
    """Of the layer's names."""
    name: str
    stored: StoredTensor
    change: Change = same
    expert: bool = False
    """Whether it is one of several from which the experts are made; its name is the file's."""

    @property
    def of_rows(self) -> bool:
        """Whether it is a matrix of which only the rows may be in another order."""
        return len(self.stored.shape) == 2 and moves_rows(self.change)


def _places(
    file: GgufFile, architecture: Architecture, sizes: Mapping[str, Any]
) -> Iterator[_Place]:
    """All tensors of a model; raises ValueError for those that no rule names."""
    unknown = []
    for name, stored in file.tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            stem, kind = name, ""
        if stem in architecture.factors:
            continue
        prefix, names, changes = "", architecture.model, architecture.changes
        if match := _BLOCK.fullmatch(stem):
            index, stem = int(match[1]), match[2]
            prefix, names = f"model.layers.{index}.", architecture.layer
            if architecture.draft and index >= sizes["num_hidden_layers"]:
                index -= sizes["num_hidden_layers"]
                prefix, names = f"{_DRAFTS}{index}.", {**names, stem: names.get(stem, stem)}
                if stem in architecture.draft and not index:
                    prefix, names = _DRAFT, architecture.draft
        if prefix and stem in architecture.experts:
            yield _Place(prefix, f"{stem}.{kind}", stored, expert=True)
        elif stem in names:
            suffix = f".{kind}" if kind and stem not in architecture.unnamed else ""
            yield _Place(prefix, names[stem] + suffix, stored, changes.get(stem, same))
        else:
            unknown.append(f"{name} {stored.shape}")
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        raise ValueError(
            f"{file.path}: no rule of the architecture {file.architecture} names "
            f"{', '.join(unknown[:8])}{more}; a model with these tensors computes something else: "
            "load another file"
        )


def _opened(path: Path) -> tuple[GgufFile, str, Architecture]:
    """A file with its architecture's name and entry."""
    file = read_gguf(path)
    return file, *_architecture(file)


def _architecture(file: GgufFile) -> tuple[str, Architecture]:
    """The file's architecture and its entry."""
    name, kind = file.architecture, file.metadata.text("general.type", "model")
    if name in NOT_TARGETS or kind != "model":
        what = NOT_TARGETS.get(name, f"of the type {kind!r}, no language model")
        raise ValueError(f"{file.path} is {what}")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: the architecture {shown(name)} is not read from GGUF files; "
            f"{', '.join(ARCHITECTURES)} are. Load the model's safetensors checkpoint if "
            "docs/guides/targets.md lists its family"
        )
    if "token_embd.weight" not in file.tensors or "output_norm.weight" not in file.tensors:
        raise ValueError(
            f"{file.path} holds {len(file.tensors)} tensors without embeddings or without the last "
            "norm: a part of a model, such as its MTP layer; name the file of the whole model"
        )
    return name, ARCHITECTURES[name]


def _check_keys(file: GgufFile, name: str, architecture: Architecture) -> None:
    """Refuse a key of the architecture's that no rule names."""
    known = {*KEYS, *SHAPES, *architecture.renamed, *architecture.only, *architecture.keys}
    own = (
        key.removeprefix(f"{name}.") for key in file.metadata.values if key.startswith(f"{name}.")
    )
    if unknown := [key for key in own if key not in known]:
        raise file.metadata.error(
            f"{name}.{unknown[0]}",
            f"is a key of the architecture {name} that no rule names",
            "a model with it may compute something else: load another file",
        )


def _values(file: GgufFile, name: str) -> np.ndarray | None:
    """A small tensor of floats, if the file has it."""
    stored: StoredTensor | None = file.tensors.get(name)
    if stored is None:
        return None
    values = decoded(stored).read((slice(None),) * len(stored.shape)).astype(np.float32)
    if values.ndim != 1 or not np.isfinite(values).all() or (values <= 0).any():
        raise ValueError(
            f"{file.path}: {name} {stored.shape} must be a list of positive numbers; download the "
            "file again"
        )
    return values


def _of_all_layers(metadata: Metadata, key: str) -> object:
    """A value that may be given for every layer, and must then be the same."""
    value = metadata.value(key)
    if not isinstance(value, list):
        return value
    if len({*value}) != 1:
        raise metadata.error(key, "is not supported: all layers are alike")
    return value[0]


def _shapes(file: GgufFile, metadata: Metadata) -> Raw:
    """The vocabulary, the width of a head, and the rotation."""
    embedding = file.tensors["token_embd.weight"]
    rows = embedding.shape[0]
    if metadata.whole("vocab_size", rows) != rows:
        raise metadata.error("vocab_size", f"must be {rows}, the rows of token_embd.weight")
    width = metadata.whole("embedding_length", least=1)
    heads = _of_all_layers(metadata, "attention.head_count")
    if not isinstance(heads, int) or heads < 1:
        raise metadata.error("attention.head_count", "must be a whole number from 1 on")
    head = metadata.whole("attention.key_length", width // heads, 1)
    metadata.only("attention.value_length", head)
    raw: Raw = {"vocab_size": rows, "head_dim": head}
    rotated = metadata.whole("rope.dimension_count", head, 1)
    if rotated != head:
        share = rotated / head
        raw["partial_rotary_factor"] = (
            share if int(head * share) == rotated else math.nextafter(share, 1)
        )
    return raw | {"rope_scaling": _scaling(metadata)}


def _scaling(metadata: Metadata) -> Raw | None:
    """The scaling of the rotation that keys describe; that of tensors is the architecture's."""
    kind = metadata.value("rope.scaling.type")
    if metadata.has("rope.scale_linear"):  # Of files before 2024.
        kind, factor = "linear", metadata.number("rope.scale_linear")
    elif metadata.has("rope.scaling.factor"):
        factor = metadata.number("rope.scaling.factor")
    else:
        factor = 1.0
    if kind in (None, "none", "longrope") or factor == 1.0 == metadata.number(
        "rope.scaling.yarn_attn_factor", 1.0
    ):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise metadata.error("rope.scaling.type", "is not supported, only none, linear and yarn")
    metadata.only("rope.scaling.yarn_ext_factor", 1.0)
    original = metadata.whole("rope.scaling.original_context_length", least=1)
    raw: Raw = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, ours in {
        "yarn_attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }.items():
        if metadata.has(f"rope.scaling.{key}"):
            raw[ours] = metadata.number(f"rope.scaling.{key}")
    return raw
