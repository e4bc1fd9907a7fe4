"""A small language model of the target's tokenizer, which drafts with a cache of its own."""
