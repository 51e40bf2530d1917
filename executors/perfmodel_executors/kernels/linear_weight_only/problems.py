"""Linear layers with weights in 8 or 4 bits."""

__all__ = ["serving", "tiny"]

import torch

from perfmodel.ops.linear import gemm
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.weight_formats.dense import dense_product
from perfmodel_executors.kernels.weight_formats.samples import FORMATS

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
_SERVED = ("int8_wo", "int4_wo", "w4a16_mxfp4", "w4a16_nvfp4")
_SHAPES = ((14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
_TOKENS = (1, 8, 16, 64, 512, 4096)


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Few and many tokens, several slices, odd sizes."""
    return [
        _problem("int8_wo", 3, 72, 1100, dtype, has_bias=True),
        _problem("int8_wo", 70, 40, 144, dtype),
        _problem("fp8_wo", 5, 40, 144, dtype),
        _problem("int4_wo", 3, 72, 1024, dtype, has_bias=True),
        _problem("int4_wo", 70, 40, 384, dtype),
        _problem("int4_wo_zeros", 9, 40, 192, dtype, has_bias=True),
        _problem("w4a16_mxfp4", 3, 72, 1088, dtype, has_bias=True),
        _problem("w4a16_mxfp4", 70, 40, 192, dtype),
        _problem("w4a16_nvfp4", 5, 72, 320, dtype, has_bias=True),
        *(_problem(form, 260, 40, 192, dtype, has_bias=True) for form in ("int8_wo", "int4_wo_zeros", *_SERVED[2:])),
    ]


def serving() -> list[Problem]:
    """Decode batches and a chunk of a prompt, at the sizes of an 8B model."""
    return [_problem(f, m, n, k, torch.bfloat16) for f in _SERVED for n, k in _SHAPES for m in _TOKENS]


def _problem(name: str, m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool = False) -> Problem:
    found = FORMATS[name]
    operator = "linear_w8a16" if "8" in name else "linear_w4a16"

    def make(inputs: Inputs) -> tuple[object, ...]:
        x_MK = inputs.normal(m, k, dtype=dtype)
        return x_MK, found.make(inputs, n, k, dtype), inputs.normal(n, dtype=dtype) if has_bias else None

    return Problem(
        operator,
        {"m": m, "n": n, "k": k, "gemm_dtype": name, "dtype": str(dtype).removeprefix("torch.")},
        make,
        gemm(operator, m, n, k, found.form, has_bias=has_bias),
        _TOLERANCE[dtype],
        {"dense": dense_product},
    )
