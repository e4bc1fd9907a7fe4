"""The scales with which a checkpoint's maker would have its keys and values cached.

Compressed-tensors names them ``self_attn.k_scale`` and ``self_attn.v_scale`` (its
``kv_cache_scheme``). Older files have one ``self_attn.kv_scale`` for both, or
``k_proj.output_scale`` and ``v_proj.output_scale``. Each is a number, or one for every key/value
head. What is stored is the number divided by its scale.
"""

import numpy as np

from longspec_jax.config.layers import HeadScales
from longspec_jax.config.target import TargetConfig
from longspec_jax.weights.checkpoint import Tensor, Tensors

NAMES = {
    "keys": ("k_scale", "kv_scale", "k_proj.output_scale"),
    "values": ("v_scale", "kv_scale", "v_proj.output_scale"),
}
"""Below ``model.layers.N.self_attn``, the first one that is there."""
FORMS = ("bfloat16", "float16", "float32", "float64")


def cached_scales(config: TargetConfig, tensors: Tensors) -> tuple[HeadScales | None, ...]:
    """The scales of every layer; empty where a checkpoint has none, which stands for 1.

    Raises:
      ValueError: if only some layers or only keys have scales, or a number is no valid scale.
    """
    found = [
        [_of_layer(config, tensors, index, names) for names in NAMES.values()]
        for index in range(config.num_layers)
    ]
    if not any(each is not None for layer in found for each in layer):
        return ()
    scales: list[HeadScales | None] = []
    for index, (keys, values) in enumerate(found):
        if index in config.recurrent_layers:
            scales.append(None)
            continue
        if keys is None or values is None:
            missing = "keys" if keys is None else "values"
            raise ValueError(
                f"the checkpoint has scales for cached keys and values, but none for the {missing} "
                f"of layer {index}; load it without kv_dtype"
            )
        plain = {*keys, *values} == {1.0}
        scales.append(None if plain else HeadScales(keys, values))
    return tuple(scales) if any(scales) else ()


def _of_layer(
    config: TargetConfig, tensors: Tensors, index: int, names: tuple[str, ...]
) -> tuple[float, ...] | None:
    """One scale or one for each head; None where there is none."""
    below = f"model.layers.{index}.self_attn."
    name = next((below + name for name in names if below + name in tensors), None)
    return None if name is None else _numbers(config, name, tensors[name])


def _numbers(config: TargetConfig, name: str, tensor: Tensor) -> tuple[float, ...]:
    read = np.asarray(tensor.read(tuple(slice(None) for _ in tensor.shape))).astype(np.float64)
    numbers = read.reshape(-1)
    good = tensor.dtype in FORMS and len(numbers) in (1, config.num_kv_heads)
    if not good or not (np.isfinite(numbers) & (numbers > 0)).all():
        raise ValueError(
            f"{tensor.file}: {name} is {tensor.dtype} {tensor.shape}; scales of cached keys and "
            f"values are positive numbers, 1 or one for each of {config.num_kv_heads} heads. Load "
            "the checkpoint without kv_dtype"
        )
    return tuple(numbers.tolist())
