"""From documents to the batches of a training step."""
