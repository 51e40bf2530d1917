"""Weights of linear layers and of experts in fewer bits: containers, and how a matrix is turned into them."""

from perfmodel_executors.kernels.weight_formats.containers import (
    FP8_BLOCK,
    BlockFp8Weight,
    Fp4Weight,
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
from perfmodel_executors.kernels.weight_formats.fp4 import fp4_from_pairs, quantize_mxfp4, quantize_nvfp4
from perfmodel_executors.kernels.weight_formats.quantize import (
    OUTLIER_THRESHOLD,
    quantize_fp8,
    quantize_fp8_block,
    quantize_int4,
    quantize_int8,
    quantize_signs,
    sparsify_24,
)

__all__ = [
    "FP8_BLOCK",
    "OUTLIER_THRESHOLD",
    "BlockFp8Weight",
    "ExpertWeight",
    "Fp4Weight",
    "Fp8Weight",
    "Int4Weight",
    "Int8Weight",
    "LowRankWeight",
    "MatrixWeight",
    "SignsWeight",
    "Sparse24Weight",
    "Weight",
    "dequantize",
    "fp4_from_pairs",
    "quantize_experts",
    "quantize_fp8",
    "quantize_fp8_block",
    "quantize_int4",
    "quantize_int8",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "quantize_signs",
    "sparsify_24",
]
