"""The two products of all experts at once."""
