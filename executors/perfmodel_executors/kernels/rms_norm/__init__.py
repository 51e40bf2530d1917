"""Root-mean-square normalisation, with and without the residual addition."""
