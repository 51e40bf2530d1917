"""A weight as kernels multiply by it: its tensors in the order of `tile_sums`, and what is compiled in.

Rows of stored weights: put below one another, in another order, or looked up one by one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.weight_formats.containers import (
    FP8_BLOCK,
    BlockFp8Weight,
    Fp4Weight,
    GgufWeight,
    Int4Int8Weight,
    Int4Weight,
    MatrixWeight,
    RowsWeight,
    SignsWeight,
    Sparse24Weight,
)
from perfmodel_executors.kernels.weight_formats.dequantize import dequantize
from perfmodel_executors.kernels.weight_formats.quantize import SPAN

_WIDE = (torch.bfloat16, torch.float16)  # that codes are widened to by instructions of the device


class Operand(NamedTuple):
    """A stored matrix [N, K].

    form:         plain, rows (8 bits, a scale for each output), int4, fp4 (groups of inputs), blocks (of e4m3)
    bits:         of a stored value
    shape:        N, K
    values:       as stored, a row for each output
    row_scales, group_scales, zeros: as the containers have them
    group_size:   inputs that share a scale; 0 without groups
    unit:         inputs that are packed together: a step is as deep as whole units; 0: any depth
    meets_codes:  whether activations are quantised, too
    """

    form: str
    bits: int
    shape: tuple[int, int]
    values: Tensor
    row_scales: Tensor | None = None
    group_scales: Tensor | None = None
    zeros: Tensor | None = None
    group_size: int = 0
    unit: int = 0
    meets_codes: bool = False

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """What `tile_sums` is passed, from the values to their stride."""
        return self.values, self.row_scales, self.group_scales, self.zeros, self.values.stride(0)

    @property
    def is_widened(self) -> bool:
        """Whether codes pass through registers on their way to the tensor cores."""
        return self.form != "plain" and not self.meets_codes

    @property
    def problem(self) -> tuple[object, ...]:
        """What the best tile depends on, beside the shape."""
        return self.form, self.values.dtype, self.group_size, self.zeros is None, self.meets_codes

    def constants(self, x: Tensor, block_k: int) -> dict[str, Any]:
        """Compile-time constants of `tile_sums`, for activations x as they came and a depth of `block_k`."""
        by_bits = self.is_widened and x.device.type != "cpu" and x.dtype in _WIDE
        even = self.shape[1] % block_k == 0
        return {"FORMAT": self.form, "GROUP_SIZE": self.group_size, "EVEN_K": even, "BY_BITS": by_bits}

    def depth(self, wanted: int) -> int:
        """The largest depth of a step, up to `wanted`, that is whole groups and leaves none over."""
        if not self.unit:
            return wanted
        if self.form == "blocks":  # each ends with a sum of its own; the last may be smaller
            return self.unit
        units, most = self.shape[1] // self.unit, max(1, wanted // self.unit)
        return self.unit * next(count for count in range(most, 0, -1) if units % count == 0)


def operand_of(weight: MatrixWeight) -> Operand:
    """What kernels are given of a weight, which is in one of the formats that they know."""
    assert not isinstance(weight, Sparse24Weight | SignsWeight | GgufWeight | Int4Int8Weight)
    if isinstance(weight, Tensor):
        return Operand("plain", 8 * weight.element_size(), (weight.shape[0], weight.shape[1]), weight)
    if isinstance(weight, Int4Weight):
        codes, group = weight.packed_NJ, weight.group_size
        return Operand("int4", 4, weight.shape, codes, None, weight.scales_GN, weight.zeros_GN, group, group)
    if isinstance(weight, Fp4Weight):
        packed, rows, group = weight.packed_NJ, weight.row_scales_N, weight.group_size
        return Operand("fp4", 4, weight.shape, packed, rows, weight.scales_GN, None, group, SPAN)
    if isinstance(weight, BlockFp8Weight):
        values, scales = weight.values_NK, weight.scales_RG
        return Operand("blocks", 8, weight.shape, values, None, scales, None, FP8_BLOCK, FP8_BLOCK, meets_codes=True)
    meets_codes = weight.quantizes_input
    return Operand("rows", 8, weight.shape, weight.values_NK, weight.scales_N, meets_codes=meets_codes)


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
