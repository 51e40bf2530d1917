"""Matrix multiplication at 8-bit rates: activations quantised for each token, then INT8 or FP8 tensor cores."""
