"""On a GPU the levels of an EAGLE-3 draft in 8 bits with a window are our kernels."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.eagle3 import Eagle3Drafter
from longspec_jax.ops import hardware, launchers
from tests.drafters.eagle3.toys import config_for, random_params
from tests.kit import greedy_beliefs, tiny_target_config, view_of

TARGET = tiny_target_config(
    vocab_size=8192, model_width=512, mlp_width=1024, num_heads=8, num_kv_heads=2, head_width=64
)
DRAFT = config_for(
    dataclasses.replace(TARGET, dtype="bfloat16"),
    mlp_width=1024,
    num_heads=8,
    num_kv_heads=2,
    head_width=64,
)
KERNELS = 13
"""Of a level: five matmuls (q, k and v together, out, gate and up together, down, LM head), one
that splits heads, two of attention, two norms, and three that choose the best continuations."""
CALLS = "pallas_call", "mpmd_map"
"""What launches a kernel: Triton's, and Mosaic's of jax 0.11."""


def _operations(jaxpr: Any) -> Iterator[Any]:
    """All equations outside of kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in CALLS:
            for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _operations(inner)


def test_a_level_is_launches_of_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matmul is left to XLA; the root's attention is one kernel, not two."""
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(launchers, "compute_capability", lambda: None)  # Not lowered apart.
    drafter = Eagle3Drafter(DRAFT, TreeConfig((6, 6, 6)), window=256, sinks=4)
    params = Params(None, random_params(DRAFT).in_int8())

    def propose(params: Params) -> Any:
        ones, none = jnp.ones(1, jnp.int32), jnp.zeros((1, 2, 8, 64), jnp.bfloat16)
        state = drafter.begin(params, 1, 1024)
        return drafter.propose(params, state, view_of(ones, ones, none, none), greedy_beliefs(1, 3))

    found = [*_operations(jax.make_jaxpr(propose)(params).jaxpr)]
    assert not any(each.primitive.name == "dot_general" for each in found)
    kernels = [each for each in found if each.primitive.name in CALLS]
    assert len(kernels) == 3 * KERNELS - 1
