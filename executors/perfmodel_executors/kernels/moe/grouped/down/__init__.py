"""The second product, and the sum over the experts of a token."""
