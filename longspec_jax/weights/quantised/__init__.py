"""Quantised checkpoints: formats, their tensors as codes and scales, and quantising a target."""
