"""What works with the library and is not part of it: outside the wheel, run from a checkout."""
