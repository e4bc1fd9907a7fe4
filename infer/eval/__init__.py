"""Evaluation: methods side by side on tasks, with every raw count kept."""
