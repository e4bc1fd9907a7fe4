"""How every op chooses its implementation.

An op is a public function with a docstring, and an :class:`Op` that lists its implementations by
name. Each is a module-level function of the same operands. It raises ``NotImplementedError`` with
a sentence where it cannot run: on this machine, with this version of jax, for this shape.

To add a kernel, write it in a file of its own beside the op (``..._mosaic.py``), write a function
that refuses what the kernel cannot do and then imports and calls it, and list that function in
the op's :class:`Op`. The import belongs inside the function: this version of jax may lack the
kernel's backend, and a CPU need not spend the time.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longspec_jax.ops import hardware

Implementation = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Op:
    """The implementations of an op.

    Attributes:
      name: of the op, for messages.
      automatic: the implementations that are tried, in this order, when none is named.
      by_name: those that run only when they are named.
    """

    name: str
    automatic: Mapping[str, Implementation]
    by_name: Mapping[str, Implementation] = dataclasses.field(default_factory=dict)

    @property
    def implementations(self) -> dict[str, Implementation]:
        """All of them, by name."""
        return {**self.automatic, **self.by_name}

    def __call__(self, *operands: Any, implementation: str | None = None, **options: Any) -> Any:
        """Run the named implementation, or the first automatic one that does not refuse.

        Raises:
          ValueError: if there is no implementation of this name.
          NotImplementedError: if the named implementation refuses, or all automatic ones do.
        """
        if implementation is not None:
            if implementation not in self.implementations:
                raise ValueError(
                    f"{self.name} has no implementation {implementation!r}; choose one of "
                    f"{sorted(self.implementations)}"
                )
            return _run(self.implementations[implementation], operands, options)
        refusals = []
        for name, candidate in self.automatic.items():
            try:
                return _run(candidate, operands, options)
            except NotImplementedError as refusal:
                refusals.append(f"{name}: {refusal}")
        raise NotImplementedError(
            f"no implementation of {self.name} takes this call. " + "; ".join(refusals)
        )


def where_triton_is_not_first(kernel: Implementation) -> Implementation:
    """A kernel for Mosaic that is refused where Triton's is to be taken, which is listed next."""

    @functools.wraps(kernel)
    def call(*operands: Any, **options: Any) -> Any:
        if hardware.triton_comes_first():
            raise NotImplementedError("Triton's kernel is taken where this jax has it")
        return kernel(*operands, **options)

    return call


def _run(
    implementation: Implementation, operands: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run an implementation; a backend that cannot be imported is a refusal."""
    try:
        return implementation(*operands, **options)
    except ImportError as error:
        raise NotImplementedError(f"its backend cannot be imported: {error}") from error
