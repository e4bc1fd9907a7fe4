"""Quantised checkpoints, packed by NumPy from drawn codes, and the weights that they stand for.

The formulas are those of the formats' own dequantisers, written out from them: none of the
library's code is used.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from longspec_jax.weights.hf import save_target
from tests.kit import random_target, tiny_target_config

CONFIG = tiny_target_config(
    model_width=64, mlp_width=96, num_heads=4, num_kv_heads=2, head_width=16, vocab_size=104
)
GROUP = 32
Linear = tuple[dict[str, np.ndarray], np.ndarray]
"""The stored tensors of a linear by suffix, and its dequantised weights ``[out, in]``."""
Draw = Callable[[np.random.Generator, int, int], Linear]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes along the last axis in words of 32 bits, the first in the lowest bits."""
    each = 32 // bits
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    parts = codes.reshape(*codes.shape[:-1], -1, each).astype(np.uint32)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for place in range(each):
        words |= parts[..., place] << np.uint32(bits * place)
    return words.view(np.int32)


def scales(random: np.random.Generator, *shape: int, dtype: Any = np.float16) -> np.ndarray:
    return random.uniform(0.005, 0.03, shape).astype(dtype)


def float8(rows: int = 0, columns: int = 0, suffix: str = "weight_scale", tensor: bool = False):
    """8-bit floats with scales of blocks, of outputs, or of the tensor."""

    def draw(random: np.random.Generator, out: int, inputs: int) -> Linear:
        codes = random.standard_normal((out, inputs)).astype(ml_dtypes.float8_e4m3fn)
        grid = (-(-out // rows), -(-inputs // columns)) if rows else (out, 1)
        scale = scales(random, *((1,) if tensor else grid), dtype=np.float32) * 4
        wide = scale
        if rows:
            wide = scale[np.arange(out)[:, None] // rows, np.arange(inputs)[None] // columns]
        stored = {"weight": codes, suffix: scale}
        if tensor:
            stored["input_scale"] = np.ones(1, np.float32)
        return stored, codes.astype(np.float32) * wide

    return draw


def int8(symmetric: bool) -> Draw:
    """``int-quantized``."""

    def draw(random: np.random.Generator, out: int, inputs: int) -> Linear:
        codes = random.integers(-128, 128, (out, inputs)).astype(np.int8)
        scale, zero = scales(random, out, 1), np.zeros((out, 1), np.int8)
        stored = {"weight": codes, "weight_scale": scale}
        if not symmetric:
            zero = random.integers(-20, 20, (out, 1)).astype(np.int8)
            stored["weight_zero_point"] = zero
        return stored, (codes.astype(np.float32) - zero) * scale.astype(np.float32) / 1

    return draw


def packed(bits: int, group: int, symmetric: bool = True, ordered: bool = False) -> Draw:
    """``pack-quantized``."""

    def draw(random: np.random.Generator, out: int, inputs: int) -> Linear:
        codes = random.integers(0, 2**bits, (out, inputs))
        size = group or inputs
        scale = scales(random, out, inputs // size, dtype=ml_dtypes.bfloat16)
        zero = np.full(scale.shape, 2 ** (bits - 1))
        stored = {
            "weight_packed": pack(codes, bits),
            "weight_scale": scale,
            "weight_shape": np.asarray([out, inputs], np.int64),
        }
        if not symmetric:
            zero = random.integers(0, 2**bits, scale.shape)
            stored["weight_zero_point"] = np.ascontiguousarray(pack(zero.T, bits).T)
        of = np.arange(inputs) // size
        if ordered:
            of = np.random.default_rng(inputs).permutation(of)
            stored["weight_g_idx"] = of.astype(np.int32)
        return stored, ((codes - zero[:, of]) * scale.astype(np.float32)[:, of]).astype(np.float32)

    return draw


def gptq(
    bits: int, offset: int, symmetric: bool, ordered: bool = False, group: int = GROUP
) -> Draw:
    """GPTQ of either version; without an order only some files name the groups."""

    def draw(random: np.random.Generator, out: int, inputs: int) -> Linear:
        size = inputs if group == -1 else group
        codes = random.integers(0, 2**bits, (inputs, out))
        scale = scales(random, inputs // size, out)
        zero = np.full(scale.shape, 2 ** (bits - 1))
        if not symmetric:
            zero = random.integers(0, 2**bits, scale.shape)
        of = np.arange(inputs) // size
        stored = {
            "qweight": np.ascontiguousarray(pack(codes.T, bits).T),
            "qzeros": pack((zero - offset) % 2**bits, bits),
            "scales": scale,
        }
        if ordered:
            of = np.random.default_rng(inputs).permutation(of)
        if ordered or symmetric:
            stored["g_idx"] = of.astype(np.int32)
        return stored, ((codes - zero[of]) * scale.astype(np.float32)[of]).astype(np.float32).T

    return draw


def awq(zero_points: bool) -> Draw:
    """AWQ's ``gemm`` layout: output ``8c + ORDER[k]`` in nibble ``k`` of word ``c``."""
    order = np.asarray([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(codes: np.ndarray) -> np.ndarray:
        return pack(codes.reshape(len(codes), -1, 8)[..., order].reshape(codes.shape), 4)

    def draw(random: np.random.Generator, out: int, inputs: int) -> Linear:
        codes = random.integers(0, 16, (inputs, out))
        scale, of = scales(random, inputs // GROUP, out), np.arange(inputs) // GROUP
        zero = np.full(scale.shape, 8)
        stored = {"qweight": interleaved(codes), "scales": scale}
        if zero_points:
            zero = random.integers(0, 16, scale.shape)
            stored["qzeros"] = interleaved(zero)
        return stored, ((codes - zero[of]) * scale.astype(np.float32)[of]).astype(np.float32).T

    return draw


def compressed(form: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*ignore],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def _float(**more: Any) -> dict[str, Any]:
    return compressed("float-quantized", num_bits=8, type="float", symmetric=True, **more)


def _packed(**more: Any) -> dict[str, Any]:
    return compressed("pack-quantized", type="int", **more)


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "lm_head": False}
_BY_GROUP = {"num_bits": 4, "strategy": "group", "group_size": GROUP}

KINDS: dict[str, tuple[dict[str, Any], Draw]] = {
    "FP8 by tensor, static": (_float(strategy="tensor"), float8(tensor=True)),
    "FP8 by channel": (_float(strategy="channel"), float8()),
    "FP8 by block": (_float(strategy="block", block_structure=[48, 48]), float8(48, 48)),
    "fp8 by block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 32]},
        float8(48, 32, "weight_scale_inv"),
    ),
    "fp8 by tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        float8(suffix="weight_scale_inv", tensor=True),
    ),
    "W8A8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        int8(True),
    ),
    "W8A8 asymmetric": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        int8(False),
    ),
    "W4A16": (_packed(**_BY_GROUP), packed(4, GROUP)),
    "W4A16 asymmetric": (_packed(**_BY_GROUP, symmetric=False), packed(4, GROUP, False)),
    "W4A16 act-order": (_packed(**_BY_GROUP, actorder="group"), packed(4, GROUP, True, True)),
    "W8A16": (_packed(num_bits=8, strategy="channel"), packed(8, 0)),
    "W8A16 asymmetric": (
        _packed(num_bits=8, strategy="group", group_size=GROUP, symmetric=False),
        packed(8, GROUP, False),
    ),
    "GPTQ v1": (_GPTQ | {"sym": True, "desc_act": False}, gptq(4, 1, True)),
    "GPTQ v1 act-order": (_GPTQ | {"sym": False, "desc_act": True}, gptq(4, 1, False, True)),
    "GPTQ v2": (_GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, 0, False)),
    "GPTQ 8 bits act-order": (
        _GPTQ | {"bits": 8, "sym": False, "desc_act": True},
        gptq(8, 1, False, True),
    ),
    "GPTQ 8 bits, one group": (
        _GPTQ | {"bits": 8, "sym": True, "group_size": -1},
        gptq(8, 1, True, group=-1),
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
        | {"version": "gemm"},
        awq(True),
    ),
    "AWQ symmetric": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": False},
        awq(False),
    ),
}
"""Every format: what ``config.json`` says, and how a linear is drawn."""


def write(
    folder: Path,
    kind: str,
    whole: tuple[str, ...] = (),
    config: Any = CONFIG,
    beside: Mapping[str, np.ndarray] = MappingProxyType({}),
    **more: Any,
) -> Path:
    """Write a quantised checkpoint to ``folder/quantised`` and the weights to ``folder/whole``.

    Args:
      whole: texts in the names of linears that are not quantised.
      beside: tensors of a draft among the target's, quantised likewise.
      more: keys of the ``quantization_config``.
    """
    said, draw = KINDS[kind]
    save_target(folder / "whole", config, random_target(config))
    weights = load_file(folder / "whole" / "model.safetensors") | {**beside}
    random, stored = np.random.default_rng(7), {}
    for name, tensor in weights.items():
        linear = name.removesuffix(".weight")
        if ".layers." not in name or tensor.ndim != 2 or any(text in name for text in whole):
            stored[name] = tensor
            continue
        own, dequantised = draw(random, *tensor.shape)
        stored |= {f"{linear}.{suffix}": value for suffix, value in own.items()}
        weights[name] = np.ascontiguousarray(dequantised)
    save_file(weights, folder / "whole" / "model.safetensors")
    (folder / "quantised").mkdir()
    save_file(stored, folder / "quantised" / "model.safetensors")
    raw = json.loads((folder / "whole" / "config.json").read_text())
    raw["quantization_config"] = said | more
    (folder / "quantised" / "config.json").write_text(json.dumps(raw))
    return folder / "quantised"
