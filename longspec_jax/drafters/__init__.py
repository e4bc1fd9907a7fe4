"""Drafters: what proposes the tree the target checks."""
