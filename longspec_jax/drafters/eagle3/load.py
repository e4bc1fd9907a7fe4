"""An EAGLE-3 draft: its options, the draft bound to its target, and how it is loaded."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

from jax.sharding import Mesh

from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import MAX_TREE_LEVELS, TreeConfig
from longspec_jax.drafters.draft import DefaultTrees, Draft, Target, pays_in_int8
from longspec_jax.drafters.eagle3.checkpoint import Format, load_draft
from longspec_jax.drafters.eagle3.config import Eagle3Config
from longspec_jax.drafters.eagle3.drafter import Eagle3Drafter
from longspec_jax.drafters.eagle3.model import Eagle3Params
from longspec_jax.drafters.retrieval.working_cache import WorkingCache, WorkingCacheOptions
from longspec_jax.drafters.tables import SINKS, FeatureOptions
from longspec_jax.drafters.window import Seen


@dataclass(frozen=True)
class Eagle3Options(FeatureOptions):
    """Options of an EAGLE-3 draft; none changes a token."""

    rope_theta: float | None = None
    """Its rotary base; as its file says if absent."""
    working: int | None = None
    """Tokens that it reads of all of a text, sinks and recent ones included, in place of a window:
    those that the target attends to. A multiple of 32."""
    refresh: int | None = None
    """Rounds from one choice of them to the next; 4 if absent. 0 reads sinks and recent ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.working is not None and self.window is not None:
            raise ValueError(
                f"working={self.working} and window={self.window} exclude each other: either a "
                "part of all tokens is read, or the last ones alone are kept; leave one out"
            )
        if self.working is not None or self.refresh is not None:
            _ = self.cache_options  # Raises for what they cannot be.
        if self.rope_theta is not None and self.rope_theta < 1:
            raise ValueError(f"rope_theta={self.rope_theta:g} must be at least 1")

    @property
    def cache_options(self) -> WorkingCacheOptions:
        """Those about a working cache."""
        if self.working is None:
            return WorkingCacheOptions(refresh=self.refresh)
        return WorkingCacheOptions(working=self.working, sinks=self.sinks, refresh=self.refresh)


def seen(config: Eagle3Config, target: TargetConfig, options: Eagle3Options) -> Seen:
    """Which tokens a draft sees, by its options and else by the range that it was trained for."""
    if options.working is not None:
        return Seen(None, 0)
    trained, sinks = config.window, options.sinks
    if sinks is None:
        sinks = 0 if trained is not None and options.window is None else SINKS
    window = options.window
    if window is None and trained is not None:
        window = trained - 1  # Its own window counts the token itself.
    if window is None and config.max_positions < target.max_positions:
        # Sinks, ring and the tree together span the range of its positions.
        window = max(1, config.max_positions - sinks - MAX_TREE_LEVELS)
    if window is None or window >= target.max_positions:
        return Seen(None, 0)
    return Seen(window, sinks)


@dataclass(frozen=True, eq=False)
class Eagle3Draft(Draft):
    """A draft layer, the tables it shares with its target, and what it sees of a text."""

    config: Eagle3Config
    params: Eagle3Params = field(repr=False)
    seen: Seen = Seen(None, 0)
    stored: Format | None = None
    """How it was stored, for :func:`longspec_jax.drafters.eagle3.checkpoint.save_draft`."""
    working: WorkingCache | None = None
    """What it reads of all entries; all of them if absent."""
    name: str = "eagle3"
    """Or ``eagle`` or ``mtp``, which bring another layer."""

    @property
    def default_trees(self) -> DefaultTrees:
        """Chains and small trees where nodes cost time; else about the authors' 60 nodes."""
        small = TreeConfig((1, 1, 1)), TreeConfig((1, 1)), TreeConfig((2, 2))
        tree, chain = TreeConfig((10,) * 6), TreeConfig((1,) * 4)
        narrow = TreeConfig((4, 4, 4))
        fewer = TreeConfig((8,) * 5, 32), TreeConfig((4,) * 4, 12)
        return DefaultTrees(
            small, (narrow, tree, chain), (tree, narrow), settled=False, together=(tree, *fewer)
        )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> Eagle3Drafter:
        """The drafter that grows this tree."""
        return Eagle3Drafter(self.config, tree, attention, *self.seen, self.working, name=self.name)


def load(
    source: str | Path,
    target: Target,
    options: Eagle3Options = Eagle3Options(),
    *,
    mesh: Mesh | None = None,
    revision: str | None = None,
) -> Eagle3Draft:
    """Load an EAGLE-3 draft as its trainer stored it, from a folder or a hub id.

    Raises:
      FileNotFoundError: if the draft or one of its files is missing.
      ValueError: if it does not belong to the target, or a file is damaged or can be read in two
        ways.
    """
    stored, config, params = load_draft(
        source,
        target.config,
        target.params,
        layers=options.features,
        theta=options.rope_theta,
        mesh=mesh,
        revision=revision,
    )
    return bound("eagle3", source, target, options, mesh, config, params, stored)


def bound(
    name: str,
    source: str | Path,
    target: Target,
    options: Eagle3Options,
    mesh: Mesh | None,
    config: Eagle3Config,
    params: Eagle3Params,
    stored: Format | None = None,
) -> Eagle3Draft:
    """A draft with its options applied; says which tokens it sees where nobody named them.

    Args:
      name: of its kind.
      source: its folder or hub id, for the message.
      target: what it drafts for.
      options: its options.
      mesh: devices that it is spread over.
      config: its configuration.
      params: its parameters, not in 8 bits.
      stored: how it was stored.
    """
    if options.yarn is not None:
        config = config.stretched(options.yarn)
    if pays_in_int8(target) if options.int8 is None else options.int8:
        params = params.in_int8(mesh)
    reach = seen(config, target.config, options)
    if reach.window is not None and options.window is None and config.window is None:
        warnings.warn(
            f"{source}: the draft was made for {config.max_positions} positions and the target for "
            f"{target.config.max_positions}, so it sees the first {reach.sinks} and the last "
            f"{reach.window} tokens of a text; the draft option window=N changes that",
            stacklevel=3,
        )
    working = options.cache_options.working_cache(target.config)
    return Eagle3Draft(config, params, reach, stored, working, name)
