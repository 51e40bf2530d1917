"""Loops of Triton kernels over weights as they are stored."""

from perfmodel_executors.kernels.weight_formats.triton.expand import expand_weight
from perfmodel_executors.kernels.weight_formats.triton.loops import check_format, scaled, tile_sums

__all__ = ["check_format", "expand_weight", "scaled", "tile_sums"]
