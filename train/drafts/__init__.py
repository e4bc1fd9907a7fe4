"""Drafts that can be trained: a folder for every kind, and the table of kinds."""
