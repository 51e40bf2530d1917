"""RMSNorm, alone and fused with the residual addition: one program a row, one pass over memory.

    alone:  reads x, writes y                       2 R C bytes per element
    fused:  reads x and the residual, writes both   4 R C

The row stays in registers between the sum of squares and the scaling, so C is limited by them (32 k in bf16).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, columns, x_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        # Rounded to the stream's dtype before the norm, as the reference does: the next block reads the rounded sum.
        total = (x + residual).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * columns + column, total, mask=mask)
        x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / columns + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Normalised x over the last dimension, in x's dtype; rows may lie apart (heads of a wider matrix)."""
    columns = x_TC.shape[-1]
    rows_RC = x_TC.reshape(-1, columns)
    y_RC = torch.empty(rows_RC.shape, dtype=x_TC.dtype, device=x_TC.device)
    _run(rows_RC, None, weight_C, y_RC, None, eps)
    return y_RC.view(x_TC.shape)


def add_rms_norm(x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y_TC, sum_TC = torch.empty_like(residual_TC), torch.empty_like(residual_TC)
    _run(x_TC, residual_TC.contiguous(), weight_C, y_TC, sum_TC, eps)
    return y_TC, sum_TC


def _run(x_RC: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor, total: Tensor | None, eps: float) -> None:
    """A row is one block, with 8 to 16 elements a thread."""
    rows, columns = x_RC.shape
    block = triton.next_power_of_2(columns)
    options = Options(num_warps=max(1, min(16, block // 512)), num_stages=1)
    args = (x_RC, residual, weight, y, total, columns, x_RC.stride(0), eps)
    launch(_rms_norm_kernel, (rows,), *args, options=options, BLOCK=block)
