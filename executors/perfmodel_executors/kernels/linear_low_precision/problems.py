"""Linear layers whose activations are quantised on the way."""

__all__ = ["serving", "tiny"]

import torch
from torch import Tensor

from perfmodel.ops.linear import gemm
from perfmodel_executors.kernels.linear_low_precision.reference import quantize_tokens_fp8
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.weight_formats import Fp8Weight
from perfmodel_executors.kernels.weight_formats.dense import dense_product
from perfmodel_executors.kernels.weight_formats.samples import FORMATS

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
