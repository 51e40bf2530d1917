"""Kernels compiled ahead of their measurement, beside it, by all cores."""
