"""Training of the LongSpec draft: settings, passes, objective."""
