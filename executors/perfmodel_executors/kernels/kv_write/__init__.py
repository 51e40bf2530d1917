"""Scatter of new keys and values into the paged KV cache."""
