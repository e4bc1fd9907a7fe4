"""Shape of a DFlash or DSpark draft."""

import dataclasses
from dataclasses import dataclass

from longspec_jax.checks import whole_number
from longspec_jax.config.layers import YarnRopeScaling
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.tables import check_fits


@dataclass(frozen=True)
class Markov:
    """A head that corrects a slot's logits by the token before it (DSpark)."""

    rank: int
    gated: bool = False
    """Whether a gate of the slot's hidden state precedes the correction."""
    recurrent: bool = False
    """Whether a state runs along the tokens of the block."""

    def __post_init__(self) -> None:
        whole_number("markov_rank", self.rank)
        if self.gated and self.recurrent:
            raise ValueError("a Markov head is either gated or recurrent")

    def joint_shape(self, model_width: int) -> tuple[int, int]:
        """Inputs and outputs of the projection of a gated or a recurrent head."""
        if self.recurrent:
            return 2 * self.rank + model_width, 3 * self.rank
        return model_width + self.rank, self.rank


@dataclass(frozen=True)
class Confidence:
    """A head that predicts how likely a slot's token is accepted (DSpark)."""

    with_markov: bool
    """Whether it reads the Markov head's embedding of the token before as well."""


@dataclass(frozen=True)
class DFlashConfig:
    """Layers over a block: the pending token and mask tokens behind it."""

    trunk: TargetConfig
    """Its layers, which are those of Qwen3."""
    target_width: int
    """Width of the target's hidden states."""
    proposable: int
    """Tokens that the draft's LM head knows."""
    features: tuple[int, ...]
    """Layers of the target after which the draft takes the hidden states; -1 is the embedding."""
    block: int
    """Slots of a block, the pending token's included."""
    mask_token: int
    """What stands in the other slots."""
    from_pending: bool = False
    """Whether the pending token's slot proposes too: every slot proposes the token behind its own.
    Else every other slot proposes its own token."""
    windows: tuple[int | None, ...] = ()
    """Committed tokens that each layer sees, the last ones; all where None. One for each layer."""
    causal: tuple[bool, ...] = ()
    """Whether a slot sees none of the later ones, for each layer."""
    markov: Markov | None = None
    confidence: Confidence | None = None

    def __post_init__(self) -> None:
        layers = self.trunk.num_layers
        object.__setattr__(self, "windows", self.windows or (None,) * layers)
        object.__setattr__(self, "causal", self.causal or (False,) * layers)
        if (len(self.windows), len(self.causal)) != (layers, layers):
            raise ValueError(
                f"windows={self.windows} and causal={self.causal} must name each of the {layers} "
                "layers"
            )
        for name in ("target_width", "proposable"):
            whole_number(name, getattr(self, name))
        whole_number("block_size", self.block, 1 if self.from_pending else 2)
        whole_number("mask_token_id", self.mask_token, 0, self.vocab_size - 1)
        for window in filter(None, self.windows):
            whole_number("sliding_window", window)
        if self.proposable > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.proposable} is above vocab_size={self.vocab_size}: a "
                "draft proposes some of its target's tokens"
            )
        if self.confidence and self.confidence.with_markov and not self.markov:
            raise ValueError(
                "confidence_head_with_markov reads a Markov head, and markov_rank is 0: use the "
                "config.json that was saved with the weights"
            )

    @property
    def model_width(self) -> int:
        """Width of the draft."""
        return self.trunk.model_width

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        return self.trunk.vocab_size

    @property
    def first_slot(self) -> int:
        """The slot that proposes the token behind the pending one."""
        return 0 if self.from_pending else 1

    @property
    def tokens(self) -> int:
        """Tokens that a block proposes, one behind the other."""
        return self.block - self.first_slot

    @property
    def confidence_width(self) -> int:
        """Inputs of the confidence head."""
        reads_markov = self.confidence and self.confidence.with_markov
        return self.model_width + (self.markov.rank if self.markov and reads_markov else 0)

    def stretched(self, factor: float) -> "DFlashConfig":
        """The same draft with YaRN over its trained range."""
        trained = self.trunk.max_positions
        trunk = dataclasses.replace(
            self.trunk,
            rope_scaling=YarnRopeScaling.usual(factor, trained),
            max_positions=int(factor * trained),
        )
        return dataclasses.replace(self, trunk=trunk)

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError unless this draft can read the target's features and tokens."""
        check_fits(self, target)
