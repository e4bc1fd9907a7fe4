"""Evaluation on tasks: methods side by side, every raw count kept."""
