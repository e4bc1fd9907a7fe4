"""Published files of drafts: one reader, and for what is trained here one writer, a kind."""
