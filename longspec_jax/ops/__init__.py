"""Arithmetic on arrays: attention, matmuls, small ops of a layer; knows no models and no caches."""
