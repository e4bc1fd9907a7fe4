"""Drafters: what proposes the tree of tokens that the target verifies.

A kind of draft is a file here, such as :mod:`.longspec` or, without weights, :mod:`.ngram`: its
configuration, its module and parameters, the drafter, which proposes trees (:mod:`.base` is its
interface), and the draft with its options (:mod:`.draft` is the interface). Published files of a
kind are read in :mod:`.checkpoints`, and only there. :mod:`.registry` lists the kinds.

All kinds share :mod:`.tree` (growing, budget, accepting), :mod:`.retrieval` (reading a part of a
cache) and :mod:`.vocabulary` (proposing some of the tokens).
"""
