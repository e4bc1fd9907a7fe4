"""Training of the parallel LongSpec draft: settings, blocks, loss, objective."""
