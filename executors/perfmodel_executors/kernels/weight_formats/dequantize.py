"""What a stored weight means: the matrix that its container stands for.

Formats that the processor cannot multiply, emulated: the values in the activations' dtype, remembered.

Expanding on each call would take ten times as long as the product on a CPU. The memory is that of a dense weight.

The product that a quantised one is compared with: by the same weight in the activations' dtype.
"""

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.weight_formats.containers import (
    FP8_BLOCK,
    BlockFp8Weight,
    Fp4Weight,
    Fp8Weight,
    GgufWeight,
    Int4Int8Weight,
    Int4Weight,
    Int8Weight,
    LowRankWeight,
    MatrixWeight,
    RowsWeight,
    SignsWeight,
    Sparse24Weight,
    Weight,
)
from perfmodel_executors.kernels.weight_formats.gguf_reading import unpack_blocks
from perfmodel_executors.kernels.weight_formats.quantize import dequantize_fp4


def dequantize(weight: Weight) -> Tensor:
    """The weight as an fp32 matrix [N, K]."""
    if isinstance(weight, Tensor):
        return weight.float()
    if isinstance(weight, LowRankWeight):
        return dequantize(weight.outputs_NR) @ dequantize(weight.inputs_RK)
    if isinstance(weight, RowsWeight):
        return torch.cat([dequantize(part) for part in weight.parts])
    if isinstance(weight, GgufWeight):
        return unpack_blocks(weight.blocks_NJ, weight.form)
    if isinstance(weight, Int8Weight | Fp8Weight):
        return weight.values_NK.float() * weight.scales_N[:, None]
    if isinstance(weight, BlockFp8Weight):
        n, k = weight.shape
        scales_NK = weight.scales_RG.repeat_interleave(FP8_BLOCK, dim=0)[:n].repeat_interleave(FP8_BLOCK, dim=1)[:, :k]
        return weight.values_NK.float() * scales_NK
    if isinstance(weight, Int4Int8Weight):
        return int8_values(weight).float() * weight.row_scales_N[:, None]
    if isinstance(weight, Fp4Weight):
        return dequantize_fp4(weight)
    if isinstance(weight, Int4Weight):
        n, k = weight.shape
        zeros_GN: Tensor | float = 8.0 if weight.zeros_GN is None else weight.zeros_GN.float().T[..., None]
        codes_NGI = int4_codes(weight).float().view(n, -1, weight.group_size)
        return ((codes_NGI - zeros_GN) * weight.scales_GN.float().T[..., None]).view(n, k)
    if isinstance(weight, SignsWeight):
        codes_NK = torch.cat(list(sign_fields(weight)), dim=1).float()
        return weight.scale * (codes_NK - 1 if weight.bits == 2 else 2 * codes_NK - 1)
    return _dense(weight)


def sign_fields(weight: SignsWeight) -> Iterator[Tensor]:
    """The codes of each part of the inputs in turn, int8 [N, K / n]."""
    mask = 2**weight.bits - 1
    for place in range(weight.per_byte):
        yield (weight.bytes_NJ >> place * weight.bits & mask).view(torch.int8)


def int8_values(weight: Int4Int8Weight) -> Tensor:
    """The INT8 numbers that 4-bit codes stand for, [N, K]."""
    shape = (weight.shape[0], -1, weight.group_size)
    zeros_NG, scales_NG = (
        each.T.contiguous().view(torch.int8)[..., None] for each in (weight.zeros_GN, weight.scales_GN)
    )
    return int4_codes(weight).view(torch.int8).view(shape).sub_(zeros_NG).mul_(scales_NG).view(weight.shape)


def int4_codes(weight: Int4Weight | Int4Int8Weight) -> Tensor:
    """The codes 0..15, uint8 [N, K]."""
    n, k = weight.shape
    bytes_NGJ = weight.packed_NJ.view(n, -1, weight.group_size // 2)
    return torch.cat((bytes_NGJ & 15, bytes_NGJ >> 4), dim=2).view(n, k)


def _dense(weight: Sparse24Weight) -> Tensor:
    n, k = weight.shape
    codes_NF = torch.stack((weight.indices_NP & 15, weight.indices_NP >> 4), dim=2).view(n, k // 4)
    positions_NF2 = torch.stack((codes_NF & 3, codes_NF >> 2), dim=2).long()
    values = weight.values_NJ.float().view(n, k // 4, 2)
    return values.new_zeros(n, k // 4, 4).scatter_(2, positions_NF2, values).view(n, k)


_Emulated = Fp8Weight | BlockFp8Weight | Fp4Weight | Sparse24Weight

_expanded: WeakKeyDictionary[_Emulated, dict[torch.dtype, Tensor]] = WeakKeyDictionary()


def expanded(weight: _Emulated, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`: e4m3 values without the scales of their rows, else what the weight stands for."""
    by_dtype = _expanded.setdefault(weight, {})
    if dtype not in by_dtype:
        values = weight.values_NK if isinstance(weight, Fp8Weight) else dequantize(weight)
        by_dtype[dtype] = values.to(dtype)
    return by_dtype[dtype]


_for_library: WeakKeyDictionary[MatrixWeight, Tensor] = WeakKeyDictionary()


def dense_product(x_MK: Tensor, weight: MatrixWeight, bias_N: Tensor | None = None) -> Tensor:
    """The library's product."""
    return functional.linear(x_MK, dense_weight(weight, x_MK.dtype), bias_N)


def dense_weight(weight: MatrixWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`, expanded once, at its first call: the expansion is not what is timed."""
    if weight not in _for_library:
        _for_library[weight] = dequantize(weight).to(dtype)
    return _for_library[weight]
