"""Drafters: what proposes the tree of tokens that the target verifies.

A kind of draft is a folder here (:mod:`.longspec`, :mod:`.small_lm`), or one file if it has no
weights (:mod:`.ngram`, :mod:`.streaming`), and an entry in :mod:`.registry`. A folder holds
``drafter``, which proposes trees (:mod:`.base` is its interface), and ``load``: the options of the
kind, its draft (:mod:`.draft` is the interface) and its loader.

All kinds share :mod:`.tree` (growing, budget, accepting), :mod:`.retrieval` (reading a part of a
cache) and :mod:`.vocabulary` (proposing some of the tokens).
"""
