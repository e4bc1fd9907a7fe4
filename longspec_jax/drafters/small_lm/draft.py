"""A small language model in memory, ready to draft."""

from dataclasses import dataclass, field
from typing import Any

from longspec_jax.config import TargetConfig, TreeConfig
from longspec_jax.drafters.small_lm.drafter import SmallLMDrafter


@dataclass(frozen=True, eq=False)
class SmallLM:
    """A small model and its parameters."""

    config: TargetConfig
    params: Any = field(repr=False)
    """Of its :class:`longspec_jax.models.target.Target`."""
    narrower: bool = False
    """Whether the target has tokens that the small model has not."""

    @property
    def own(self) -> Any:
        """What is not shared with the target: everything."""
        return self.params

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> SmallLMDrafter:
        """What proposes trees of this shape with it."""
        return SmallLMDrafter(self.config, tree, attention, self.narrower)
