"""Reports of evaluation runs: the papers' tables and figures from raw counts, as one page.

``blocks`` reads runs and groups those that compare; ``figures`` computes; ``tables`` specifies
every table by its columns, ``charts`` draws them; ``report`` puts all in order; ``render`` writes
HTML, Markdown and CSV.
"""
