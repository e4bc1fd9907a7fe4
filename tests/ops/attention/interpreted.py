"""Attention's Mosaic GPU kernels without a GPU, by what Pallas' interpreter knows."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from longspec_jax.ops import mosaic
from longspec_jax.ops.attention import float8, prefix_attending, recent_programs, widening


def interpret(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Interpret these kernels from now on.

    The interpreter's matrix units take no operand from registers, so weights pass through shared
    memory. It has no accumulators that begin with a value, so they are added. And registers are
    whole arrays, whose codes are widened by their definition. It wants that all wait for the last
    arrivals before the kernel ends, which is of no use. Nor does it know instructions by name.
    """
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import Barrier
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    compiled, multiply = plgpu.kernel, plgpu.wgmma
    held = []

    def kernel(body: Any, *, scratch_types: Any, num_threads: int = 1, **options: Any) -> Any:
        def with_operand(*refs: Any, operand: Any, **memory: Any) -> None:
            thread = jax.lax.axis_index("warpgroup") if num_threads > 1 else 0
            held[:] = [operand.at[thread]]
            body(*refs, **memory)

        if num_threads > 1:
            options["num_threads"] = num_threads
        operand = plgpu.SMEM((num_threads, 64, 128), jnp.dtype(dtype))
        options |= dict(scratch_types=scratch_types | {"operand": operand})
        return compiled(with_operand, **options | {"interpret": InterpretGPUParams()})

    def wgmma(acc: Any, a: Any, b: Any) -> None:
        if isinstance(a, jax.Array):
            operand = held[0].at[:, pl.ds(0, a.shape[1])]
            operand[...] = a
            plgpu.commit_smem()
            a = operand
        multiply(acc, a, b)

    class Accumulator:
        """A shape, or the value to begin with."""

        def __new__(cls, *shape: Any) -> Any:
            return plgpu.ACC(*shape)

        init = staticmethod(lambda value: value)

    let_go_of = Barrier.deallocate

    def let_go(self: Any) -> None:
        if self.ref_count == 1:
            self.last_observed_phase_by_thread.clear()
        let_go_of(self)

    def run_state(body: Any) -> Any:
        def run(value: jax.Array) -> jax.Array:
            def added(ref: Any) -> jax.Array:
                body(ref)
                return ref[...]

            return value + pl.run_scoped(added, plgpu.ACC(value.shape, value.dtype))

        return run

    monkeypatch.setattr(Barrier, "deallocate", let_go)
    monkeypatch.setattr(plgpu, "kernel", kernel)
    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    monkeypatch.setattr(pl, "run_state", run_state)
    monkeypatch.setattr(prefix_attending, "ACC", Accumulator)
    monkeypatch.setattr(prefix_attending, "first_of_pairs", first_of_pairs)
    monkeypatch.setattr(recent_programs, "row_product", jnp.multiply)
    monkeypatch.setattr(recent_programs, "product", lambda left, right, _: left * right)
    monkeypatch.setattr(mosaic, "product", lambda left, right, layout: left * right)
    monkeypatch.setattr(
        widening, "widened", lambda codes, dtype, layout: float8.widened(codes, dtype)
    )


def first_of_pairs(numbers: jax.Array) -> jax.Array:
    """As :func:`longspec_jax.ops.mosaic.first_of_pairs`."""
    return jnp.repeat(numbers.reshape(4, 2, 8, -1)[:, :1], 2, axis=1).reshape(numbers.shape)


def interpret_devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret kernels that each of several devices runs on its share.

    When a program of one device is done, the interpreter takes those of all others to be done.
    """
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory

    reset = GPUSharedMemory.reset_per_cluster_state

    def begin(memory: Any) -> None:
        if not hasattr(memory, "named_barriers"):
            reset(memory)

    monkeypatch.setattr(GPUSharedMemory, "reset_per_cluster_state", begin)
    monkeypatch.setattr(GPUSharedMemory, "assert_no_barriers_allocated", lambda memory: None)
