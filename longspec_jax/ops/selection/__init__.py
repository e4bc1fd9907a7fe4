"""Which blocks of a row's cache slots a pass reads, and reading them.

One idea, three steps: every block of consecutive slots gets a score, the best blocks of a row are
chosen beside its first and its last ones, and what lies in them is gathered. Scores come from
summaries of the keys (:mod:`extremes`, Quest) or from the attention of one query
(:mod:`attended`, SpecExtend); :mod:`blocks` chooses, :mod:`gather` reads. The meaning of each is in
:mod:`reference`.
"""
