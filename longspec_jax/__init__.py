"""Lossless long-context speculative decoding (LongSpec) in JAX."""
