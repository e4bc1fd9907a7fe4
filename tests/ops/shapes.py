"""Operands without numbers: shapes of a dtype."""

from functools import partial

import jax
import jax.numpy as jnp

half = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
real = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
whole = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
truth = partial(jax.ShapeDtypeStruct, dtype=jnp.bool_)
codes = partial(jax.ShapeDtypeStruct, dtype=jnp.uint8)
