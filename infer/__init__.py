"""Commands that decode and measure."""
