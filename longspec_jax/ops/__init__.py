"""Arithmetic on arrays: attention, matrix products, small ops; knows no models and no caches."""
