"""Matrix multiplication by a weight of signs: ternary or binary, activations in INT8."""
