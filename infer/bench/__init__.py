"""What the project measures of itself: ``python -m infer.bench COMMAND``."""
