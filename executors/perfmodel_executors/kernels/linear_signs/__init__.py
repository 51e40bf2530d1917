"""Matrix multiplication by a weight with two of each four inputs kept."""
