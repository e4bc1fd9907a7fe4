"""Matrix products of a decode step, whose time is that of reading the weights."""
