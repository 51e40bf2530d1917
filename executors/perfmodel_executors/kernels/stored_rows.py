"""Rows of stored weights: those of all experts of a layer, put below one another, reordered, looked up one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels import weight_formats as formats
from perfmodel_executors.kernels.weight_formats import FP8_BLOCK, BlockFp8Weight, GgufWeight, MatrixWeight, Weight

Stacked = formats.Int8Weight | formats.Int4Weight | formats.Fp8Weight | BlockFp8Weight | formats.Fp4Weight


@dataclass(frozen=True, eq=False)
class ExpertWeight:
    """[E, N, K]: the experts' matrices one below the other, `stacked` as one weight [E N, K]. `weight[e]` is one's own.
    Scales belong to outputs, or groups within one, so stacking and quantising commute; blocks are whole in experts."""

    stacked: Stacked
    num_experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, k = self.stacked.shape
        return self.num_experts, rows // self.num_experts, k

    @property
    def quantizes_input(self) -> bool:
        return self.stacked.quantizes_input

    def __getitem__(self, expert: int) -> Stacked:
        """The same object at each call: what is remembered beside a weight stays."""
        return self._experts[expert]

    @cached_property
    def _experts(self) -> tuple[Stacked, ...]:
        """Each tensor's parts along the dimension of outputs, which its name tells: N, or R for blocks of them."""
        parts: dict[str, Sequence[Tensor]] = {}
        for name, tensor in self.stacked.tensors.items():
            dim = name.rpartition("_")[2].translate({ord("R"): "N"}).index("N")
            parts[name] = tensor.chunk(self.num_experts, dim)
        own: Any = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
        return tuple(replace(self.stacked, **tensors) for tensors in own)


def quantize_experts(weight_ENK: Tensor, quantize: Callable[[Tensor], Weight]) -> ExpertWeight:
    """All experts by one way of `weight_formats`. Raises PerfmodelError for what grouped products do not know."""
    stacked = quantize(weight_ENK.flatten(0, 1))
    if isinstance(stacked, BlockFp8Weight):
        _check_blocks(weight_ENK.shape[1])
    if not isinstance(stacked, Stacked):
        name = type(stacked).__name__
        raise PerfmodelError(f"experts are not stored as {name}; use int8, int4 or fp8 weights, or 4-bit floats.")
    return ExpertWeight(stacked, len(weight_ENK))


def stack_experts(weights: Sequence[Weight]) -> Tensor | ExpertWeight:
    """The experts' matrices, all plain or all in e4m3 blocks, as a layer's. Raises PerfmodelError for split blocks."""
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain) == len(weights):
        return torch.stack(plain)
    _check_blocks(weights[0].shape[0])
    stacked = join_rows([weight for weight in weights if isinstance(weight, BlockFp8Weight)])
    assert isinstance(stacked, BlockFp8Weight)
    assert len(stacked.values_NK) == sum(weight.shape[0] for weight in weights), "experts in different formats"
    return ExpertWeight(stacked, len(weights))


def _check_blocks(rows: int) -> None:
    if rows % FP8_BLOCK:
        raise PerfmodelError(
            f"experts in blocks of {FP8_BLOCK} x {FP8_BLOCK} have whole blocks of outputs; {rows} are none. Set "
            f"engine.quantization to fp8, or to none where a checkpoint has them."
        )


def join_rows(parts: Sequence[MatrixWeight]) -> MatrixWeight | formats.RowsWeight:
    """The rows of all `parts` in turn: one matrix where formats allow it, else several multiplied one by one."""
    joined = [parts[0]]
    for part in parts[1:]:
        both = _joined(joined[-1], part)
        joined[-1:] = [joined[-1], part] if both is None else [both]
    return joined[0] if len(joined) == 1 else formats.RowsWeight(tuple(joined))


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
    """The weight with its rows as `order` puts a matrix's. Raises PerfmodelError for blocks that would be mixed."""
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
    return formats.dequantize(GgufWeight(table.blocks_NJ[ids], table.form)).to(dtype)
