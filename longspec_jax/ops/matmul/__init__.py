"""Matmuls of a decode step, whose time is that of reading the weights, and of training."""
