"""Rows of stored weights: put below one another, in another order, or looked up one by one."""

__all__ = ["join_rows", "reordered", "table_rows"]

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.weight_formats.containers import (
    FP8_BLOCK,
    BlockFp8Weight,
    GgufWeight,
    MatrixWeight,
    RowsWeight,
)
from perfmodel_executors.kernels.weight_formats.dequantize import dequantize


def join_rows(parts: Sequence[MatrixWeight]) -> MatrixWeight | RowsWeight:
    """The rows of all `parts` in turn: one matrix where their formats allow it, else several that are multiplied one
    after the other."""
    joined = [parts[0]]
    for part in parts[1:]:
        both = _joined(joined[-1], part)
        joined[-1:] = [joined[-1], part] if both is None else [both]
    return joined[0] if len(joined) == 1 else RowsWeight(tuple(joined))


def _joined(above: MatrixWeight, below: MatrixWeight) -> MatrixWeight | None:
    if isinstance(above, Tensor) and isinstance(below, Tensor):
        return torch.cat((above, below))
    if isinstance(above, GgufWeight) and isinstance(below, GgufWeight) and above.form == below.form:
        return GgufWeight(torch.cat((above.blocks_NJ, below.blocks_NJ)), above.form)
    if isinstance(above, BlockFp8Weight) and isinstance(below, BlockFp8Weight) and not above.shape[0] % FP8_BLOCK:
        values_NK = torch.cat((above.values_NK, below.values_NK))
        return BlockFp8Weight(values_NK, torch.cat((above.scales_RG, below.scales_RG)))
    return None


def reordered(weight: MatrixWeight, order: Callable[[Tensor], Tensor]) -> MatrixWeight:
    """The weight with its rows as `order` puts those of a matrix; `order` may give back what it is given.

    Raises PerfmodelError for blocks that have rows of several outputs.
    """
    if isinstance(weight, GgufWeight):
        return GgufWeight(order(weight.blocks_NJ).contiguous(), weight.form)
    if isinstance(weight, Tensor):
        return order(weight)
    assert isinstance(weight, BlockFp8Weight)
    rows_N = torch.arange(weight.shape[0], device=weight.values_NK.device)
    if (order(rows_N[:, None])[:, 0] // FP8_BLOCK != rows_N // FP8_BLOCK).any():
        raise PerfmodelError(
            f"rows that are rotated together lie in several blocks of {FP8_BLOCK}, which share a scale, and cannot be "
            f"put into our order; set engine.quantization to none, which dequantises the file's weights."
        )
    values_NK = order(weight.values_NK.view(torch.uint8)).contiguous().view(weight.values_NK.dtype)
    return BlockFp8Weight(values_NK, weight.scales_RG)


def table_rows(table: Tensor | GgufWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[ids, K] in `dtype`: rows of an embedding as it is stored."""
    if isinstance(table, Tensor):
        return table[ids]
    return dequantize(GgufWeight(table.blocks_NJ[ids], table.form)).to(dtype)
