"""Reports of evaluation runs: the papers' tables and charts from raw counts, as one page.

``frame`` reads runs into one data frame and estimates figures; ``tables`` divides it and says what
is not there; ``page`` writes HTML and CSV.
"""
