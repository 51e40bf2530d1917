"""The first product, with its activation."""
