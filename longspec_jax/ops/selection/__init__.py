"""Choosing the best of many: blocks of a row's cache slots, and continuations of a draft's paths.

Which blocks a pass reads, and reading them, is three steps: every block of consecutive slots gets a
score, the best blocks of a row are chosen beside its first and its last ones, and what lies in them
is gathered. Scores come from summaries of the keys (:mod:`extremes`, Quest) or from the attention
of one query (:mod:`attended`, SpecExtend); :mod:`blocks` chooses, :mod:`gather` reads. What a
draft's beam search keeps of a level is one step, :mod:`continuations`. The meaning of each is in
:mod:`reference`.
"""
