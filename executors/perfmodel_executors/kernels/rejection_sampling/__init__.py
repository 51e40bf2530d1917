"""Operators `verify_greedy` and `verify_stochastic`: which drafted tokens the target keeps."""
