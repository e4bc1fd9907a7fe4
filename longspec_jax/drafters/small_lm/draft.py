"""A small language model in memory, ready to draft."""

from dataclasses import dataclass, field
from typing import Any

from longspec_jax.config import TargetConfig, TreeConfig
from longspec_jax.drafters.draft import DefaultTrees
from longspec_jax.drafters.small_lm.drafter import SmallLMDrafter
from longspec_jax.drafters.working_cache import WorkingCache


@dataclass(frozen=True, eq=False)
class SmallLM:
    """A small model and its parameters."""

    config: TargetConfig
    params: Any = field(repr=False)
    """Of its :class:`longspec_jax.models.target.Target`."""
    narrower: bool = False
    """Whether the target has tokens that the small model has not."""
    working: WorkingCache | None = None
    """What a proposal reads of its cache; all of it if absent."""
    name: str = field(default="small_lm", init=False)

    @property
    def default_trees(self) -> DefaultTrees:
        """Chains and narrow trees: a level costs a pass of all its layers."""
        chain, pair, tree = TreeConfig((1, 1, 1)), TreeConfig((1, 1)), TreeConfig((4, 4, 4))
        return DefaultTrees((chain, pair), (tree, chain), (TreeConfig((4, 8, 8, 8)), chain))

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError if it has more tokens than the target."""
        if self.config.vocab_size > target.vocab_size:
            raise ValueError(
                f"the small model has vocab_size={self.config.vocab_size}, the target "
                f"{target.vocab_size}; load a small model of the target's own family"
            )

    @property
    def own(self) -> Any:
        """What is not shared with the target: everything."""
        return self.params

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> SmallLMDrafter:
        """What proposes trees of this shape with it."""
        return SmallLMDrafter(self.config, tree, attention, self.narrower, self.working)
