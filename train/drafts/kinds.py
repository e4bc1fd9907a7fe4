"""The kinds of draft that can be trained, by their names in ``--config.draft.kind``.

A new kind is a folder here and an entry in :data:`KINDS`; :mod:`.base` says what it brings. Each of
its parameters needs one rule of :data:`longspec_jax.sharding.RULES`, and
:data:`longspec_jax.recipes.DRAFTS` has its usual settings.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import DraftSettings
from .dflash.settings import DFlashSettings
from .eagle3.settings import Eagle3Settings
from .longspec.settings import LongSpecSettings
from .parallel.settings import ParallelSettings
from .small_lm.settings import SmallLMSettings

if TYPE_CHECKING:
    from .base import Begun, Given


@dataclass(frozen=True)
class Kind:
    """A kind of draft."""

    settings: type[DraftSettings]
    """The section ``draft`` of its configurations."""
    module: str
    """Its module here that has ``begin``, which only training itself imports, and jax with it."""

    def begin(self, settings: DraftSettings, given: "Given") -> "Begun":
        """A draft before its first step.

        Args:
          settings: of its kind.
          given: what it is begun with.

        Raises:
          ValueError, OSError: if the draft to start from cannot be loaded or fits another target,
            or the settings do not fit the target.
        """
        return importlib.import_module(f".{self.module}", __package__).begin(settings, given)


KINDS: dict[str, Kind] = {
    "longspec": Kind(LongSpecSettings, "longspec.objective"),
    "eagle3": Kind(Eagle3Settings, "eagle3.objective"),
    "dflash": Kind(DFlashSettings, "dflash.objective"),
    "parallel": Kind(ParallelSettings, "parallel.objective"),
    "small_lm": Kind(SmallLMSettings, "small_lm.objective"),
}
