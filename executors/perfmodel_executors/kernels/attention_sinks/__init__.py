"""Attention under a sliding window with the first tokens kept as sinks, over whole sequences or a rolling cache."""
