"""Products with the weight on the left, y^T = W x^T, whatever it is stored as."""
