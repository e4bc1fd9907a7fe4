"""How annotations are executed in tests: shapes by jaxtyping, all others only by beartype.

jaxtyping's wrapper binds the arguments of every call and keeps their sizes, some 50 microseconds of
it. Most functions of a decode loop's host have no shape in their signature: for them beartype does
the same checks in one.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

CONFIG = "Config.__init__"
"""Configurations refuse wrong types themselves, in words."""
_checked: dict[Any, Callable[..., Any]] = {}


def execute_annotations(modules: list[str]) -> None:
    """Check the annotations of these modules from their import on."""
    decorate = jaxtyping.jaxtyped

    def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
        """What the import hook puts before every function and class."""

        def checks(it: Any) -> Any:
            function = it.__init__ if inspect.isclass(it) else it
            if any(map(has_shape, getattr(function, "__annotations__", {}).values())):
                return decorate(it, typechecker=typechecker)
            if not inspect.isclass(it):
                # A function inside another is made again by every call, and so would its checks be.
                return it if "<locals>" in it.__qualname__ else beartype(it)
            if dataclasses.is_dataclass(it) and "__init__" in vars(it):
                it.__init__ = (
                    function if function.__qualname__.endswith(CONFIG) else beartype(function)
                )
            return it

        return checks

    jaxtyping.jaxtyped = jaxtyped  # The hook's decorators look it up there.
    install_import_hook(modules, f"{__name__}.checked")


def has_shape(annotation: Any) -> bool:
    """Whether there is an array's shape in it."""
    if isinstance(annotation, str):
        return "[" in annotation  # Not evaluated yet: it may be one.
    own = inspect.isclass(annotation) and issubclass(annotation, AbstractArray)
    return own or any(map(has_shape, get_args(annotation)))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """What beartype makes of a function, once for each signature.

    jaxtyping passes functions without a body, which differ only in their signatures. A function
    inside another has a new one for every call, and each took beartype some milliseconds.
    """
    if function.__qualname__.endswith(CONFIG):
        return function
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
