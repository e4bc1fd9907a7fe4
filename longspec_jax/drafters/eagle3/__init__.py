"""EAGLE-3 (arXiv 2503.01840): one layer over features of several layers of the target."""
