"""Mixtures of experts: every form against the float32 definition, and one row at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longspec_jax.ops.matmul import experts as module
from longspec_jax.ops.matmul.experts import (
    ExpertWeights,
    choose_experts,
    expert_mlp,
    expert_mlp_partials,
)
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.sharding import make_mesh, partition_spec
from tests.kit import each_row
from tests.ops.matmul.reference import expert_mlp_reference

WIDTH, HIDDEN, EXPERTS, CHOSEN = 17, 8, 12, 3
TOKENS = {"chosen": 1, "all": 5, "grouped": 97}
"""Of one row, for each form of the op."""


def normal(*shape: int, seed: int) -> jax.Array:
    return 0.5 * jax.random.normal(jax.random.key(seed), shape)


def weights(biases: bool = False) -> ExpertWeights:
    gate_up = normal(EXPERTS, 2, HIDDEN, WIDTH, seed=1)
    down = normal(EXPERTS, WIDTH, HIDDEN, seed=2)
    if not biases:
        return ExpertWeights(gate_up, down)
    more = normal(EXPERTS, 2, HIDDEN, seed=3), normal(EXPERTS, WIDTH, seed=4)
    return ExpertWeights(gate_up, down, *more)


def floats(seed: int, *shape: int) -> QuantisedMatrix:
    """Random 4-bit floats, all of them, and powers of two as their scales."""
    keys, inputs = jax.random.split(jax.random.key(seed)), shape[-1]
    codes = jax.random.bits(keys[0], (*shape[:-1], inputs // 2), jnp.uint8)
    power = jax.random.randint(keys[1], (*shape[:-1], inputs // 32), -7, -3)
    return QuantisedMatrix(codes, 2.0**power, group=32, floating=True)


def routed(x: jax.Array, skew: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """Choices of a random router; with a skew most rows choose the last experts."""
    router, bias = normal(WIDTH, EXPERTS, seed=5), skew * jnp.arange(EXPERTS)
    return choose_experts(x, router, bias, chosen=CHOSEN)


def form(rows: int) -> str:
    return module._form(rows, CHOSEN, EXPERTS).__name__.removeprefix("_")


@each_row("tokens", TOKENS.values())
@each_row("limit", [None, 0.7])
def test_forms_equal_the_definition(tokens: int, limit: float | None):
    """Grouped rows are skewed, so that one expert needs more than one pass."""
    assert TOKENS[form(tokens)] == tokens
    x = 2 * normal(1, tokens, WIDTH, seed=6)
    chosen = routed(x, skew=3.0 if tokens > 64 else 0.0)
    if tokens > 64:
        assert np.bincount(np.ravel(chosen[0]))[-1] > 64
    operands = x, *chosen, weights(biases=limit is not None)
    expected, actual = (
        jax.jit(op, static_argnames="limit")(*operands, limit=limit)
        for op in (expert_mlp_reference, expert_mlp)
    )
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(actual, expected, atol=3e-5)


def test_router_is_that_of_a_softmax():
    """The definitions of the families, in float64 and from the largest probability on."""
    x, router = normal(4, 5, WIDTH, seed=7), normal(WIDTH, EXPERTS, seed=8)
    logits = np.asarray(x, np.float64) @ np.asarray(router, np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    order = np.argsort(-logits, axis=-1)[..., :CHOSEN]
    best = np.take_along_axis(shares, order, axis=-1)
    for renormalised in (True, False):
        experts, found = choose_experts(x, router, chosen=CHOSEN, renormalised=renormalised)
        np.testing.assert_array_equal(experts, order)
        whole = best.sum(axis=-1, keepdims=True) if renormalised else 1.0
        np.testing.assert_allclose(found, best / whole, rtol=2e-5)


@each_row("tokens", [5, 97])
def test_a_row_does_not_see_the_rows_beside_it(tokens: int):
    """The same bits whatever the others choose: all its own expert, or spread."""
    x = normal(2, tokens, WIDTH, seed=9).at[1, 3].set(normal(WIDTH, seed=10))
    mlp = jax.jit(lambda x, skew: expert_mlp(x, *routed(x, skew), weights()))
    bits = []
    for others in (x, -2.0 * x, jnp.zeros_like(x) + x[1, 3]):
        bits.append(mlp(others.at[1, 3].set(x[1, 3]), 0.4)[1, 3])
    assert np.abs(bits[0]).max() > 0.5
    np.testing.assert_array_equal(bits[0], bits[1])
    np.testing.assert_array_equal(bits[0], bits[2])


def test_partials_are_the_summands():
    x = normal(2, 5, WIDTH, seed=15)
    operands = x, *routed(x), weights(biases=True)
    partials = expert_mlp_partials(*operands, 0.7)
    assert partials.shape == (CHOSEN, *x.shape) and partials.dtype == jnp.float32
    np.testing.assert_allclose(partials.sum(0), expert_mlp_reference(*operands, 0.7), atol=3e-5)


@pytest.mark.full
@pytest.mark.parametrize("tokens", [2, 97], ids=["all", "grouped"])
def test_experts_are_cut_over_a_mesh(tokens: int):
    """Each device holds and multiplies its own experts; the sum equals that of one device."""
    mesh = make_mesh(data=2, tp=4)
    x, held = normal(2, tokens, WIDTH, seed=11), weights(biases=True)
    chosen = routed(x)
    cut = jax.device_put(held, NamedSharding(mesh, P("tp")))
    rows = jax.device_put((x, *chosen), NamedSharding(mesh, P("data")))

    def run(*operands):
        with use_mesh(mesh.abstract_mesh):
            return expert_mlp(*operands), expert_mlp_partials(*operands)

    lowered = jax.jit(run).lower(*rows, cut).compile()
    gathered = f"f32[{EXPERTS},{WIDTH},{HIDDEN}]"
    assert gathered not in (lowered.as_text() or gathered)
    actual, partials = lowered(*rows, cut)
    np.testing.assert_allclose(actual, expert_mlp_reference(x, *chosen, held), atol=3e-5)
    # One of a row's experts is a partial: it is the sum if only it has a weight.
    only = chosen[1].at[..., 1:].set(0)
    first = expert_mlp_reference(x, chosen[0], only, held)
    np.testing.assert_allclose(partials[0], first, atol=3e-5)
    np.testing.assert_allclose(partials.sum(0), actual, atol=3e-5)


@pytest.mark.full
def test_experts_in_4_bits_are_cut_over_a_mesh():
    """Codes and scales with their experts; whole weights are nowhere all together."""
    mesh = make_mesh(data=2, tp=4)
    held = ExpertWeights(floats(1, EXPERTS, 2, 32, 64), floats(2, EXPERTS, 64, 32))
    x, router = normal(2, 5, 64, seed=13), normal(64, EXPERTS, seed=14)
    chosen = choose_experts(x, router, chosen=CHOSEN)
    cut = jax.device_put(held, NamedSharding(mesh, P("tp")))
    rows = jax.device_put((x, *chosen), NamedSharding(mesh, P("data")))

    def run(*operands):
        with use_mesh(mesh.abstract_mesh):
            return expert_mlp(*operands)

    lowered = jax.jit(run).lower(*rows, cut).compile()
    assert f"f32[{EXPERTS},2,32,64]" not in (lowered.as_text() or "")
    expected = expert_mlp_reference(x, *chosen, held)
    assert np.abs(expected).max() > 0.2
    np.testing.assert_allclose(lowered(*rows, cut), expected, atol=3e-5)
    for name in ("expert_gate_up/codes", "expert_down/codes", "expert_gate_up/scale"):
        assert partition_spec(f"layers_3/mlp/{name}")[0] == "tp"


def test_sixteen_bits_are_close_to_the_definition():
    x = normal(1, 97, WIDTH, seed=12).astype(jnp.bfloat16)
    held = jax.tree.map(partial(jnp.asarray, dtype=jnp.bfloat16), weights())
    chosen = routed(x)
    actual = jax.jit(expert_mlp)(x, *chosen, held)
    assert actual.dtype == jnp.bfloat16
    expected = np.asarray(expert_mlp_reference(x, *chosen, held), np.float32)
    error = np.abs(np.asarray(actual, np.float32) - expected)
    assert error.max() < 0.02 * np.abs(expected).max()
