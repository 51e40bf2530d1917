"""Weights of linear layers in fewer bits: containers, and how a matrix is turned into them."""

from perfmodel_executors.kernels.weight_formats.containers import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Sparse24Weight,
    Weight,
)
from perfmodel_executors.kernels.weight_formats.dequantize import dequantize
from perfmodel_executors.kernels.weight_formats.quantize import (
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    sparsify_24,
)

__all__ = [
    "Fp8Weight",
    "Int4Weight",
    "Int8Weight",
    "Sparse24Weight",
    "Weight",
    "dequantize",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "sparsify_24",
]
