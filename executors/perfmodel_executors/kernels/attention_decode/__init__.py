"""Attention of single new tokens over the paged KV cache."""
