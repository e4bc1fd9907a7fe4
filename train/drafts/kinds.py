"""The kinds of draft that can be trained, by their names in ``--config.draft.kind``.

A kind is a file here, its settings and an entry in :data:`KINDS`; :mod:`.base` says what it brings.
Each of its parameters needs one rule of :data:`longspec_jax.sharding.RULES`. This file imports no
jax.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from longspec_jax.checks import Whole

from ..config import AtLeastOne, DraftSettings, LayerNumbers, Positive, Share, ZeroOrMore

if TYPE_CHECKING:
    from .base import InitialDraft, TrainContext

MOST_STEPS = 32


@dataclass(frozen=True)
class LongSpecSettings(DraftSettings):
    """The draft and its random transforms."""

    window: AtLeastOne = 512
    """Past tokens its self-attention sees."""
    anchor_offset: bool = True
    """Use anchor-offset positions in the stages that set a ``max_offset``."""
    max_sinks: ZeroOrMore = 4
    """Most positions that stay in place."""
    max_shift: AtLeastOne = 4
    """Most tokens the draft runs ahead of the target's keys."""
    distillation: Share = 0.0
    """Share of the divergence from the target's own distribution in the loss, 0 to 1. The rest is
    the cross-entropy of the text, which is all the paper learns."""


@dataclass(frozen=True)
class Eagle3Settings(DraftSettings):
    """The draft and its training-time test (arXiv 2503.01840)."""

    layers: LayerNumbers = ""
    """Layers of the target after which a fresh draft takes the hidden states, counted from 0; an
    early, a middle and a late one if empty, as published."""
    vocabulary: ZeroOrMore = 32_000
    """Tokens that a fresh draft can propose: those that are to be predicted most often in the data;
    0 for all of the target's."""
    steps: Annotated[int, Whole(1, MOST_STEPS, ": each is another pass of the draft")] = 7
    """Passes of a training step, each on the output of the one before, as when drafting."""
    decay: Share = 0.8
    """Weight of a pass in the loss, relative to that of the one before it."""
    own_head: bool = True
    """Whether a fresh draft has an LM head of its own. Otherwise it reads the target's, which stays
    as it is and is not stored with the draft."""
    mlp_width: ZeroOrMore = 0
    """Width of a fresh draft's MLP; the target's if 0."""

    def __post_init__(self) -> None:
        if self.vocabulary and not self.own_head:
            raise ValueError(
                "--config.draft.own_head=False shares the target's LM head, which knows all of its "
                f"tokens, not vocabulary={self.vocabulary} of them; set --config.draft.vocabulary=0"
            )


@dataclass(frozen=True)
class DFlashSettings(DraftSettings):
    """The draft and its blocks (arXiv 2602.06036).

    The first four, and ``causal``, are a fresh draft's.
    """

    layers: Annotated[int, Whole(1, 32)] = 5
    """Layers of the draft."""
    features: LayerNumbers = ""
    """Layers of the target after which it takes the hidden states, counted from 0; as
    many as it has layers, evenly spread, if empty."""
    block: Annotated[int, Whole(2, 64)] = 16
    """Slots of a block, the pending token's included; one token less is proposed."""
    mask_token: Annotated[int, Whole(-1)] = -1
    """The target's token that stands in the slots to be filled; -1 for the last of its vocabulary,
    which is mostly padding."""
    anchor_every: AtLeastOne = 8
    """Tokens of a row for each block. The block begins at a random one of them."""
    decay: Positive = 7.0
    """Slot ``j`` weighs ``exp(-(j - 1) / decay)``: the first ones decide how much is accepted. A
    large one weighs all alike."""
    causal: bool = False
    """Whether a slot sees none of the later ones (JetSpec, arXiv 2606.18394)."""
    distillation: Share = 0.0
    """Share of the divergence from the target's own distribution in the loss, 0 to 1. The rest is
    the cross-entropy of the text, which is all that DFlash learns; JetSpec's share is 1."""


@dataclass(frozen=True)
class ParallelSettings(DraftSettings):
    """The draft and its blocks."""

    window: AtLeastOne = 512
    """Tokens before a block that the first layer sees."""
    layers: Annotated[int, Whole(1, 3)] = 3
    block: Annotated[int, Whole(2, 16)] = 6
    """Slots of a block, the pending token's included; as many tokens are proposed."""
    markov_rank: ZeroOrMore = 64
    """Rank of the correction by the token before a slot; 0 for none."""
    anchor_every: AtLeastOne = 8
    """Tokens of a row for each block. The block begins at a random one of them."""
    decay: Positive = 4.0
    """Slot ``j`` weighs ``exp(-j / decay)``: the first ones decide how much is accepted."""
    anchor_offset: bool = True
    """Use anchor-offset positions in the stages that set a ``max_offset``."""
    max_sinks: ZeroOrMore = 4
    """Most positions that stay in place."""
    distillation: Share = 0.9
    """Share of the distance to the target's own distribution in the loss, 0 to 1. The rest is the
    cross-entropy of the text."""


@dataclass(frozen=True)
class SmallLMSettings(DraftSettings):
    """The model: Llama's layers over the target's vocabulary. Sizes are a fresh one's."""

    layers: Annotated[int, Whole(1, 64)] = 4
    width: AtLeastOne = 1024
    """Of its hidden states; ``heads`` of equal and even width divide it."""
    mlp_width: AtLeastOne = 2816
    heads: AtLeastOne = 16
    kv_heads: AtLeastOne = 4
    """Heads of keys and values, a divisor of ``heads``."""
    distillation: Share = 0.9
    """Share of the divergence from the target's own distribution in the loss, 0 to 1. The rest is
    the cross-entropy of the text. At 0 the target never runs, but where rows are measured."""


@dataclass(frozen=True)
class Kind:
    """A kind of draft."""

    settings: type[DraftSettings]
    """The section ``draft`` of its configurations."""
    module: str
    """Its module here that has ``begin``, which only training itself imports, and jax with it."""

    def begin(self, settings: DraftSettings, given: "TrainContext") -> "InitialDraft":
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
    "longspec": Kind(LongSpecSettings, "longspec"),
    "eagle3": Kind(Eagle3Settings, "eagle3"),
    "dflash": Kind(DFlashSettings, "dflash"),
    "parallel": Kind(ParallelSettings, "parallel"),
    "small_lm": Kind(SmallLMSettings, "small_lm"),
}
