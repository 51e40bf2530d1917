"""y = x W^T + b, weights in the layout [out, in].

Problems: decode batches that read a weight once, chunks of prompts that fill the tensor cores.
"""

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel_executors.kernels.problem import Inputs, Problem


def linear(x_TC: Tensor, weight_DC: Tensor, bias_D: Tensor | None = None) -> Tensor:
    """The product, in x's dtype (accumulated in fp32 by the BLAS)."""
    return functional.linear(x_TC, weight_DC, bias_D)


_BF16 = LinearFormat("bf16", 2.0, 2.0, 2.0)
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

# n, k of 8B and 70B models: qkv, out, up, down.
_SHAPES = ((14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (28672, 8192))
_TOKENS = (1, 8, 16, 64, 128, 512, 4096)


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Few and many tokens, sizes that no tile divides, with and without a bias."""
    return [
        _problem(1, 48, 144, dtype),
        _problem(5, 72, 1100, dtype, has_bias=True),  # several slices of K
        _problem(70, 130, 80, dtype, has_bias=True),
        _problem(130, 40, 600, dtype),
    ]


def serving() -> list[Problem]:
    """Decode and prefill sizes of common models."""
    return [_problem(m, n, k, torch.bfloat16) for n, k in _SHAPES for m in _TOKENS]


def _problem(m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool = False) -> Problem:
    def make(inputs: Inputs) -> tuple[Tensor | None, ...]:
        x_MK = inputs.normal(m, k, dtype=dtype)
        weight_NK = inputs.normal(n, k, dtype=dtype, scale=k**-0.5)
        return x_MK, weight_NK, inputs.normal(n, dtype=dtype) if has_bias else None

    return Problem(
        "linear",
        {"m": m, "n": n, "k": k, "gemm_dtype": _NAMES[dtype]},
        make,
        gemm("linear", m, n, k, _BF16, has_bias=has_bias),
        _TOLERANCE[dtype],
        {"torch linear": functional.linear},
    )
