"""The target answers the questions of a data set in its own words; for :mod:`train.regenerate`."""
