"""Attention of a few queries to a long prefix and to each other."""
