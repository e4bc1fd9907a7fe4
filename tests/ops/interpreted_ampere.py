"""Kernels of :mod:`longspec_jax.ops.ampere` without a GPU: its instructions by their definitions.

Pallas' interpreter knows shared memory and programs, and not these instructions. Waits are left
out: here a copy is done when it returns.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longspec_jax.axes import Array, Ref
from longspec_jax.ops import ampere, mosaic


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret these kernels from now on."""
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    from longspec_jax.ops.attention import path_ampere

    compiled = plgpu.kernel

    def kernel(body: Any, **options: Any) -> Any:
        return compiled(body, **options | {"interpret": InterpretGPUParams()})

    def copy(source: Ref, at: tuple[Any, ...], target: Ref) -> None:
        target[...] = source[at]

    def mma(acc: Array, a: Array, b: Array) -> Array:
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)

    def store(target: Ref, value: Array) -> None:
        target[...] = value

    def load(ref: Ref, *_: Any, **__: Any) -> Array:
        return ref[...]

    def gather(source: Ref, at: tuple[Any, ...], _: Any) -> Array:
        return source[...][at]

    def scatter(target: Ref, at: tuple[Any, ...], value: Array, there: Array, _: Any) -> None:
        # What is not there goes to a place after the last one, and is dropped.
        *before, last = at
        last = jnp.where(there, last, target.shape[-1])
        target[...] = target[...].at[(*before, last)].set(value.astype(target.dtype), mode="drop")

    def iota(dtype: Any, shape: tuple[int, ...], axis: int, **_: Any) -> Array:
        return jax.lax.broadcasted_iota(dtype, shape, axis)

    for module in (mosaic, path_ampere):
        monkeypatch.setattr(module, "product", lambda left, right, layout: left * right)
    monkeypatch.setattr(plgpu, "kernel", kernel)
    monkeypatch.setattr(plgpu, "layout_cast", lambda value, _: value)
    monkeypatch.setattr(plgpu, "load", load)
    monkeypatch.setattr(plgpu, "broadcasted_iota", iota)
    for name, meaning in dict(
        copy=copy,
        skip=lambda: None,
        wait=lambda _: None,
        barrier=lambda: None,
        left=load,
        right=load,
        as_left=lambda value: value,
        mma=mma,
        store=store,
        gather=gather,
        scatter=scatter,
    ).items():
        monkeypatch.setattr(ampere, name, meaning)
    jax.clear_caches()
