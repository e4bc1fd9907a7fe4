"""Other engines next to ours, on one card in one hour: one script a peer, rows of one schema."""
