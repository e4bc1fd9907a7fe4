"""Reports of evaluation runs: the papers' tables from raw counts, as one page.

``blocks`` reads runs and groups those that compare; ``figures`` computes; ``tables`` specifies
every table by its columns; ``report`` puts all in order; ``render`` writes HTML and Markdown.
"""
