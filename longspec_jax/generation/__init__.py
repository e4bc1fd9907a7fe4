"""From what a caller passes to arrays for the decode loop, and from its state to results.

``inputs`` turns text, messages and token ids into prompts; ``options`` the sampling arguments into
a :class:`~longspec_jax.decoding.engine.Request`; ``runner`` warms up, runs and times; ``result``,
``text`` and ``inspection`` describe what came out; ``memory`` says beforehand whether it fits.
"""
