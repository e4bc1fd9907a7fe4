"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858): one layer over the last hidden state."""
