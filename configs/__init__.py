"""Training configurations, one program a target."""
