"""Choosing the best of many: blocks of a row's cache, and continuations of a draft's paths."""
