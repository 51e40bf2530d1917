"""y = (q(x) W^T) * token scale * output scale + b: activations quantised on the way, for each token by its largest, or
by a scale known beforehand (SmoothQuant).

q(x) in INT8 (-127..127, accumulated in int32) or in e4m3 (accumulated in fp32). In blocks, x has a scale for each token
and 128 inputs, and the weight one for each 128 x 128.
"""

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.linear import gemm
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.weight_formats.containers import (
    FP8_BLOCK,
    BlockFp8Weight,
    Fp8Weight,
    Int4Int8Weight,
    Int8Weight,
)
from perfmodel_executors.kernels.weight_formats.dequantize import dense_product, expanded, int8_values
from perfmodel_executors.kernels.weight_formats.quantize import FP8_MAX, INT8_MAX
from perfmodel_executors.kernels.weight_formats.samples import FORMATS

_TINY = 1e-12
_CUDA_LEAST_ROWS = 32  # cuBLAS refuses INT8 products of 16 rows and fewer,
_CUDA_UNIT = 8  # and inputs and outputs that are no multiples of this


def quantize_tokens_int8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 [M, K], scales fp32 [M]); x is codes * scales."""
    wide = x_MK.float()
    scales_M = _share(wide.abs().amax(dim=1), INT8_MAX)
    return (wide / scales_M[:, None]).round_().to(torch.int8), scales_M


def quantize_tokens_fp8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [M, K], scales fp32 [M]); x is values * scales."""
    wide = x_MK.float()
    scales_M = _share(wide.abs().amax(dim=1), FP8_MAX)
    return (wide / scales_M[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales_M


def _share(largest_M: Tensor, most: float) -> Tensor:
    """largest / most, rounded once: by a number, CUDA's division would be a product with its reciprocal, and values on
    the edge between two codes would go the other way."""
    return (largest_M / largest_M.new_tensor(most)).clamp_min(_TINY)


def linear_fp8_block(x_MK: Tensor, weight: BlockFp8Weight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype: x to e4m3 in groups of 128 and back, then by what the weight stands for."""
    m, k = x_MK.shape
    groups = functional.pad(x_MK, (0, -k % FP8_BLOCK)).reshape(-1, FP8_BLOCK)
    values, scales = quantize_tokens_fp8(groups)
    rounded_MK = (values.float() * scales[:, None]).view(m, -1)[:, :k]
    return functional.linear(rounded_MK.to(x_MK.dtype), expanded(weight, x_MK.dtype), bias_N)


def linear_w8a8(x_MK: Tensor, weight: Int8Weight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype."""
    codes_MK, scales_M = quantize_tokens_int8(x_MK)
    return _scaled(int8_product(codes_MK, weight.values_NK), scales_M, weight.scales_N, bias_N, x_MK.dtype)


def linear_w4a8(x_MK: Tensor, weight: Int4Int8Weight, bias_N: Tensor | None = None) -> Tensor:
    """As `linear_w8a8`, by the INT8 numbers that the codes are unpacked to at each call."""
    codes_MK, scales_M = quantize_tokens_int8(x_MK)
    return _scaled(int8_product(codes_MK, int8_values(weight)), scales_M, weight.row_scales_N, bias_N, x_MK.dtype)


def linear_w8a8_static(x_MK: Tensor, weight: Int8Weight, bias_N: Tensor | None = None) -> Tensor:
    """As `linear_w8a8`, with the weight's scale for all activations; what exceeds it saturates."""
    assert weight.input_scale is not None
    codes_MK = (x_MK.float() / weight.input_scale).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    scales_M = weight.input_scale.expand(len(x_MK))
    return _scaled(int8_product(codes_MK, weight.values_NK), scales_M, weight.scales_N, bias_N, x_MK.dtype)


def int8_product(codes_MK: Tensor, values_NK: Tensor) -> Tensor:
    """codes values^T, both INT8, in int32 [M, N]."""
    (rows, inputs), outputs = codes_MK.shape, len(values_NK)
    if codes_MK.device.type == "cuda":
        more = -inputs % _CUDA_UNIT
        codes_MK = functional.pad(codes_MK, (0, more, 0, max(0, _CUDA_LEAST_ROWS - rows)))
        values_NK = functional.pad(values_NK, (0, more, 0, -outputs % _CUDA_UNIT))
    return torch._int_mm(codes_MK, values_NK.T)[:rows, :outputs]


def linear_fp8(x_MK: Tensor, weight: Fp8Weight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype; emulated in bf16, which holds every e4m3 value, or in x's dtype if wider."""
    values_MK, scales_M = quantize_tokens_fp8(x_MK)
    dtype = torch.float32 if x_MK.dtype == torch.float32 else torch.bfloat16
    product_MN = functional.linear(values_MK.to(dtype), expanded(weight, dtype))
    return _scaled(product_MN, scales_M, weight.scales_N, bias_N, x_MK.dtype)


def _scaled(
    product_MN: Tensor, scales_M: Tensor, scales_N: Tensor, bias_N: Tensor | None, dtype: torch.dtype
) -> Tensor:
    scaled_MN = product_MN.float() * scales_M[:, None] * scales_N
    return (scaled_MN if bias_N is None else scaled_MN + bias_N).to(dtype)


# Beside rounding of the result: a value on the edge between two codes may go either way.
_TOLERANCE = {torch.float32: 4e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_FORMATS = {"linear_w8a8": "int8", "linear_fp8": "fp8", "linear_fp8_block": "fp8_block"}
_SHAPES = ((14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
_TOKENS = (1, 8, 64, 512, 4096)


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Few and many tokens, several slices, odd sizes."""
    return [
        *(_problem(name, 3, 72, 1100, dtype, has_bias=True) for name in ("linear_w8a8", "linear_fp8")),
        *(_problem(name, 70, 40, 144, dtype) for name in ("linear_w8a8", "linear_fp8", "linear_fp8_block")),
        _problem("linear_fp8_block", 3, 200, 600, dtype, has_bias=True),
    ]


def serving() -> list[Problem]:
    """Decode batches and chunks of prompts, at the sizes of an 8B model."""
    names = tuple(_FORMATS)
    return [_problem(name, m, n, k, torch.bfloat16) for name in names for n, k in _SHAPES for m in _TOKENS]


def _problem(operator: str, m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool = False) -> Problem:
    name = _FORMATS[operator]
    found = FORMATS[name]

    def make(inputs: Inputs) -> tuple[object, ...]:
        x_MK = inputs.normal(m, k, dtype=dtype)
        return x_MK, found.make(inputs, n, k, dtype), inputs.normal(n, dtype=dtype) if has_bias else None

    return Problem(
        operator,
        {"m": m, "n": n, "k": k, "gemm_dtype": name, "dtype": str(dtype).removeprefix("torch.")},
        make,
        gemm(operator, m, n, k, found.form, has_bias=has_bias),
        _TOLERANCE[dtype],
        {"scaled_mm": _scaled_mm} if name == "fp8" else {"dense": dense_product},
    )


def _scaled_mm(x_MK: Tensor, weight: Fp8Weight, bias_N: Tensor | None = None) -> Tensor:
    """torch's FP8 product (cuBLAS, CUTLASS), with its own quantisation of x before it."""
    values_MK, scales_M = quantize_tokens_fp8(x_MK)
    return torch._scaled_mm(
        values_MK,
        weight.values_NK.T,
        scales_M[:, None],
        weight.scales_N[None, :],
        bias_N,
        out_dtype=x_MK.dtype,
        use_fast_accum=True,
    )
