"""DFlash and DSpark drafts: one forward over a block of mask tokens proposes several tokens."""
