"""What the server asks of the engine and the engine may not have yet.

Every function here goes when the engine has the option in question.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from longspec_jax.generation.options import GenerateOptions
from longspec_jax.generation.requests import RequestEngine

from .rules import Refused


def known(call: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that a function takes."""
    names = inspect.signature(call).parameters
    return {name: value for name, value in options.items() if name in names}


NEUTRAL: dict[str, Any] = {
    "priority": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "logit_bias": {},
}


def submittable(engine: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a row, without those that are unknown and have no effect.

    Raises:
      Refused: for one that the engine does not know and that has an effect.
    """
    if not isinstance(engine, RequestEngine):
        return dict(options)
    names = {*GenerateOptions.__annotations__, *inspect.signature(RequestEngine.submit).parameters}
    found = {}
    for name, value in options.items():
        if name in names:
            found[name] = value
        elif value != NEUTRAL.get(name):
            raise Refused(f"{name} is not supported yet; leave it out", name)
    return found


def of_output(output: Any, name: str, default: Any) -> Any:
    """A field of an engine's output."""
    return getattr(output, name, default)
