"""Products of many tokens, of plain weights and of 8-bit codes."""
