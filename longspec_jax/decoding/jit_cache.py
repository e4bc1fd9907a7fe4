"""Compiled programs: kept while they are used, and compiled side by side before they are called.

``jax.jit`` keeps every executable for as long as its function lives: for the life of the process.
On a CPU an executable takes some 350 memory mappings, of which Linux allows a process 65,530, and
tens of megabytes; a server that meets many batch sizes, capacities and trees would come to its end
inside the compiler. A :class:`Program` gives every shape a jitted function of its own, and all
programs of the process share one bounded list of these. What drops off the list takes its
executable along, and is compiled again if its shape comes back. The programs of others, which
``jax.clear_caches()`` would drop too, stay.

Tracing and lowering are Python, which one thread at a time can run; XLA compiles in parallel. So
one thread lowers program after program, the slowest to compile first, and each is compiled
meanwhile (:func:`compile_side_by_side`). jax keeps what it compiled by the function and its
arguments' types, where the first call finds it. No program runs and no cache is allocated.
"""

import functools
import inspect
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Generic, TypeAlias, TypeVar

import jax

from longspec_jax.ops.placement import tree_bytes

R = TypeVar("R")
Operand: TypeAlias = Any
"""What a program is called with: as its function declares; and for an array of the device also one
of the host, a number of NumPy, or its shape."""
MOST_PROGRAMS = 64
"""Executables kept; a call uses five, one of them for every tree it may choose."""
SMALL = 1_000_000_000
"""Bytes of a program's parameters up to which a GPU spends its time on launches, not on products.
The size of a cache does not count: it must not decide how a product is computed."""

_NOTE: ContextVar[set[Hashable] | None] = ContextVar("note", default=None)


class LRU:
    """A bounded mapping from which the least recently used entry drops out."""

    def __init__(self, most: int, whole: Callable[[Any], bool] = lambda _: True) -> None:
        """Start empty.

        Args:
          whole: whether an entry still has what it was made for.
        """
        self._most, self._whole = most, whole
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self._pins: Counter[Hashable] = Counter()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The entry, made if it is absent; now the most recently used."""
        with self._lock:
            if key not in self._entries:
                self._entries[key] = make()
            self._entries.move_to_end(key)
            if (note := _NOTE.get()) is not None:
                note.add(key)
            entry = self._entries[key]
            if len(self._entries) > self._most:
                self._trim()
        return entry

    def values(self) -> list[Any]:
        """All entries, the least recently used first."""
        with self._lock:
            return list(self._entries.values())

    @contextmanager
    def noted(self) -> Iterator[set[Hashable]]:
        """The keys of all entries this thread uses while the context is open."""
        note: set[Hashable] = set()
        token = _NOTE.set(note)
        try:
            yield note
        finally:
            _NOTE.reset(token)

    def keeps(self, keys: Set[Hashable]) -> bool:
        """Whether all of these entries are there and whole."""
        with self._lock:
            return all(self._keeps(key) for key in keys)

    def renew(self, keys: Set[Hashable]) -> bool:
        """As :meth:`keeps`; those that are there are now the most recently used."""
        with self._lock:
            lost = False
            for key in keys:
                if self._keeps(key):
                    self._entries.move_to_end(key)
                else:
                    lost = True
        return not lost

    def pin(self, keys: Set[Hashable]) -> None:
        """Keep these entries besides the bounded number of others, until as many unpins."""
        with self._lock:
            self._pins.update(keys)

    def unpin(self, keys: Set[Hashable]) -> None:
        """Keep these entries no longer than others."""
        with self._lock:
            self._pins.subtract(keys)
            self._pins = +self._pins
            self._trim()

    @contextmanager
    def limited(self, most: int) -> Iterator[None]:
        """Keep at most this many entries while the context is open."""
        with self._lock:
            before, self._most = self._most, most
            self._trim()
        try:
            yield
        finally:
            self._most = before

    def _keeps(self, key: Hashable) -> bool:
        return key in self._entries and self._whole(self._entries[key])

    def _trim(self) -> None:
        loose = [key for key in self._entries if key not in self._pins]
        for key in loose[: max(0, len(loose) - self._most)]:
            del self._entries[key]


def _compiled(entry: tuple[Any, Any]) -> bool:
    # ``jax.clear_caches()`` takes the executable and leaves the function.
    _, jitted = entry
    return jitted._cache_size() > 0


PROGRAMS = LRU(MOST_PROGRAMS, whole=_compiled)
"""The programs of this process: pairs of their owner and the jitted function of one shape."""


class Program(Generic[R]):
    """A jitted function whose shapes are kept or let go one by one; made by :func:`program`.

    Its arguments have no names. One that is not an array is part of the shape: pass numbers that
    vary as NumPy scalars.
    """

    def __init__(
        self, function: Callable[..., R], static: Sequence[str], donated: Sequence[str]
    ) -> None:
        """Compile nothing yet."""
        functools.update_wrapper(self, function)
        self._function, self._static, self._donated = function, static, donated

    def __call__(self, *args: Operand) -> R:
        """Run the shape's own jitted function."""
        return self.of_shape(*args)(*args)

    def lower(self, *args: Operand) -> jax.stages.Lowered:
        """What a jitted function's does."""
        return self.of_shape(*args).lower(*args)

    def trace(self, *args: Operand) -> jax.stages.Traced:
        """What a jitted function's does."""
        return self.of_shape(*args).trace(*args)

    def of_shape(self, *args: Operand) -> Any:
        """The jitted function for arguments of these shapes, to be called often."""
        # A leaf without a shape is a static argument. What else matters to a compilation, such as
        # types and devices, is left to jax: it varies little, and follows from the rest.
        leaves, structure = jax.tree.flatten(args)
        key = self, structure, *[getattr(leaf, "shape", leaf) for leaf in leaves]
        return PROGRAMS.get(key, functools.partial(self._jitted, args))[1]

    def _cache_size(self) -> int:
        """How many executables there are, of all shapes, as a jitted function counts them."""
        own = (jitted for owner, jitted in PROGRAMS.values() if owner is self)
        return sum(jitted._cache_size() for jitted in own)

    def _jitted(self, args: tuple[Operand, ...]) -> tuple["Program[R]", Any]:
        # jax keeps what it compiles by the function it is given: a new one, which nobody else
        # holds.
        @functools.wraps(self._function)
        def alone(*args: Operand) -> R:
            return self._function(*args)

        named = inspect.signature(self._function).bind(*args).arguments
        options = compiler_options(small=tree_bytes(named.get("params")) <= SMALL)
        jitted = jax.jit(
            alone,
            static_argnames=self._static,
            donate_argnames=self._donated,
            compiler_options=options,
        )
        return self, jitted


def compiler_options(small: bool) -> dict[str, Any]:
    """Options of XLA for a program.

    On a GPU it times the ways of computing every product. That takes half of the time to the first
    token of a small model, whose matmuls are not faster with it.
    """
    if not small or jax.default_backend() != "gpu":
        return {}
    return {"xla_gpu_autotune_level": 0}


def program(
    static_argnames: Sequence[str] = (), donate_argnames: Sequence[str] = ()
) -> Callable[[Callable[..., R]], Program[R]]:
    """``jax.jit`` whose executables are among the bounded number that this process keeps."""
    return lambda function: Program(function, static_argnames, donate_argnames)


def compile_side_by_side(programs: Iterable[jax.stages.Lowered]) -> None:
    """Compile programs, each as soon as it is there.

    Args:
      programs: lowers each one when it is next, in the caller's thread.

    Raises:
      Exception: what failed, of several the first in the order of the programs. None is lowered any
        more then, and none begun. What is being compiled is not waited for, but by the end of the
        process.
    """
    pool = ThreadPoolExecutor(processors(), thread_name_prefix="compile")
    compiled: list[Future] = []
    try:
        for program in programs:
            compiled.append(pool.submit(program.compile))
            if any(one.done() and one.exception() for one in compiled):
                break
        for one in compiled:
            one.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
