"""Frozen, hashable configurations of layers, targets and trees, and the table of known targets.

A configuration is a legal static argument of ``jax.jit``. Fields are declared once, here; reading
them from a Hugging Face ``config.json`` is :mod:`longspec_jax.weights.hf_config`'s work. A draft's
configuration lies next to the draft, such as :mod:`longspec_jax.drafters.longspec`.
"""
