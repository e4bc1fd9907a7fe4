"""What a GGUF file says of its model, as the readers of :mod:`.architectures` ask for it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from longspec_jax.weights.json_files import JsonObject

Raw: TypeAlias = dict[str, Any]
"""Keys of a ``config.json``."""


@dataclass(frozen=True)
class Metadata:
    """The keys of an architecture, and what else a configuration is read from."""

    file: JsonObject
    """All keys of the file."""
    prefix: str
    """What its own keys begin with, and a full stop."""
    factors: Mapping[str, np.ndarray]
    """Tensors that divide the frequencies of the rotation, by name."""
    tensors: Collection[str]
    """Names of all tensors of the file."""

    def has(self, key: str) -> bool:
        """Whether the file gives a value of the architecture's."""
        return self.file.has(self.prefix + key)

    def whole(self, key: str, default: int | None = None, least: int = 0) -> int:
        """A whole number of the architecture's."""
        return self.file.whole(self.prefix + key, default, least)

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the architecture's."""
        return self.file.number(self.prefix + key, default)

    def value(self, key: str) -> Any:
        """Any value of the architecture's; None if absent."""
        return self.file.values.get(self.prefix + key)

    def error(self, key: str, rule: str) -> ValueError:
        """What is wrong with a value, to be raised."""
        return self.file.error(self.prefix + key, rule, "load another file")

    def only(self, key: str, supported: object) -> None:
        """Refuse any other value than the one that is computed."""
        if self.has(key) and self.value(key) != supported:
            raise self.error(key, f"is not supported, only {supported!r}")


Reader: TypeAlias = Callable[[Metadata, Raw], Raw]
"""Further keys of a ``config.json``, given the metadata and what is known of it."""


def window_pattern(metadata: Metadata, layers: int) -> Raw:
    """Which layers have the window: a list, or that every so many-th has none."""
    key = "attention.sliding_window_pattern"
    pattern = metadata.value(key)
    if not isinstance(pattern, list):
        return {} if pattern is None else {"sliding_window_pattern": metadata.whole(key, least=1)}
    if len(pattern) != layers or not all(isinstance(each, bool) for each in pattern):
        raise metadata.error(key, f"must be true or false for each of the {layers} layers")
    return {"layer_types": [f"{'sliding' if each else 'full'}_attention" for each in pattern]}


def by_kind(metadata: Metadata, key: str, kinds: Sequence[bool]) -> dict[bool, int]:
    """A number of all layers, or of each, and then the same of all of a kind."""
    value = metadata.value(key)
    if not isinstance(value, list):
        return dict.fromkeys((True, False), metadata.whole(key, least=1))
    found = dict(zip(kinds, value, strict=False))
    if len(value) != len(kinds) or [found[kind] for kind in kinds] != value:
        raise metadata.error(key, "must be a number for each layer, the same of all of a kind")
    return {kind: found.get(kind, value[0]) for kind in (True, False)}
