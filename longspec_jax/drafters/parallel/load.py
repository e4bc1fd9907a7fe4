"""A parallel LongSpec draft: its options, the draft bound to its target, and how it is loaded."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.draft import DefaultTrees, Draft, Target, pays_in_int8
from longspec_jax.drafters.parallel.checkpoint import load_draft
from longspec_jax.drafters.parallel.config import ParallelConfig
from longspec_jax.drafters.parallel.drafter import ParallelDrafter
from longspec_jax.drafters.parallel.model import ParallelParams


@dataclass(frozen=True)
class ParallelOptions:
    """Options of a parallel LongSpec draft; none changes a token."""

    int8: bool | None = None
    """Read its weights and a copy of the target's LM head in 8 bits: half the bytes.

    If absent, on a GPU with a large target in 16 bits, where it pays."""


@dataclass(frozen=True, eq=False)
class ParallelDraft(Draft):
    """Layers over a block, and the tables they share with their target."""

    config: ParallelConfig
    params: ParallelParams = field(repr=False)
    name: str = field(default="parallel", init=False)

    @classmethod
    def bind(
        cls,
        config: ParallelConfig,
        params: Any,
        target_params: Any,
        *,
        int8: bool = False,
        mesh: Mesh | None = None,
    ) -> "ParallelDraft":
        """A draft for a loaded target.

        Args:
          config: the draft's configuration.
          params: of :func:`~longspec_jax.drafters.parallel.checkpoint.load_draft`.
          target_params: the target's parameters, whose embedding and LM head the draft reads.
          int8: read its weights and a copy of the head in 8 bits.
          mesh: what the parameters are spread over; one device if absent.
        """
        bound = ParallelParams.beside(target_params, params)
        if int8:
            bound = bound.in_int8(mesh)
        return cls(config, bound)

    @property
    def default_trees(self) -> DefaultTrees:
        """As deep as the block, since levels are nearly free; narrow where nodes cost time."""

        def tree(width: int, depth: int, budget: int | None = None) -> TreeConfig:
            return TreeConfig((width,) * min(depth, self.config.block), budget)

        whole, half, chain = tree(16, 8, 64), tree(8, 8, 32), tree(1, 8)
        return DefaultTrees(
            (tree(1, 3), tree(1, 2), tree(2, 2)),
            (tree(4, 4, 16), whole),
            (whole, half, chain),
            settled=False,
            together=(whole, half, tree(4, 6, 16)),
        )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> ParallelDrafter:
        """The drafter that grows this tree; raises ValueError if it is deeper than a block."""
        return ParallelDrafter(self.config, tree, attention)


def load(
    source: str | Path,
    target: Target,
    options: ParallelOptions,
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> ParallelDraft:
    """Load a parallel LongSpec draft from a folder or a hub id.

    Raises:
      FileNotFoundError: if the draft or one of its files is missing.
      ValueError: if it does not belong to the target, or a file is damaged.
    """
    config, params = load_draft(
        source, target.config, dtype=target.config.dtype, mesh=mesh, revision=revision
    )
    int8 = pays_in_int8(target) if options.int8 is None else options.int8
    return ParallelDraft.bind(config, params, target.params, int8=int8, mesh=mesh)
