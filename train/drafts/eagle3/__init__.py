"""Training of the EAGLE-3 draft: settings, the training-time test, objective, export."""
