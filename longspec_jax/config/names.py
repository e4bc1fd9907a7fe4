"""Names of what modules that import jax implement, for commands that do not."""

ATTENTION = ("pallas", "mosaic", "triton", "xla", "reference", "interpret")
"""Names of the implementations in :mod:`longspec_jax.ops.attention.dispatch`, which imports jax."""
KV_DTYPES = ("fp8",)
"""Names of the dtypes in :mod:`longspec_jax.ops.attention.float8`, which imports jax."""
MESH_AXES = ("data", "fsdp", "tp")
"""Axes of the mesh that :mod:`longspec_jax.sharding` makes, which imports jax."""
BATCH_AXES = ("data", "fsdp")
"""The two axes over which batch rows are spread."""
