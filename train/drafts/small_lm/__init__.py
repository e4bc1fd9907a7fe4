"""Training of a small language model that drafts: settings, objective, export."""
