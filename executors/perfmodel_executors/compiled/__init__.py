"""Kernels compiled ahead of time, without a GPU: what they really take of the hardware."""
