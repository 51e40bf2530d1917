"""Weights of linear layers and of experts in fewer bits: containers, and how a matrix is turned into them."""

from perfmodel_executors.kernels.weight_formats.containers import (
    FP8_BLOCK,
    BlockFp8Weight,
    Fp4Weight,
    Fp8Weight,
    GgufWeight,
    Int4Int8Weight,
    Int4Weight,
    Int8Weight,
    LowRankWeight,
    MatrixWeight,
    RowsWeight,
    SignsWeight,
    Sparse24Weight,
    Weight,
)
from perfmodel_executors.kernels.weight_formats.dequantize import dequantize
from perfmodel_executors.kernels.weight_formats.experts import ExpertWeight, quantize_experts, stack_experts
from perfmodel_executors.kernels.weight_formats.gguf_reading import BLOCK_SIZES
from perfmodel_executors.kernels.weight_formats.gguf_writing import quantize_gguf
from perfmodel_executors.kernels.weight_formats.operand import join_rows, reordered, table_rows
from perfmodel_executors.kernels.weight_formats.quantize import (
    OUTLIER_THRESHOLD,
    fp4_from_pairs,
    quantize_fp8,
    quantize_fp8_block,
    quantize_int4,
    quantize_int4_int8,
    quantize_int8,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_signs,
    sparsify_24,
)

__all__ = [
    "BLOCK_SIZES",
    "FP8_BLOCK",
    "OUTLIER_THRESHOLD",
    "BlockFp8Weight",
    "ExpertWeight",
    "Fp4Weight",
    "Fp8Weight",
    "GgufWeight",
    "Int4Int8Weight",
    "Int4Weight",
    "Int8Weight",
    "LowRankWeight",
    "MatrixWeight",
    "RowsWeight",
    "SignsWeight",
    "Sparse24Weight",
    "Weight",
    "dequantize",
    "fp4_from_pairs",
    "join_rows",
    "quantize_experts",
    "quantize_fp8",
    "quantize_fp8_block",
    "quantize_gguf",
    "quantize_int4",
    "quantize_int4_int8",
    "quantize_int8",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "quantize_signs",
    "reordered",
    "sparsify_24",
    "stack_experts",
    "table_rows",
]
