"""Causal attention of prompt chunks over the paged KV cache."""
