"""Which prefix kernel serves a call: decided by the machine, the version of jax and the shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import hardware
from longspec_jax.ops.attention import dispatch, kernels, prefix_pallas
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.attention.packing import pack, unpack
from tests.ops.attention.oracle import Shape, inputs


def test_hopper_with_an_older_jax_takes_the_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not XLA, which is several times slower, although the Hopper kernel would be the fastest."""
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hardware, "mosaic_is_supported", lambda: False)
    calls = []
    real = prefix_pallas.split_attention
    monkeypatch.setattr(
        prefix_pallas,
        "split_attention",
        lambda *args, **how: calls.append(how) or real(*args, **how),
    )
    operand = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype("bfloat16"))
    cache, length = operand((1, 1, 4096, 128)), jax.ShapeDtypeStruct((1,), jnp.int32)
    jax.eval_shape(kernels.prefix_attention, operand((1, 69, 2, 128)), Prefix(cache, cache, length))
    assert [how["tile"].total_rows for how in calls] == [128]


def test_the_hopper_kernel_by_name_refuses_other_machines() -> None:
    if hardware.is_hopper():
        pytest.skip("this machine has the GPU that the kernel is written for")
    x = inputs(Shape(), "bfloat16", [3, 5])
    for op, operands in (("prefix", x.prefix), ("speculative", x.speculative)):
        with pytest.raises(NotImplementedError, match="is written for compute capability 9.x"):
            getattr(dispatch, f"{op}_attention")(*operands, implementation="mosaic")


def test_queries_are_packed_for_nothing() -> None:
    """Where they were unpacked before, as the kernel that rotates heads does."""
    tokens, kv_heads, groups, width = 5, 3, 2, 16
    q = jnp.arange(2.0 * tokens * kv_heads * groups * width).reshape(2, tokens, -1, width)
    packed = pack(q, kv_heads)
    assert packed.shape == (2, kv_heads, tokens * groups, width)
    row = 3 * groups + 1
    np.testing.assert_array_equal(packed[1, 2, row], q[1, 3, 2 * groups + 1])
    np.testing.assert_array_equal(unpack(packed, tokens), q)
    again = jax.jit(lambda packed: pack(unpack(packed, tokens) * 2, kv_heads))
    text = again.lower(packed).compile().as_text()
    assert "multiply" in text and "transpose" not in text and "copy" not in text
