"""Tiles of whole rows of a matrix, fetched by threads or by the copy engine."""
