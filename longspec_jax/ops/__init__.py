"""Attention arithmetic on arrays; knows no models and no caches."""
