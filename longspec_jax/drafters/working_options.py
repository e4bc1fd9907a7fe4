"""What can be chosen about a working cache, the same for every draft that may have one."""

from dataclasses import dataclass

from longspec_jax.config import TargetConfig
from longspec_jax.drafters.working_cache import WorkingCache
from longspec_jax.ops.selection.blocks import BlockBudget

CHUNK, REFRESH = 32, 4
"""SpecExtend's for a draft of 68 M parameters (appendix E.1 there)."""
SMALLEST_CHUNK, LARGEST_CHUNK = 8, 256
"""Kernels take multiples of the one, caches are of multiples of the other."""


@dataclass(frozen=True, kw_only=True)
class WorkingCacheOptions:
    """How much of a cache a draft reads, and by what it is chosen.

    ``working=1024`` is SpecExtend's setting, with ``refresh=0`` it is the cache of StreamingLLM.
    """

    working: int | None = None
    """Tokens of the cache that are read, sinks and recent ones among them; all if absent. In whole
    chunks, like the next two."""
    sinks: int | None = None
    """First tokens that are always read; a chunk if absent."""
    recent: int | None = None
    """Last tokens that are always read; an eighth of the working ones if absent."""
    chunk: int | None = None
    """Neighbouring tokens that are chosen together, a power of two from 8 on; 32 if
    absent."""
    refresh: int | None = None
    """Rounds from one choice by the target's attention to the next; 4 if absent. With 0 nothing is
    chosen: what is neither a sink nor recent is not read."""

    def __post_init__(self) -> None:
        if self.working is None:
            for name in ("sinks", "recent", "chunk", "refresh"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"{name}={value} is about a working cache, and without one the whole cache "
                        "is read; say working=1024 as well, or leave it out"
                    )
        else:
            self._budget()

    def working_cache(self, target: TargetConfig) -> WorkingCache | None:
        """The working cache that is asked for; None for the whole cache.

        Args:
          target: whose attention chooses.
        """
        if self.working is None:
            return None
        return WorkingCache(self._budget(), self._refresh, target)

    @property
    def _refresh(self) -> int:
        return REFRESH if self.refresh is None else self.refresh

    def _budget(self) -> BlockBudget:
        """Which blocks are read.

        Raises:
          ValueError: if there cannot be such a working cache.
        """
        assert self.working is not None
        chunk = CHUNK if self.chunk is None else self.chunk
        if not SMALLEST_CHUNK <= chunk <= LARGEST_CHUNK or chunk & (chunk - 1):
            raise ValueError(
                f"chunk={chunk} must be a power of two from {SMALLEST_CHUNK} to {LARGEST_CHUNK}: "
                f"kernels take multiples of {SMALLEST_CHUNK} tokens, caches are of multiples of "
                f"{LARGEST_CHUNK}"
            )
        sinks = chunk if self.sinks is None else self.sinks
        recent = max(chunk, self.working // 8 // chunk * chunk)
        if not self._refresh:
            if self.recent is not None:
                raise ValueError(
                    f"recent={self.recent}: with refresh=0 all but the sinks are recent; leave it "
                    "out"
                )
            recent = self.working - sinks
        elif self.recent is not None:
            recent = self.recent
        for name, value in (("working", self.working), ("sinks", sinks), ("recent", recent)):
            if value % chunk:
                raise ValueError(
                    f"{name}={value} must be a multiple of chunk={chunk}, such as "
                    f"{value - value % chunk or chunk}"
                )
        if recent < chunk or self.working < sinks + recent + bool(self._refresh) * chunk:
            raise ValueError(
                f"working={self.working} tokens must hold sinks={sinks}, at least a chunk of "
                f"{chunk} recent ones (recent={recent}) and, unless refresh=0, another one that is "
                "chosen; allow more, or a smaller chunk"
            )
        return BlockBudget(self.working, sinks, recent, chunk)
