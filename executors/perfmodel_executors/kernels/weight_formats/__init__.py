"""Weights of linear layers and of experts in fewer bits: containers, and how a matrix is turned into them."""

from perfmodel_executors.kernels.weight_formats.containers import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    LowRankWeight,
    MatrixWeight,
    SignsWeight,
    Sparse24Weight,
    Weight,
)
from perfmodel_executors.kernels.weight_formats.dequantize import dequantize
from perfmodel_executors.kernels.weight_formats.experts import ExpertWeight, quantize_experts
from perfmodel_executors.kernels.weight_formats.quantize import (
    OUTLIER_THRESHOLD,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_signs,
    sparsify_24,
)

__all__ = [
    "OUTLIER_THRESHOLD",
    "ExpertWeight",
    "Fp8Weight",
    "Int4Weight",
    "Int8Weight",
    "LowRankWeight",
    "MatrixWeight",
    "SignsWeight",
    "Sparse24Weight",
    "Weight",
    "dequantize",
    "quantize_experts",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "quantize_signs",
    "sparsify_24",
]
