"""Cache, sampling, verification and the decode loop."""
