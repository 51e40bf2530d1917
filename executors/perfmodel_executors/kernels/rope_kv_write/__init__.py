"""Rotary embedding of queries and keys, and the write of keys and values into their pages, in one pass."""
