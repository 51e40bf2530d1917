"""Choice of the next token."""
