"""Matrices of all experts of a layer in one weight format, laid out for one launch over all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.weight_formats.containers import (
    FP8_BLOCK,
    BlockFp8Weight,
    Fp4Weight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Weight,
)
from perfmodel_executors.kernels.weight_formats.operand import join_rows

Stacked = Int8Weight | Int4Weight | Fp8Weight | BlockFp8Weight | Fp4Weight


@dataclass(frozen=True, eq=False)
class ExpertWeight:
    """[E, N, K]: the experts' matrices one below the other, `stacked` as one weight [E N, K]. `weight[e]` is one's own.

    Scales belong to outputs, or to groups within one, so that stacking and quantising can change places; blocks of 128
    outputs are whole in each expert.
    """

    stacked: Stacked
    num_experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, k = self.stacked.shape
        return self.num_experts, rows // self.num_experts, k

    @property
    def quantizes_input(self) -> bool:
        return self.stacked.quantizes_input

    @property
    def num_bytes(self) -> int:
        return self.stacked.num_bytes

    def __getitem__(self, expert: int) -> Stacked:
        """The same object at each call: what is remembered beside a weight stays."""
        return self._experts[expert]

    @cached_property
    def _experts(self) -> tuple[Stacked, ...]:
        rows = self.shape[1]
        return tuple(_rows(self.stacked, slice(e * rows, (e + 1) * rows)) for e in range(self.num_experts))


def quantize_experts(weight_ENK: Tensor, quantize: Callable[[Tensor], Weight]) -> ExpertWeight:
    """All experts by one of the ways in `quantize`.

    Raises PerfmodelError for a format that grouped products do not know.
    """
    stacked = quantize(weight_ENK.flatten(0, 1))
    if isinstance(stacked, BlockFp8Weight):
        _check_blocks(weight_ENK.shape[1])
    if not isinstance(stacked, Stacked):
        raise PerfmodelError(
            f"experts are not stored as {type(stacked).__name__}; use int8, int4 or fp8 weights, or 4-bit floats."
        )
    return ExpertWeight(stacked, len(weight_ENK))


def stack_experts(weights: Sequence[Weight]) -> Tensor | ExpertWeight:
    """The experts' own matrices as those of a layer: all plain ones, or all in e4m3 blocks.

    Raises PerfmodelError for blocks that are not whole in each expert.
    """
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain) == len(weights):
        return torch.stack(plain)
    in_blocks = [weight for weight in weights if isinstance(weight, BlockFp8Weight)]
    _check_blocks(weights[0].shape[0])
    stacked = join_rows(in_blocks)
    assert isinstance(stacked, BlockFp8Weight)
    assert len(in_blocks) == len(weights), "experts in different formats"
    return ExpertWeight(stacked, len(weights))


def _check_blocks(rows: int) -> None:
    if rows % FP8_BLOCK:
        raise PerfmodelError(
            f"experts in blocks of {FP8_BLOCK} x {FP8_BLOCK} have whole blocks of outputs; {rows} are none. Set "
            f"engine.quantization to fp8, or to none where a checkpoint has them."
        )


def _rows(weight: Stacked, rows: slice) -> Stacked:
    if isinstance(weight, Int4Weight):
        zeros_GN = None if weight.zeros_GN is None else weight.zeros_GN[:, rows]
        return Int4Weight(weight.packed_NJ[rows], weight.scales_GN[:, rows], zeros_GN, weight.group_size)
    if isinstance(weight, BlockFp8Weight):
        blocks = slice(rows.start // FP8_BLOCK, rows.stop // FP8_BLOCK)
        return BlockFp8Weight(weight.values_NK[rows], weight.scales_RG[blocks])
    if isinstance(weight, Fp4Weight):
        own_N = None if weight.row_scales_N is None else weight.row_scales_N[rows]
        return Fp4Weight(weight.packed_NJ[rows], weight.scales_GN[:, rows], own_N)
    return type(weight)(weight.values_NK[rows], weight.scales_N[rows], weight.quantizes_input)
