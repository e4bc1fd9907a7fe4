"""LongSpec (arXiv 2502.17421): one layer that reads the target's last-layer keys and values."""
