"""Tensor parallelism of the executed decoder: which rank holds what, and what ranks say to each other."""
