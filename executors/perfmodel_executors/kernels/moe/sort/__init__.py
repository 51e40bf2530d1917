"""Tokens in the order of their experts, in tiles of rows."""
