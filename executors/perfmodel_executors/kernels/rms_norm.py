"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension, accumulated in fp32."""

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.elementwise import rms_norm as norm_work
from perfmodel_executors.kernels.problem import Inputs, Problem


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x_TC, weight_C.shape, weight_C, eps)


def add_rms_norm(x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual), x + residual): the pre-norm of the next block with its residual stream."""
    residual_TC = residual_TC + x_TC
    return rms_norm(residual_TC, weight_C, eps), residual_TC


_EPS = 1e-5
_BYTES = 2  # of an element of a serving problem
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def tiny(dtype: torch.dtype) -> list[Problem]:
    shapes = ((1, 8), (3, 129), (5, 64))
    return [_problem(name, *shape, dtype) for name in ("rms_norm", "add_rms_norm") for shape in shapes]


def serving() -> list[Problem]:
    shapes = ((64, 4096), (2048, 4096), (8192, 2048), (8192, 4096), (8192, 8192))
    return [_problem(name, *shape, torch.bfloat16) for name in ("add_rms_norm", "rms_norm") for shape in shapes]


def _problem(operator: str, rows: int, columns: int, dtype: torch.dtype) -> Problem:
    adds = operator == "add_rms_norm"

    def make(inputs: Inputs) -> tuple[Tensor | float, ...]:
        streams = [inputs.normal(rows, columns, dtype=dtype) for _ in range(2 if adds else 1)]
        return *streams, inputs.normal(columns, dtype=dtype), _EPS

    sizes: dict[str, int | float | str] = {"tokens": rows, "size": columns, "dtype": str(dtype).removeprefix("torch.")}
    work = norm_work(operator, rows, columns, _BYTES, adds_residual=adds)
    return Problem(operator, sizes, make, work, _TOLERANCE[dtype], {} if adds else {"torch rms_norm": rms_norm})
