"""TokenSwift (arXiv 2502.18890): the target over a part of its cache, and heads in a chain."""
