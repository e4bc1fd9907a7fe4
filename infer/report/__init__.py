"""Reports of evaluation runs: the papers' tables and figures from raw counts, as one page.

``runs`` reads, ``blocks`` says what may be compared, ``counting`` and ``intervals`` compute; every
table has a file of its own; ``page``, ``markdown`` and ``rows`` write.
"""
