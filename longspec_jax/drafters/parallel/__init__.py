"""The parallel LongSpec draft: one forward over a block of learnt slots proposes all tokens."""
