"""A DFlash or DSpark draft: its options, the draft bound to its target, and how it is loaded."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

from jax.sharding import Mesh

from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.dflash.checkpoint import Format, load_draft
from longspec_jax.drafters.dflash.config import DFlashConfig
from longspec_jax.drafters.dflash.drafter import DFlashDrafter
from longspec_jax.drafters.dflash.model import DFlashParams
from longspec_jax.drafters.draft import DefaultTrees, Draft, Target, pays_in_int8
from longspec_jax.drafters.tables import SINKS, FeatureOptions
from longspec_jax.drafters.window import Seen

DEEPEST = 16
"""Levels of the deepest default tree; longer blocks are hardly ever accepted whole."""


@dataclass(frozen=True)
class DFlashOptions(FeatureOptions):
    """Options of a DFlash or DSpark draft; none changes a token."""


def seen(config: DFlashConfig, target: TargetConfig, options: DFlashOptions) -> Seen:
    """Which tokens its layers see that have no window of their own."""
    sinks, window = SINKS if options.sinks is None else options.sinks, options.window
    made_for = config.trunk.max_positions
    if window is None and made_for < target.max_positions:
        # Sinks, ring and block together span the range of its positions.
        window = max(1, made_for - sinks - config.block)
    if window is None or window >= target.max_positions:
        return Seen(None, 0)
    return Seen(window, sinks)


@dataclass(frozen=True, eq=False)
class DFlashDraft(Draft):
    """Layers over a block, the tables they share with their target, and what they see of a text."""

    config: DFlashConfig
    params: DFlashParams = field(repr=False)
    seen: Seen = Seen(None, 0)
    stored: Format | None = None
    """How it was stored, for :func:`longspec_jax.drafters.dflash.checkpoint.save_draft`."""
    name: str = field(default="dflash", init=False)

    @property
    def default_trees(self) -> DefaultTrees:
        """As deep as the block, since levels are nearly free; narrow where nodes cost time."""
        levels = min(self.config.tokens, DEEPEST)

        def tree(width: int, depth: int, budget: int | None = None) -> TreeConfig:
            return TreeConfig((width,) * min(depth, levels), budget)

        whole, half, chain = tree(8, levels, 64), tree(4, levels, 32), tree(1, levels)
        return DefaultTrees(
            (tree(1, 4), tree(1, 2), tree(2, 2)),
            (chain, half, whole),
            (whole, half, chain),
            settled=False,
            together=(whole, half, tree(4, 6, 12)),
        )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> DFlashDrafter:
        """The drafter that grows this tree; raises ValueError if it is deeper than a block."""
        return DFlashDrafter(self.config, tree, attention, *self.seen)


def load(
    source: str | Path,
    target: Target,
    options: DFlashOptions = DFlashOptions(),
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> DFlashDraft:
    """Load a DFlash or DSpark draft as its trainer stored it.

    Args:
      source: a folder or hub id.
      target: what it was trained for.
      options: its options.
      mesh: devices to spread it over; the first device if absent.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileNotFoundError: if the draft or one of its files is missing.
      ValueError: if it does not belong to the target, or a file is damaged.
    """
    stored, config, params = load_draft(
        *(source, target.config, target.params),
        layers=options.features,
        mesh=mesh,
        revision=revision,
    )
    if options.yarn is not None:
        config = config.stretched(options.yarn)
    if pays_in_int8(target) if options.int8 is None else options.int8:
        params = params.in_int8(mesh)
    reach = seen(config, target.config, options)
    if reach.window is not None and options.window is None and None in config.windows:
        warnings.warn(
            f"{source}: the draft was made for {config.trunk.max_positions} positions and the "
            f"target for {target.config.max_positions}, so it sees the first {reach.sinks} and the "
            f"last {reach.window} tokens of a text; the draft option window=N changes that",
            stacklevel=2,
        )
    return DFlashDraft(config, params, reach, stored)
