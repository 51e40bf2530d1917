"""A linear layer whatever its weight is stored as: the operator that multiplies by it, from one table."""

from collections.abc import Mapping

import torch
from torch import Tensor

from perfmodel_executors.kernels import weight_formats as formats
from perfmodel_executors.kernels.dispatch import Kernels
from perfmodel_executors.kernels.weight_formats import AdaptedWeight, Int8Weight, LowRankWeight, RowsWeight, Weight

# (type of the weight, whether activations are quantised for it) -> operator
OPERATORS: Mapping[tuple[type, bool], str] = {
    (formats.Int8Weight, False): "linear_w8a16",
    (formats.Fp8Weight, False): "linear_w8a16",
    (formats.Fp4Weight, False): "linear_w4a16",
    (formats.Int4Weight, False): "linear_w4a16",
    (formats.Int4Int8Weight, True): "linear_w4a8",
    (formats.Int8Weight, True): "linear_w8a8",
    (formats.Fp8Weight, True): "linear_fp8",
    (formats.SignsWeight, True): "linear_signs",
    (formats.GgufWeight, False): "linear_gguf",
    (formats.BlockFp8Weight, True): "linear_fp8_block",
    (formats.Sparse24Weight, False): "linear_sparse24",
}


def apply_linear(
    kernels: Kernels, x_TC: Tensor, weight: Weight | AdaptedWeight, bias_D: Tensor | None = None
) -> Tensor:
    if isinstance(weight, Tensor):
        product_TD: Tensor = kernels.linear(x_TC, weight, bias_D)
        return product_TD
    if isinstance(weight, LowRankWeight):
        return apply_linear(kernels, apply_linear(kernels, x_TC, weight.inputs_RK), weight.outputs_NR, bias_D)
    if isinstance(weight, RowsWeight):
        product_TD = torch.cat([apply_linear(kernels, x_TC, part) for part in weight.parts], dim=-1)
        return product_TD if bias_D is None else product_TD + bias_D
    if isinstance(weight, Int8Weight) and weight.outlier_threshold is not None:
        # Columns with a magnitude above the threshold in x's dtype, the others in INT8 (Dettmers et al. 2022).
        is_outlier_C = (x_TC.abs() > weight.outlier_threshold).any(dim=0)
        product_TD = kernels.linear_w8a8(x_TC.masked_fill(is_outlier_C, 0.0), weight, bias_D)
        columns = is_outlier_C.nonzero()[:, 0]
        if not len(columns):
            return product_TD
        apart_DI = (weight.values_NK[:, columns].float() * weight.scales_N[:, None]).to(x_TC.dtype)
        return product_TD + x_TC[:, columns] @ apart_DI.T
    if isinstance(weight, AdaptedWeight):
        return weight.add_to(apply_linear(kernels, x_TC, weight.base, bias_D), x_TC)
    operator = OPERATORS[type(weight), weight.quantizes_input]
    if isinstance(weight, Int8Weight) and weight.input_scale is not None:
        operator = "linear_w8a8_static"
    quantized_TD: Tensor = getattr(kernels, operator)(x_TC, weight, bias_D)
    return quantized_TD


def rows_of(weight: Weight, rows: slice) -> Weight:
    """What multiplies into these of the outputs, of weights that are not quantised."""
    if isinstance(weight, LowRankWeight):
        assert isinstance(weight.outputs_NR, Tensor), "the factors are quantised"
        return LowRankWeight(weight.inputs_RK, weight.outputs_NR[rows])
    assert isinstance(weight, Tensor), f"{type(weight).__name__} is not cut into rows"
    return weight[rows]
