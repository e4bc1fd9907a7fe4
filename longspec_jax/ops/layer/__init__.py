"""The small ops of a layer, each one launch in a decode step on a GPU."""
