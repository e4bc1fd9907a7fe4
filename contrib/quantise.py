"""Quantise a target's own weights, and write them as compressed-tensors that other engines read.

    python -m contrib.quantise TARGET --format=w4a16 --out=FOLDER
    python -m infer.decode --target=FOLDER --draft=DRAFT

Weights are rounded to the nearest code. ``fp8`` has a scale an output, and halves the bytes of a
16-bit target's linears. ``w4a16`` has a scale for every group of 128 inputs, the one of
:data:`CANDIDATES` with the least squared error, and leaves a quarter. Nothing is calibrated on
text. LM head, embeddings and norms stay as they are. A draft of the target serves the quantised
one.

A tensor is read, quantised and forgotten before the next; files of at most :data:`FILE_BYTES` and
one tensor are in memory. ``config.json`` is written last, so that an interrupted folder does not
look like a model. The exit status is 0, or 2 for bad input.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from safetensors.numpy import save_file

from longspec_jax import cli
from longspec_jax.axes import Array
from longspec_jax.checks import shown_bytes
from longspec_jax.weights.checkpoint import Tensor
from longspec_jax.weights.gguf.file import read_gguf
from longspec_jax.weights.gguf.tokenizer import gguf_tokenizer
from longspec_jax.weights.hf_config import target_config, wrapped
from longspec_jax.weights.hub import FILES, local_model
from longspec_jax.weights.json_files import QUANTISATION
from longspec_jax.weights.model_files import open_model, read_config
from longspec_jax.weights.params import is_finite
from longspec_jax.weights.quantised.table import KERNEL, WEIGHT
from longspec_jax.weights.tables import check_layers, check_tensors, target_table

FORMATS = ("fp8", "w4a16")
LARGEST_FLOAT8 = 448.0
GROUPS = (128, 64, 32)
"""Sizes of groups; the first that divides the inputs of all linears is taken."""
CANDIDATES = np.linspace(6.0, 10.5, 19, dtype=np.float32)
"""What the largest weight of a group is divided by for its scale: codes reach from -8 to 7, so from
7 on the largest weight is cut, and the others are rounded more finely."""
FILE_BYTES = 1 << 30


class Written(NamedTuple):
    """What was written."""

    linears: int
    group: int | None
    """Inputs that share a scale; None for one scale an output."""
    source_bytes: int
    bytes: int


def quantise(
    source: str | Path, format: str, out: str | Path, *, revision: str | None = None
) -> Written:
    """Write a quantised copy of a target, its tokenizer and settings next to it.

    Args:
      source: a folder or hub id of a target in 16 or 32 bits, or a GGUF file of any type.
      format: one of :data:`FORMATS`.
      out: a folder that does not exist yet.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileExistsError: if the folder exists.
      ValueError: if the target is quantised already, is not supported, or is damaged.
    """
    model, out = local_model(source, revision), Path(out).expanduser()
    if out.exists():
        raise FileExistsError(f"{out} exists; name a folder that does not, or remove it first")
    raw = read_config(model)
    if wrapped(raw):
        raise ValueError(
            f"{raw.origin}: the target is part of a model that also sees; name a text-only one"
        )
    if any(raw.has(key) for key in QUANTISATION):
        raise ValueError(f"{raw.origin}: the target is quantised already; name a whole one")
    config = target_config(raw, "float32")
    if config.is_sparse:
        raise ValueError(
            f"{model} has layers of experts, which are not quantised here; load a checkpoint that "
            "is published in 8 or 4 bits"
        )
    with ExitStack() as stack:
        tensors = open_model(model, stack)
        check_layers(config, tensors, raw.origin)
        table = target_table(config)
        check_tensors(table, tensors, str(source))
        linears = {
            part.source
            for leaf in table.leaves
            if leaf.path.endswith(KERNEL)
            for part in leaf.parts
        }
        group = None if format == "fp8" else _group({tensors[name].shape[1] for name in linears})
        files = _Files(out)
        unfinished = stack.enter_context(ExitStack())
        unfinished.callback(shutil.rmtree, out)
        for name, tensor in tensors.items():
            if name in table.parts:
                whole = _read(name, tensor)
                files.source_bytes += whole.nbytes
                files.add(_quantised(name, whole, group) if name in linears else {name: whole})
        files.close()
        if model.is_file() and (tokenizer := gguf_tokenizer(read_gguf(model))) is not None:
            tokenizer.save_pretrained(out)
        for pattern in FILES:
            for path in model.glob(pattern):
                if path.is_file() and not (out / path.name).exists() and path.name != "config.json":
                    if not path.name.endswith(".index.json"):
                        shutil.copyfile(path, out / path.name)
        said = {**raw.values, QUANTISATION[0]: quantization_config(group)}
        (out / "config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        unfinished.pop_all()
    return Written(len(linears), group, files.source_bytes, files.bytes)


def quantization_config(group: int | None) -> dict[str, Any]:
    """What ``config.json`` says of a target that :func:`quantise` has written."""
    if group is None:
        form, own = "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}
    else:
        form, own = "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"}
    weights = {**own, "group_size": group, "symmetric": True, "dynamic": False, "actorder": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


@jax.jit
def round_to_float8(
    weights: Float[Array, "out C"], scale_like: Float[Array, ""]
) -> tuple[Array, Float[Array, "out 1"]]:
    """Codes in e4m3 and the scale of every output, in the dtype of ``scale_like``."""
    wide = weights.astype(jnp.float32)
    scale = _nonzero(jnp.abs(wide).max(axis=1, keepdims=True) / LARGEST_FLOAT8, scale_like)
    # A scale that was rounded down leaves the largest weight above the largest code.
    codes = jnp.clip(wide / scale.astype(jnp.float32), -LARGEST_FLOAT8, LARGEST_FLOAT8)
    return codes.astype(jnp.float8_e4m3fn), scale


@partial(jax.jit, static_argnames="group")
def round_to_int4(
    weights: Float[Array, "out C"], scale_like: Float[Array, ""], group: int
) -> tuple[Int[Array, "out C"], Float[Array, "out G"]]:
    """Codes from -8 to 7 and the scale of every group, the candidate of least squared error."""
    wide = weights.astype(jnp.float32).reshape(weights.shape[0], -1, group)
    top = jnp.abs(wide).max(axis=2)

    def codes_of(scale: Array) -> Array:
        return jnp.clip(jnp.round(wide / scale.astype(jnp.float32)[..., None]), -8, 7)

    def better(best: tuple[Array, Array], steps: Array) -> tuple[tuple[Array, Array], None]:
        least, scale = best
        candidate = _nonzero(top / steps, scale_like)
        error = codes_of(candidate) * candidate.astype(jnp.float32)[..., None] - wide
        error = (error * error).sum(axis=2)
        closer = error < least
        return (jnp.where(closer, error, least), jnp.where(closer, candidate, scale)), None

    first = jnp.full_like(top, jnp.inf), _nonzero(top, scale_like)
    (_, scale), _ = jax.lax.scan(better, first, jnp.asarray(CANDIDATES))
    return codes_of(scale).astype(jnp.int8).reshape(weights.shape), scale


def _nonzero(scale: Array, like: Array) -> Array:
    """Scales in a dtype, 1 where all weights are zero."""
    rounded = scale.astype(like.dtype)
    return jnp.where(rounded > 0, rounded, 1)


def _quantised(name: str, whole: np.ndarray, group: int | None) -> dict[str, np.ndarray]:
    """The stored tensors of a linear."""
    # float16 has too few exponents for the scales of small weights.
    like = jnp.zeros((), "bfloat16" if whole.dtype.name == "bfloat16" else "float32")
    linear = name.removesuffix(WEIGHT)
    if group is None:
        codes, scale = map(np.asarray, round_to_float8(whole, like))
        return {name: codes, f"{linear}.weight_scale": scale}
    codes, scale = map(np.asarray, round_to_int4(whole, like, group))
    pairs = (codes + 8).astype(np.uint8)
    packed = np.ascontiguousarray(pairs[:, ::2] | pairs[:, 1::2] << 4)
    return {
        f"{linear}.weight_packed": packed.view(np.int32),
        f"{linear}.weight_scale": scale,
        f"{linear}.weight_shape": np.asarray(whole.shape, np.int64),
    }


def _group(inputs: set[int]) -> int:
    """The size of all groups."""
    for size in GROUPS:
        if not any(width % size for width in inputs):
            return size
    raise ValueError(
        f"no group of {', '.join(map(str, GROUPS))} inputs divides {sorted(inputs)}, the inputs of "
        "the target's linears; choose --format=fp8"
    )


def _read(name: str, tensor: Tensor) -> np.ndarray:
    """A whole tensor; raises if it is not finite."""
    values = np.ascontiguousarray(tensor.read((slice(None),) * len(tensor.shape)))
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    if not is_finite(values):
        raise ValueError(
            f"{tensor.file}: {name} holds NaN or infinite values; the file is damaged: download it "
            "again"
        )
    return values


class _Files:
    """Safetensors files that are filled one after the other, and their index."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        self.folder, self.bytes, self.source_bytes = folder, 0, 0
        self._pending: dict[str, np.ndarray] = {}
        self._written: list[tuple[Path, list[str]]] = []

    def add(self, tensors: dict[str, np.ndarray]) -> None:
        """Add the tensors of one linear, or another tensor."""
        self._pending |= tensors
        if sum(each.nbytes for each in self._pending.values()) >= FILE_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left, and name the files by their number."""
        if self._pending:
            self._flush()
        if len(self._written) == 1:
            self._written[0][0].rename(self.folder / "model.safetensors")
            return
        names: dict[str, str] = {}
        for number, (path, tensors) in enumerate(self._written, 1):
            name = f"model-{number:05}-of-{len(self._written):05}.safetensors"
            path.rename(self.folder / name)
            names |= dict.fromkeys(tensors, name)
        index = {"metadata": {"total_size": self.bytes}, "weight_map": names}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def _flush(self) -> None:
        path = self.folder / f"unfinished-{len(self._written)}"
        save_file(self._pending, path, metadata={"format": "pt"})
        self.bytes += sum(each.nbytes for each in self._pending.values())
        self._written.append((path, list(self._pending)))
        self._pending = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    return cli.run(lambda: _command(argv), argv)


def _command(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    written = quantise(
        arguments.target, arguments.format, arguments.out, revision=arguments.revision
    )
    groups = f", groups of {written.group} inputs" if written.group else ""
    print(
        f"{arguments.out}: {written.linears} linears in {arguments.format}{groups}; "
        f"{shown_bytes(written.bytes)} of {shown_bytes(written.source_bytes)}"
    )
    return cli.OK


def _parser() -> cli.Parser:
    parser = cli.Parser(prog="python -m contrib.quantise", description=__doc__)
    parser.add_argument("target", help="a folder or hub id in 16 or 32 bits, or a GGUF file")
    parser.add_argument("--format", required=True, choices=FORMATS, help="of the linears")
    parser.add_argument("--out", required=True, help="the folder to write; must not exist")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    return parser


if __name__ == "__main__":
    sys.exit(main())
