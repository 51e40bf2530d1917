"""A weight as kernels multiply by it: its tensors in the order of `tile_sums`, and what is compiled in."""

__all__ = ["Operand", "operand_of"]

from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfmodel_executors.kernels.weight_formats.containers import Fp8Weight, Int4Weight, Int8Weight

_WIDE = (torch.bfloat16, torch.float16)  # that codes are widened to by their bits


class Operand(NamedTuple):
    """A stored matrix [N, K].

    form:         plain, rows (8 bits, a scale for each output), int4 (groups of inputs)
    bits:         of a stored value
    shape:        N, K
    values:       as stored, a row for each output
    row_scales, group_scales, zeros: as the containers have them
    group_size:   inputs that share a scale; 0 without groups
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
    meets_codes: bool = False

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """Of `tile_sums`, from the values to their stride."""
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
        by_bits = self.bits == 4 and x.device.type != "cpu" and x.dtype in _WIDE
        even = self.shape[1] % block_k == 0
        return {"FORMAT": self.form, "GROUP_SIZE": self.group_size, "EVEN_K": even, "BY_BITS": by_bits}

    def depth(self, wanted: int) -> int:
        """The largest depth of a step, up to `wanted`, that is whole groups and leaves none over."""
        if self.form != "int4":
            return wanted
        groups = self.shape[1] // self.group_size
        most = max(1, wanted // self.group_size)
        return self.group_size * next(count for count in range(most, 0, -1) if groups % count == 0)


def operand_of(weight: Tensor | Int8Weight | Fp8Weight | Int4Weight) -> Operand:
    """What kernels are given of a weight."""
    if isinstance(weight, Tensor):
        return Operand("plain", 8 * weight.element_size(), (weight.shape[0], weight.shape[1]), weight)
    if isinstance(weight, Int4Weight):
        scales = weight.scales_GN, weight.zeros_GN
        return Operand("int4", 4, weight.shape, weight.packed_NJ, None, *scales, weight.group_size)
    codes = weight.quantizes_input
    return Operand("rows", 8, weight.shape, weight.values_NK, weight.scales_N, meets_codes=codes)
