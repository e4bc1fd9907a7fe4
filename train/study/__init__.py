"""What the paper claims of its training, measured on a target and drafts of one's own."""
