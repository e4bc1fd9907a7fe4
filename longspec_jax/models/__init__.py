"""Target models as pure linen modules."""
