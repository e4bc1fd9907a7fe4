"""How an op chooses its implementation, and that Triton's kernels are left as they are written."""

import importlib
import sys
import types
from typing import Any

import pytest

from longspec_jax.ops.dispatch import Op


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
            op(3, implementation=name)
    with pytest.raises(ValueError, match=r"op has no implementation 'd'; choose .*'a', 'b', 'c'"):
        op(3, implementation="d")


def test_a_defect_is_no_refusal() -> None:
    with pytest.raises(ValueError, match="a defect"):
        Op("op", {"a": fails, "b": takes})(3)


def test_triton_sees_the_functions_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not wrapped by the hook that executes annotations, unlike those of any other module.

    Triton itself need not be installed: what it would compile is what its decorator is given.
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
        importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)
    assert [function.__name__ for function in given] == ["_split_kernel", "_merge_kernel"]
    assert not any(hasattr(function, "__wrapped__") for function in given)
    if "beartype" in sys.modules:  # Otherwise no hook is installed.
        assert hasattr(Op.__call__, "__wrapped__")
