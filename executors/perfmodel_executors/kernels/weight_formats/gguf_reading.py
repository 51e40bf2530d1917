"""Blocks of llama.cpp's formats as numbers: the layouts of ggml-common.h, all fields of all blocks at once.

A weight is code * scale + offset, with a scale (and an offset) for each group of a block. Blocks of 32 have one group,
and their scale in fp16; those of 256 ("k") have 8 or 16 groups, whose scales are integers times one of the block.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.models.weights.gguf import GGML_BLOCKS

HIGH_SHIFTS = (0, 2, 4, 6)  # of two-bit fields in a byte


class _Groups(NamedTuple):
    """codes [..., elements], scales and offsets [..., groups] in fp32; offsets None: 0"""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None


def unpack_blocks(blocks_NJ: Tensor, form: str) -> Tensor:
    """fp32 [N, K] of bytes [N, K / elements * size]; `form`: a key of BLOCK_SIZES."""
    elements, size = BLOCK_SIZES[form]
    blocks = blocks_NJ.view(len(blocks_NJ), -1, size)
    found = _READERS[form](blocks)
    groups = found.scales.shape[-1]
    values = found.codes.reshape(*blocks.shape[:2], groups, elements // groups).to(torch.float32)
    values.mul_(found.scales[..., None])
    if found.offsets is not None:
        values.add_(found.offsets[..., None])
    return values.view(len(blocks_NJ), -1)


def _half(field: Tensor) -> Tensor:
    return field.contiguous().view(torch.float16).float()


def _nibbles(field: Tensor, run: int) -> Tensor:
    """Codes of four bits: the low ones of each `run` bytes, then their high ones."""
    runs = field.reshape(*field.shape[:-1], -1, run).contiguous()
    return torch.cat((runs & 15, runs >> 4), dim=-1).flatten(-2)


def _pairs(field: Tensor) -> Tensor:
    """Codes of two bits: the lowest ones of each 32 bytes, then their next ones."""
    runs = field.reshape(*field.shape[:-1], -1, 32).contiguous()
    return torch.cat([runs >> shift & 3 for shift in HIGH_SHIFTS], dim=-1).flatten(-2)


def _in_turn(field: Tensor) -> Tensor:
    """The 32 bits of four bytes, the lowest one first."""
    places = torch.arange(32, dtype=torch.int32, device=field.device)
    return (field.contiguous().view(torch.int32) >> places & 1).to(torch.uint8)


def _across(field: Tensor) -> Tensor:
    """The lowest bits of all bytes, then their next ones."""
    return (field[..., None, :] >> torch.arange(8, dtype=torch.uint8, device=field.device)[:, None] & 1).flatten(-2)


def _centred(codes: Tensor, scales: Tensor, middle: int) -> _Groups:
    return _Groups(codes, scales, scales * -middle)


def _q4_0(b: Tensor) -> _Groups:
    return _centred(_nibbles(b[..., 2:], 16), _half(b[..., :2]), 8)


def _q4_1(b: Tensor) -> _Groups:
    return _Groups(_nibbles(b[..., 4:], 16), _half(b[..., :2]), _half(b[..., 2:4]))


def _q5_0(b: Tensor) -> _Groups:
    return _centred(_nibbles(b[..., 6:], 16) | _in_turn(b[..., 2:6]) << 4, _half(b[..., :2]), 16)


def _q5_1(b: Tensor) -> _Groups:
    codes = _nibbles(b[..., 8:], 16) | _in_turn(b[..., 4:8]) << 4
    return _Groups(codes, _half(b[..., :2]), _half(b[..., 2:4]))


def _q8_0(b: Tensor) -> _Groups:
    return _Groups(b[..., 2:].view(torch.int8), _half(b[..., :2]))


def _q2_k(b: Tensor) -> _Groups:
    scales, both = b[..., :16], _half(b[..., 80:])
    return _Groups(_pairs(b[..., 16:80]), (scales & 15) * both[..., :1], (scales >> 4) * -both[..., 1:])


def _q3_k(b: Tensor) -> _Groups:
    """A code is 4 less where its high bit is not set."""
    low, high = _nibbles(b[..., 96:104], 8), torch.cat([b[..., 104:108] >> s & 3 for s in HIGH_SHIFTS], dim=-1)
    scales = (low | high << 4).float().sub_(32) * _half(b[..., 108:])
    return _centred(_pairs(b[..., 32:96]) | _across(b[..., :32]) << 2, scales, 4)


def _scales_of_six(field: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits in twelve bytes; of the last four, the two highest bits lie apart."""
    first, second, low = field[..., :4], field[..., 4:8], field[..., 8:]
    scales = torch.cat((first & 63, low & 15 | first >> 2 & 48), dim=-1)
    return scales, torch.cat((second & 63, low >> 4 | second >> 2 & 48), dim=-1)


def _with_minima(b: Tensor, codes: Tensor) -> _Groups:
    (scales, minima), both = _scales_of_six(b[..., 4:16]), _half(b[..., :4])
    return _Groups(codes, scales * both[..., :1], minima * -both[..., 1:])


def _q4_k(b: Tensor) -> _Groups:
    return _with_minima(b, _nibbles(b[..., 16:], 32))


def _q5_k(b: Tensor) -> _Groups:
    return _with_minima(b, _nibbles(b[..., 48:], 32) | _across(b[..., 16:48]) << 4)


def _q6_k(b: Tensor) -> _Groups:
    scales = b[..., 192:208].view(torch.int8) * _half(b[..., 208:])
    return _centred(_nibbles(b[..., :128], 64) | _pairs(b[..., 128:192]) << 4, scales, 32)


_READERS: MappingProxyType[str, Callable[[Tensor], _Groups]] = MappingProxyType(
    {
        "q4_0": _q4_0,
        "q4_1": _q4_1,
        "q5_0": _q5_0,
        "q5_1": _q5_1,
        "q8_0": _q8_0,
        "q2_k": _q2_k,
        "q3_k": _q3_k,
        "q4_k": _q4_k,
        "q5_k": _q5_k,
        "q6_k": _q6_k,
    }
)

# Format -> (weights, bytes) of a block.
BLOCK_SIZES = MappingProxyType({name: sizes for name, *sizes in GGML_BLOCKS.values() if name in _READERS})
