"""The checker of shape annotations: functions that are defined again are not compiled again."""

from collections.abc import Callable
from typing import Any

from beartype import beartype

_checked: dict[Any, Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """What beartype makes of a function, once for each signature.

    jaxtyping passes functions without a body, which differ in their signatures alone. A function
    inside another has a new one for every call, and each took beartype some milliseconds.
    """
    if function.__qualname__.endswith("Config.__init__"):
        return function  # A configuration refuses wrong types itself, in words.
    code = function.__code__
    signature = (
        *(function.__module__, function.__qualname__, code.co_varnames, function.__defaults__),
        *(tuple((function.__kwdefaults__ or {}).items()), tuple(function.__annotations__.items())),
    )
    try:
        known = _checked.get(signature)
    except TypeError:  # A default or an annotation has no hash.
        return beartype(function)
    if known is None:
        known = _checked[signature] = beartype(function)
    return known
