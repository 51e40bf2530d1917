"""Speculative decoding, executed: who drafts, what is verified, which tokens stay."""
