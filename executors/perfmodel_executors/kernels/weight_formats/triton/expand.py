"""A stored weight written out in the activations' dtype, once, for a product with so many tokens that widening its
codes in every tile would take longer than reading them wide."""

__all__ = ["expand_weight"]

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.weight_formats.fp4 import SPAN
from perfmodel_executors.kernels.weight_formats.operand import Operand
from perfmodel_executors.kernels.weight_formats.triton.four_bits import expand_fp4, expand_int4

_MOST_ELEMENTS = 1 << 26  # written out at a time: 128 MB in 16 bits
_ROWS = 32
_DEPTH = 128  # inputs of a program where they have no groups


@triton.jit
def _expand_kernel(
    values_ptr, scales_ptr, zeros_ptr, row_stride, out_ptr, N, first, rows, K,
    FORMAT: tl.constexpr, GROUP_SIZE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (own < rows)[:, None]
    row = first + tl.minimum(own, rows - 1)
    unit = tl.program_id(1)
    if FORMAT == "rows":
        k = tl.arange(0, UNIT)
        mask = is_row & (unit * UNIT + k < K)[None, :]
    else:
        k = tl.arange(0, UNIT // 2)
        mask = is_row & (k >= 0)[None, :]
    out_ptrs = out_ptr + own.to(tl.int64)[:, None] * K + unit * UNIT + k[None, :]
    value_ptrs = values_ptr + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    if FORMAT == "rows":
        values = tl.load(value_ptrs + unit * UNIT, mask=mask, other=0.0)
        tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)
    elif FORMAT == "int4":
        expand_int4(value_ptrs + unit * (UNIT // 2), scales_ptr, zeros_ptr, row, N, out_ptrs, mask, unit, GROUP_SIZE)
    else:
        expand_fp4(value_ptrs + unit * (UNIT // 2), scales_ptr, row, N, out_ptrs, mask, unit, UNIT, GROUP_SIZE)


def expand_weight(operand: Operand, dtype: torch.dtype) -> Iterator[tuple[int, Operand]]:
    """(the first output, the plain weight) of parts that are written one after the other into one buffer.

    What has a scale for each output keeps it: the product is scaled, not the weight.
    """
    n, k = operand.shape
    most = min(n, max(_ROWS, _MOST_ELEMENTS // k // _ROWS * _ROWS))
    unit = SPAN if operand.form == "fp4" else operand.group_size or _DEPTH
    buffer_NK = torch.empty(most, k, dtype=dtype, device=operand.values.device)
    for first in range(0, n, most):
        rows = min(most, n - first)
        launch(
            _expand_kernel,
            (triton.cdiv(rows, _ROWS), triton.cdiv(k, unit)),
            *(operand.values, operand.group_scales, operand.zeros, operand.values.stride(0), buffer_NK),
            *(n, first, rows, k),
            options=Options(num_warps=4, num_stages=1),
            FORMAT=operand.form,
            GROUP_SIZE=operand.group_size,
            UNIT=unit,
            ROWS=_ROWS,
        )
        scales_N = operand.row_scales if operand.row_scales is None else operand.row_scales[first : first + rows]
        yield first, Operand("plain", 8 * dtype.itemsize, (rows, k), buffer_NK[:rows], scales_N)
