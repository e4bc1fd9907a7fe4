"""What every Pallas kernel that is written for Triton asks of the compiler."""

import warnings

from jax.experimental.pallas import triton as pltriton


def compiler_params(warps: int, stages: int) -> pltriton.CompilerParams:
    """Choose Triton by name, and accept its announced removal without a warning at each call.

    :mod:`longspec_jax.ops.attention.prefix_triton` is the successor for the day it goes.
    """
    warnings.filterwarnings(
        "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
    )
    return pltriton.CompilerParams(num_warps=warps, num_stages=stages)
