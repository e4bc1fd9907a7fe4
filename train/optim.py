"""AdamW, and the learning rate as a function of progress.

Progress is a number in [0, 1] that the loop knows, from steps or from the clock. The optimiser
itself does not know the learning rate, so that a stage limited by time decays exactly like one
limited by steps.
"""

import math
import re
from typing import Any

import jax
import optax

from longspec_jax.sharding import path_name

from .config import OptimizerConfig

_NOT_DECAYED = re.compile(r"(scale|bias)$")


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping, Adam and weight decay; updates are yet to be scaled by minus the learning rate."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(
            config.weight_decay, mask=None if config.decay_all else decayed_parameters
        ),
    )


def decayed_parameters(params: Any) -> Any:
    """True for matrices and tables, False for norms and biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _NOT_DECAYED.search(path_name(path)) is None, params
    )


def learning_rate(progress: float, peak: float, *, warmup: float, floor: float) -> float:
    """Linear warm-up over a fraction of the stage, then a cosine down to ``floor * peak``.

    Args:
      progress: how much of the stage is done, 0 to 1.
      peak: the largest learning rate.
      warmup: the fraction of the stage that warms up.
      floor: the last learning rate, as a fraction of the peak.
    """
    if progress < warmup:
        return peak * progress / warmup
    fraction = min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * fraction)))
