"""What a ``LongSpec`` may be made of, refused in words before anything is read or computed.

One table of rules for the constructors; the options of a call are checked by
:mod:`longspec_jax.generation.options`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from longspec_jax.checks import is_whole, shown
from longspec_jax.config import ATTENTION, DraftConfig, TargetConfig, TreeConfig
from longspec_jax.sharding import AXES

DTYPES = ("auto", "bfloat16", "float16", "float32")
LARGEST_CHUNK = 2048
"""Tokens of one prefill step that any target takes; more only if it has more positions."""


class _Rule(NamedTuple):
    good: Callable[[Any], bool]
    must_be: str


def _is_source(value: Any) -> bool:
    return isinstance(value, str | Path) and bool(str(value))


def _is_tokenizer(value: Any) -> bool:
    return callable(value) and hasattr(value, "decode") and not isinstance(value, type)


_SOURCE = "a folder or the name of a repository on the Hugging Face hub"
_REVISION = _Rule(
    lambda value: value is None or (isinstance(value, str) and value != ""),
    "the name of a branch, tag or commit on the hub",
)
_RULES = {
    "target_config": _Rule(lambda value: isinstance(value, TargetConfig), "a TargetConfig"),
    "draft_config": _Rule(
        lambda value: value is None or isinstance(value, DraftConfig), "a DraftConfig"
    ),
    "target": _Rule(_is_source, _SOURCE),
    "draft": _Rule(lambda value: value is None or _is_source(value), _SOURCE),
    "dtype": _Rule(
        lambda value: isinstance(value, str) and value in DTYPES, f"one of {', '.join(DTYPES)}"
    ),
    "mesh": _Rule(
        lambda value: value is None or (isinstance(value, Mesh) and value.axis_names == AXES),
        f"a mesh with the axes {', '.join(AXES)}, such as longspec_jax.make_mesh(tp=4) makes",
    ),
    "attention": _Rule(
        lambda value: value is None or (isinstance(value, str) and value in ATTENTION),
        f"one of {', '.join(ATTENTION)}, or left out to have it chosen",
    ),
    "revision": _REVISION,
    "draft_revision": _REVISION,
    "tokenizer": _Rule(
        lambda value: value is None or _is_tokenizer(value),
        "a tokenizer, as transformers.AutoTokenizer.from_pretrained(...) returns it",
    ),
    "prefill_chunk": _Rule(
        lambda value: is_whole(value) and value >= 1, "a number of tokens, at least 1"
    ),
    "draft_vocabulary": _Rule(
        lambda value: value is None or (is_whole(value) and value >= 1),
        "a number of tokens, at least 1; leave it out to propose from all",
    ),
    "draft_int8": _Rule(lambda value: isinstance(value, bool), "True or False"),
}


def check_arguments(**values: Any) -> None:
    """Refuse an argument of a constructor that is not what its name says.

    Args:
      **values: arguments of ``LongSpec`` or of ``LongSpec.from_pretrained``, by name.

    Raises:
      ValueError: names the argument, the value and what it must be.
    """
    for name, value in values.items():
        good, must_be = _RULES[name]
        if not good(value):
            raise ValueError(f"{name}={shown(value)} must be {must_be}")


def check_chunk(prefill_chunk: int, max_positions: int) -> None:
    """Refuse a prefill step that no prompt of this target could fill."""
    most = max(LARGEST_CHUNK, max_positions)
    if prefill_chunk > most:
        raise ValueError(
            f"prefill_chunk={prefill_chunk} is more than any prompt of this target "
            f"(max_positions={max_positions}) has use for; pass at most {most}"
        )


def as_tree(value: Any) -> TreeConfig:
    """A tree from what a call may name it by: itself, its text, or the widths of its levels.

    Raises:
      ValueError: for anything else.
    """
    if isinstance(value, str):
        return TreeConfig.parse(value)
    return value if isinstance(value, TreeConfig) else TreeConfig(value)
