"""Gated and plain activations of feed-forward blocks."""
