"""Training of drafts (and of the demo target)."""
