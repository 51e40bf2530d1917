"""Loops of Triton kernels over weights as they are stored."""

from perfmodel_executors.kernels.weight_formats.triton.loops import add_values, check_format, scaled, tile_sums

__all__ = ["add_values", "check_format", "scaled", "tile_sums"]
