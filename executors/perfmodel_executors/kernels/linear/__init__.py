"""Matrix multiplication by a weight."""
