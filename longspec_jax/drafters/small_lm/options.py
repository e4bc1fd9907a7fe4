"""What can be chosen about a small language model that drafts."""

from dataclasses import dataclass

from longspec_jax.drafters.working_options import WorkingCacheOptions


@dataclass(frozen=True)
class SmallLMOptions(WorkingCacheOptions):
    """How a small model is loaded, and how much of its cache it reads."""

    dtype: str | None = None
    """Of its parameters, activations and cache; the target's if absent."""
    context: int | None = None
    """Tokens of the longest text it will draft for, prompt and new ones; the target's whole range
    if absent. A model that was made for fewer positions is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context is not None and self.context < 1:
            raise ValueError(
                f"context={self.context} must be at least 1: it is the length in tokens of the "
                "longest text that the small model drafts for; leave it out for the target's range"
            )


AS_IT_IS = SmallLMOptions()
"""Nothing chosen."""
