"""Matrix multiplication by a weight in 8 or 4 bits, at the activations' own precision."""
