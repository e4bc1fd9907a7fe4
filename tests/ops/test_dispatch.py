"""How ops choose their implementations, and that Triton's kernels are left as they are written."""

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longspec_jax.ops import hardware, layer
from longspec_jax.ops.attention import dispatch as attention
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.dispatch import Op, traced_once
from longspec_jax.ops.matmul import few_rows, quantised
from longspec_jax.ops.matmul.packed import pack
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.ops.selection.continuations import best_continuations
from tests.kit import each_row
from tests.ops.shapes import half, real, truth, whole


def takes(x: int, *, more: int = 0) -> int:
    return x + more


def refuses(x: int, *, more: int = 0) -> int:
    raise NotImplementedError(f"{x} is too large")


def lacks(x: int, *, more: int = 0) -> int:
    raise ImportError("no module named 'nothing'")


def fails(x: int, *, more: int = 0) -> int:
    raise ValueError("a defect")


def test_the_first_that_does_not_refuse_is_chosen() -> None:
    assert Op("op", {"a": refuses, "b": lacks, "c": takes, "d": fails})(3, more=4) == 7


def test_all_refusals_are_reported_together() -> None:
    expected = (
        "no implementation of op takes this call. a: 3 is too large; "
        "b: its backend cannot be imported: no module named 'nothing'"
    )
    with pytest.raises(NotImplementedError) as refused:
        Op("op", {"a": refuses, "b": lacks}, {"c": takes})(3)
    assert str(refused.value) == expected


def test_an_explicit_choice_never_falls_back() -> None:
    op = Op("op", {"a": takes, "b": refuses}, {"c": lacks})
    for name, message in (("b", "3 is too large"), ("c", "cannot be imported")):
        with pytest.raises(NotImplementedError, match=message):
            op.named(name)(3)
    with pytest.raises(ValueError, match=r"op has no implementation 'd'; choose .*'a', 'b', 'c'"):
        op.named("d")


def test_a_function_is_traced_once_for_all_calls_of_one_shape() -> None:
    traced = []

    @traced_once("factor")
    def scaled(x: jax.Array, *, factor: float) -> jax.Array:
        traced.append((x.shape, factor))
        return x * factor

    def layers(x: jax.Array) -> jax.Array:
        return scaled(scaled(x, factor=2.0), factor=2.0) - scaled(x, factor=3.0)

    assert jax.jit(layers)(jnp.full(5, 7.0)).tolist() == [7.0] * 5
    assert traced == [((5,), 2.0), ((5,), 3.0)]


def test_two_layers_have_one_attention_in_the_text_of_their_program() -> None:
    """Else Python takes twice as long to make it; XLA is given the same in both cases."""
    prefix = Prefix(real((1, 2, 16, 8)), real((1, 2, 16, 8)), whole((1,)))
    fresh = Fresh(real((1, 3, 2, 8)), real((1, 3, 2, 8)), truth((1, 3, 3)))

    def layers(q: jax.Array, *others: Any) -> jax.Array:
        attend = partial(attention.speculative_attention, implementation="xla")
        return attend(attend(q, *others), *others)

    text = jax.jit(layers).lower(real((1, 3, 4, 8)), prefix, fresh).as_text()
    assert text.count("stablehlo.while") == 1


def test_a_defect_is_no_refusal() -> None:
    with pytest.raises(ValueError, match="a defect"):
        Op("op", {"a": fails, "b": takes})(3)


Q, CACHE, LENGTH, ROWS = (
    half((1, 8, 8, 64)),
    half((1, 2, 512, 64)),
    whole((1,)),
    half((1, 8, 2, 64)),
)
PREFIX = Prefix(CACHE, CACHE, LENGTH)
FRESH = Fresh(ROWS, ROWS, jax.ShapeDtypeStruct((1, 8, 8), jnp.bool_))
INT8, INT8_PAIR = (
    QuantisedMatrix(jax.ShapeDtypeStruct((*out, 512), jnp.int8), real((*out, 1)))
    for out in ((8192,), (2, 4096))
)
PACKED, PACKED_PAIR = (
    jax.eval_shape(partial(pack, dtype=jnp.dtype("bfloat16")), each) for each in (INT8, INT8_PAIR)
)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "prefix": (attention.prefix_attention, (Q, PREFIX)),
    "tree": (attention.tree_attention, (Q, FRESH)),
    "speculative": (attention.speculative_attention, (Q, PREFIX, FRESH)),
    "chunk": (attention.speculative_attention, (Q, PREFIX, Fresh(ROWS, ROWS))),
    "norm": (
        partial(layer.residual_norm, eps=1e-5),
        (half((1, 8, 96)), half((1, 1, 8, 96)), half((96,))),
    ),
    "heads": (layer.split_heads, (half((1, 8, 2, 6, 64)), real((1, 8, 32)), real((1, 8, 32)))),
    "normed heads": (
        partial(layer.split_heads, eps=1e-6),
        (half((1, 8, 2, 6, 64)), *[real((1, 8, 32))] * 2, (half((64,)), half((64,)))),
    ),
    "heads among others": (
        partial(layer.split_into, first=1),
        (half((1, 8, 2, 6, 64)), *[real((1, 1, 32))] * 2, (half((1, 9, 2, 64)),) * 2),
    ),
    "append": (layer.append_rows, ([CACHE], [ROWS], whole((1, 3)), LENGTH)),
    "int8": (quantised.quantised_matmul, (half((8, 512)), INT8.replace(order=whole((512,))))),
    "int8 partials": (partial(quantised.quantised_matmul, split=True), (half((8, 512)), INT8)),
    "int8 gated": (partial(quantised.quantised_matmul, gated=True), (half((8, 512)), INT8_PAIR)),
    "quantised": (quantised.quantised_matmul, (half((8, 512)), PACKED)),
    "quantised partials": (
        partial(quantised.quantised_matmul, split=True),
        (half((8, 512)), PACKED),
    ),
    "quantised gated": (
        partial(quantised.quantised_matmul, gated=True),
        (half((8, 512)), PACKED_PAIR),
    ),
    "continuations": (partial(best_continuations, count=4), (real((1, 4, 5000)), real((1, 4)))),
    "matmul": (few_rows.matmul, (half((8, 512)), half((512, 8192)))),
    "partials": (partial(few_rows.matmul, split=True), (half((8, 512)), half((512, 8192)))),
    "gated": (partial(few_rows.matmul, gated=True), (half((8, 512)), half((512, 2, 8192)))),
}


@each_row("name", CALLS)
def test_a_decode_step_on_a_gpu_takes_the_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong refusal would fall back to XLA, right and slow; on this CPU all must fall back."""
    mosaic = "matmul", "partials", "gated", "quantised", "quantised partials", "quantised gated"
    if name in mosaic and not hardware.mosaic_is_supported():
        pytest.skip("the kernel needs jax 0.11 or newer")
    op, operands = CALLS[name]

    def has_kernel() -> bool:
        program = str(jax.make_jaxpr(lambda *x: op(*x))(*operands))
        return "pallas_call[" in program or "wgmma" in program

    if jax.default_backend() == "cpu":
        assert not has_kernel()
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    assert has_kernel()


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    """The module with kernels for jax-triton, and what it gave to Triton's decorator.

    Triton itself need not be installed.
    """
    given: list[Any] = []
    language = types.ModuleType("triton.language")
    language.constexpr = int  # type: ignore[attr-defined]
    triton = types.ModuleType("triton")
    triton.jit = lambda function: given.append(function) or function  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    name = "longspec_jax.ops.attention.prefix_triton"
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        yield importlib.import_module(name), given
    finally:
        sys.modules.pop(name, None)


def test_triton_sees_the_functions_as_they_are_written(triton_kernels) -> None:
    """Not wrapped by the hook that executes annotations, unlike those of any other module."""
    _, given = triton_kernels
    assert [function.__name__ for function in given] == ["_split_kernel", "_merge_kernel"]
    assert not any(hasattr(function, "__wrapped__") for function in given)
    if "beartype" in sys.modules:  # Otherwise no hook is installed.
        assert hasattr(Op.named, "__wrapped__")


def test_a_jax_that_jax_triton_cannot_trace_in_is_refused(
    triton_kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rule of dead code takes two operands, and jax 0.12 gives three: a bare TypeError."""
    module, _ = triton_kernels
    package = types.ModuleType("jax_triton")
    monkeypatch.setitem(sys.modules, "jax_triton", package)
    for release, jax_release, refused in (
        ("0.4.1", (0, 12, 0), True),
        ("0.4.1", (0, 11, 2), False),
        ("0.3.1", (0, 11, 2), False),
        ("0.5.0", (0, 12, 0), False),
    ):
        package.__version__ = release  # type: ignore[attr-defined]
        monkeypatch.setattr(jax, "__version_info__", jax_release)
        if refused:
            with pytest.raises(NotImplementedError, match=f"jax-triton {release} fails in jit"):
                module._import()
        else:
            assert module._import() is package
