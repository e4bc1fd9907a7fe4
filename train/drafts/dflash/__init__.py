"""Training of the DFlash draft: settings, blocks, objective, export."""
