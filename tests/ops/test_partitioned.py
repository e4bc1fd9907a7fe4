"""The kernels on a mesh: every device computes its share, and no device gathers an operand."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longspec_jax.ops import layer_pallas
from longspec_jax.ops.attention import fresh_pallas, kernels
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.sharding import BATCH, make_mesh

pytestmark = pytest.mark.full

DATA = BATCH[0]
TOKENS, WIDTH, SLOTS, KEYS = 3, 16, 67, 5
SPECS = dict(
    q=P(DATA, None, "tp"),
    slots=P(DATA, "tp"),
    length=P(DATA),
    start=P(DATA),
    rows=P(DATA, None, "tp"),
    mask=P(DATA),
    path=P(DATA),
    qkv=P(DATA, None, "tp"),
    cos=P(DATA),
    x=P(DATA),
    scale=P(),
)
"""Where the operands of a decode step lie."""


def operands(kv_heads: int = 2, groups: int = 2) -> dict[str, jax.Array]:
    """Two batch rows; keys serve as values too."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    return dict(
        q=normal(2, TOKENS, kv_heads * groups, WIDTH),
        slots=normal(2, kv_heads, SLOTS, WIDTH),
        length=jnp.asarray([61, 17]),
        start=jnp.asarray([40, 0]),
        rows=normal(2, KEYS, kv_heads, WIDTH),
        mask=jnp.asarray(random.random((2, TOKENS, KEYS)) < 0.5),
        path=jnp.asarray([[0, 4], [2, 3]]),
        qkv=normal(2, TOKENS, kv_heads, groups + 2, WIDTH),
        cos=normal(2, TOKENS, WIDTH // 2),
        x=normal(2, TOKENS, 24),
        scale=normal(24),
    )


def attention(
    q: jax.Array,
    slots: jax.Array,
    length: jax.Array,
    rows: jax.Array,
    mask: jax.Array,
    **others: jax.Array,
) -> Any:
    operands = Prefix(slots, slots, length), Fresh(rows, rows, mask)
    return kernels.speculative_attention(q, *operands, interpret=True)


def every_op(**x: jax.Array) -> Any:
    """All partitioned kernels in one program."""
    slots, length, rows = x["slots"], x["length"], x["rows"]
    prefix = functools.partial(kernels.prefix_attention, interpret=True)
    return (
        attention(**x),
        prefix(x["q"], Prefix(slots, slots, length)),
        prefix(x["q"], Prefix(slots, slots, length, x["start"])),
        fresh_pallas.tree_attention(x["q"], Fresh(rows, rows, x["mask"]), interpret=True),
        layer_pallas.split_heads(x["qkv"], x["cos"], x["cos"], interpret=True),
        layer_pallas.split_heads(
            *(x["qkv"], x["cos"], x["cos"], (jnp.full(x["qkv"].shape[-1], 2.0),) * 2),
            eps=1e-5,
            interpret=True,
        ),
        layer_pallas.split_heads(
            *(x["qkv"], x["cos"][:, :1], x["cos"][:, :1], None, (rows, 2 * rows)),
            first=1,
            interpret=True,
        ),
        layer_pallas.residual_norm(x["x"], x["x"][None], x["scale"], eps=1e-5, interpret=True),
        layer_pallas.residual_norm(x["x"], None, x["scale"], eps=1e-5, interpret=True),
        layer_pallas.append_rows(
            [slots, 2 * slots, slots], [rows, rows, 2 * rows], x["path"], length, interpret=True
        ),
    )


def put(mesh: Mesh, arrays: dict[str, jax.Array], **specs: P) -> dict[str, jax.Array]:
    """Operands as a decode step holds them, but for ``specs``."""
    where = {**SPECS, **specs}
    return {
        name: jax.device_put(array, NamedSharding(mesh, where[name]))
        for name, array in arrays.items()
    }


def collectives(text: str) -> set[str]:
    """The kinds of communication in a compiled program."""
    return set(re.findall(r"(all-gather|all-reduce|all-to-all|collective-permute)", text))


@functools.cache
def expected(op: Callable[..., Any], kv_heads: int, groups: int = 2) -> Any:
    """What one device computes."""
    return jax.jit(op)(**operands(kv_heads, groups))


def test_shares_are_computed_where_they_lie() -> None:
    mesh = make_mesh(data=2, tp=2)
    arrays = put(mesh, operands())
    with use_mesh(mesh.abstract_mesh):
        compiled = jax.jit(every_op).lower(**arrays).compile()
    assert collectives(compiled.as_text()) == set()
    actual = compiled(**arrays)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
    jax.tree.map(close, actual, expected(every_op, 2))
    q, prefix, _, _, (_, k, _), *_, (total, _), _, (cache, *_) = actual
    for array in (q, prefix.out, prefix.lse, k):
        where = NamedSharding(mesh, P(DATA, None, "tp"))
        assert array.sharding.is_equivalent_to(where, array.ndim)
    assert cache.sharding.is_equivalent_to(NamedSharding(mesh, P(DATA, "tp")), 4)
    assert total.sharding.is_equivalent_to(NamedSharding(mesh, P(DATA)), 3)


def test_without_the_rule_operands_are_gathered() -> None:
    """Negative control: the search above finds what an opaque kernel costs."""
    arrays = put(make_mesh(data=2, tp=2), operands())
    bare = kernels.speculative_attention.__wrapped__.__wrapped__

    def opaque(**x: jax.Array) -> Any:
        prefix = Prefix(x["slots"], x["slots"], x["length"])
        return bare(x["q"], prefix, Fresh(x["rows"], x["rows"], x["mask"]), interpret=True)

    assert "all-gather" in collectives(jax.jit(opaque).lower(**arrays).compile().as_text())


@pytest.mark.parametrize(
    ("kv_heads", "specs"),
    [
        pytest.param(1, dict(slots=P(), rows=P(), qkv=P()), id="one head on two devices"),
        pytest.param(2, dict(slots=P(None, None, None, "tp"), q=P("tp")), id="other axes cut"),
    ],
)
def test_what_does_not_fit_is_gathered_and_right(kv_heads: int, specs: dict[str, P]) -> None:
    mesh = make_mesh(tp=2)
    arrays = put(mesh, operands(kv_heads), **specs)
    with use_mesh(mesh.abstract_mesh):
        actual = jax.jit(attention)(**arrays)
    np.testing.assert_allclose(actual, expected(attention, kv_heads), rtol=1e-5, atol=2e-6)


def test_one_device_runs_the_op_itself() -> None:
    """Nothing of a share is in the program, although this process has eight devices."""

    def lowered(op: Callable[..., Any]) -> str:
        return op.lower(*arguments, interpret=True).as_text()

    x = operands()
    arguments = (x["q"], Fresh(x["rows"], x["rows"], x["mask"]))
    ours = fresh_pallas.tree_attention
    plain = jax.jit(ours.__wrapped__.__wrapped__, static_argnames=("interpret",))
    assert lowered(ours) == lowered(plain)


def test_equal_layers_are_lowered_once() -> None:
    def layers(**x: jax.Array) -> jax.Array:
        q = x["q"]
        for _ in range(3):
            q = attention(**{**x, "q": q + x["q"]})
        return q

    mesh = make_mesh(tp=2)
    arrays = put(mesh, operands())
    with use_mesh(mesh.abstract_mesh):
        text = jax.jit(layers).lower(**arrays).as_text()
    assert text.count("call @speculative_attention") == 3
    assert text.count("func.func private @speculative_attention(") == 1
