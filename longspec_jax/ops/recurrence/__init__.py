"""Gated DeltaNet: a recurrence over the tokens of a row, and over the nodes of a tree."""
