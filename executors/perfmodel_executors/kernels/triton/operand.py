"""A weight as kernels multiply by it: its tensors in the order of `tile_sums`, and what is compiled in."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfmodel_executors.kernels import weight_formats as formats

_WIDE = (torch.bfloat16, torch.float16)  # that codes are widened to by instructions of the device


class Operand(NamedTuple):
    """A stored matrix [N, K], a row for each output. form: plain, rows (8 bits, a scale for each output), int4, fp4
    (groups of inputs), blocks (of e4m3); group_size: inputs that share a scale, 0 without groups; unit: inputs packed
    together, 0: any depth of a step; meets_codes: activations are quantised, too; input_scale: theirs, if known."""

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
    input_scale: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        return self.values, self.row_scales, self.group_scales, self.zeros, self.values.stride(0)

    @property
    def is_widened(self) -> bool:
        """Whether codes pass through registers on their way to the tensor cores."""
        return self.form != "plain" and not self.meets_codes

    @property
    def problem(self) -> tuple[object, ...]:
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


def operand_of(weight: formats.MatrixWeight) -> Operand:
    match weight:
        case Tensor():
            return Operand("plain", 8 * weight.element_size(), (weight.shape[0], weight.shape[1]), weight)
        case formats.Int4Weight(codes, scales, zeros, group):
            return Operand("int4", 4, weight.shape, codes, None, scales, zeros, group, group)
        case formats.Fp4Weight(codes, scales, rows):
            return Operand("fp4", 4, weight.shape, codes, rows, scales, None, weight.group_size, formats.FP4_SPAN)
        case formats.BlockFp8Weight(values, scales):
            block = formats.FP8_BLOCK
            return Operand("blocks", 8, weight.shape, values, None, scales, None, block, block, True)
        case formats.Int8Weight(values, scales, meets_codes, _, input_scale):
            return Operand("rows", 8, weight.shape, values, scales, meets_codes=meets_codes, input_scale=input_scale)
        case formats.Fp8Weight(values, scales, meets_codes):
            return Operand("rows", 8, weight.shape, values, scales, meets_codes=meets_codes)
    raise AssertionError(f"no kernel reads {type(weight).__name__}")
