"""How every op chooses its implementation.

An op is defined by a function in plain JAX, its implementation ``xla``, which runs everywhere and
has the gradient. :func:`op` makes an :class:`Op` of it. Other implementations take the same
operands and are tried before it. Each raises ``NotImplementedError`` with a sentence where it
cannot run: on this machine, with this version of jax, for this shape.

To add a kernel, write it in a file of its own next to the op (``..._mosaic.py``), and after the
op's definition a function that refuses what the kernel cannot do and then imports and calls it::

    @residual_norm.kernel("pallas")
    def _residual_norm_pallas(x, partials, scale, eps): ...

The import belongs inside the function: this version of jax may lack the kernel's backend, and a CPU
need not spend the time.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jaxtyping import PyTree

from longspec_jax.ops import hardware
from longspec_jax.ops.partitioned import one_device

Given = ParamSpec("Given")
R = TypeVar("R")
Implementation = Callable[..., Any]
DEFINITION = "xla"
"""The name of an op's definition among its implementations."""


class Op(Generic[Given, R]):
    """The implementations of an op; calling it runs the first automatic one that does not refuse.

    Attributes:
      name: of the op, for messages.
      automatic: the implementations that are tried, in this order, when none is named.
      by_name: those that run only when they are named.
    """

    def __init__(
        self,
        name: str,
        automatic: dict[str, Implementation],
        by_name: dict[str, Implementation] | None = None,
    ) -> None:
        self.name, self.automatic, self.by_name = name, automatic, by_name or {}
        self._run: Callable[..., Any] = self._first

    @property
    def implementations(self) -> dict[str, Implementation]:
        """All of them, by name."""
        return self.automatic | self.by_name

    @property
    def definition(self) -> Callable[Given, R]:
        """The op in plain JAX."""
        return self.automatic[DEFINITION]

    def kernel(self, name: str) -> Callable[[Implementation], Implementation]:
        """List the decorated function, to be tried before the definition."""

        def decorate(function: Implementation) -> Implementation:
            definition = self.automatic.pop(DEFINITION)
            self.automatic |= {name: function, DEFINITION: definition}
            return function

        return decorate

    def without_triton(self, function: Implementation) -> Implementation:
        """List the decorated function as ``mosaic``: first where Triton is not, or by name."""
        self.by_name["mosaic"] = function
        self.kernel("mosaic")(where_triton_is_not_first(function))
        return function

    def __call__(self, *operands: Given.args, **options: Given.kwargs) -> R:
        """Run the first automatic implementation that does not refuse.

        Raises:
          NotImplementedError: if all refuse; says why.
        """
        return self._run(*operands, **options)

    def named(self, implementation: str | None) -> Callable[Given, R]:
        """The implementation of this name, which may refuse; the op itself if none is given.

        Raises:
          ValueError: if there is no implementation of this name.
        """
        if implementation is None:
            return self
        if implementation not in self.implementations:
            raise ValueError(
                f"{self.name} has no implementation {implementation!r}; choose one of "
                f"{sorted(self.implementations)}"
            )
        return functools.partial(_run, self.implementations[implementation])

    def _first(self, *operands: Given.args, **options: Given.kwargs) -> R:
        refusals = []
        for name, candidate in self.automatic.items():
            try:
                return _run(candidate, *operands, **options)
            except NotImplementedError as refusal:
                refusals.append(f"{name}: {refusal}")
        raise NotImplementedError(
            f"no implementation of {self.name} takes this call. " + "; ".join(refusals)
        )


def op(definition: Callable[Given, R]) -> Op[Given, R]:
    """The op that this function defines."""
    name = definition.__name__.removesuffix(f"_{DEFINITION}")
    made: Op[Given, R] = Op(name, {DEFINITION: definition})
    functools.update_wrapper(made, definition)
    return made


def traced_once(*static: str) -> Callable[[Callable[Given, R]], Callable[Given, R]]:
    """Trace and lower a function once for all calls of one shape, as those of a program's layers.

    The text of the program holds it once, and XLA puts its operations in the place of every call:
    what runs is the same. Python makes the program of eight layers in half the time. On a mesh
    every call is traced by itself, so that the compiler shards each as it does without.

    Args:
      *static: names of the arguments that are not arrays.
    """

    def decorate(function: Callable[Given, R]) -> Callable[Given, R]:
        jitted: Callable[Given, R] = jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def call(*operands: Given.args, **options: Given.kwargs) -> R:
            return (jitted if one_device() else function)(*operands, **options)

        return call

    return decorate


def differentiable_op(static: int) -> Callable[[Callable[Given, R]], Op[Given, R]]:
    """The op that a function defines. Every implementation has the definition's gradient.

    Args:
      static: how many of the last arguments are not arrays.
    """

    def decorate(definition: Callable[Given, R]) -> Op[Given, R]:
        made = op(definition)
        count = len(inspect.signature(definition).parameters)
        fixed = tuple(range(count - static, count))
        first: Implementation = made._first
        define: Implementation = definition
        wrapped = functools.wraps(definition)(lambda *operands: first(*operands))
        run = jax.custom_jvp(wrapped, nondiff_argnums=fixed)

        @run.defjvp
        def _(*given: PyTree) -> PyTree:
            *others, primals, tangents = given
            return jax.jvp(lambda *operands: define(*operands, *others), primals, tangents)

        made._run = run
        return made

    return decorate


def where_triton_is_not_first(kernel: Callable[Given, R]) -> Callable[Given, R]:
    """A kernel for Mosaic that is refused where Triton's is to be taken, which is listed next."""

    @functools.wraps(kernel)
    def call(*operands: Given.args, **options: Given.kwargs) -> R:
        if hardware.triton_comes_first():
            raise NotImplementedError("Triton's kernel is taken where this jax has it")
        return kernel(*operands, **options)

    return call


def _run(implementation: Callable[Given, R], *operands: Given.args, **options: Given.kwargs) -> R:
    """Run an implementation; a backend that cannot be imported is a refusal."""
    try:
        return implementation(*operands, **options)
    except ImportError as error:
        raise NotImplementedError(f"its backend cannot be imported: {error}") from error
