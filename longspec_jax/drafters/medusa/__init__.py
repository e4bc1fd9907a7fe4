"""Medusa (arXiv 2401.10774): heads on the last hidden state, one for each token further on."""
