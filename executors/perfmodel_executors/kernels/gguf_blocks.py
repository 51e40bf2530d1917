"""llama.cpp's blocks (layouts of ggml-common.h) as numbers, and numbers as blocks; all fields of all blocks at once. A
weight is code * scale + offset, with a scale (and an offset) for each group of a block. Blocks of 32 have one group,
and their scale in fp16; those of 256 ("k") have 8 or 16 groups, whose scales are integers times one of the block.
Groups are rounded to nearest: without the searches of llama.cpp's own quantiser."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.weights.gguf import GGML_BLOCKS

_TINY = 1e-12  # in place of the scale of a block of zeros


class _Groups(NamedTuple):
    """codes [..., elements], scales and offsets [..., groups] in fp32; offsets None: 0"""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None


def unpack_blocks(blocks_NJ: Tensor, form: str) -> Tensor:
    """fp32 [N, K] of bytes [N, K / elements * size]; `form`: a key of BLOCK_SIZES."""
    elements, size = BLOCK_SIZES[form]
    blocks = blocks_NJ.view(len(blocks_NJ), -1, size)
    codes, scales, offsets = _CODECS[form][0](blocks)
    groups = scales.shape[-1]
    values = codes.reshape(*blocks.shape[:2], groups, elements // groups).to(torch.float32).mul_(scales[..., None])
    if offsets is not None:
        values.add_(offsets[..., None])
    return values.view(len(blocks_NJ), -1)


def pack_blocks(weight_NK: Tensor, form: str) -> Tensor:
    """Bytes, as `unpack_blocks` reads them. Raises PerfmodelError where blocks do not fill the rows."""
    elements, _ = BLOCK_SIZES[form]
    n, k = weight_NK.shape
    if k % elements:
        raise PerfmodelError(
            f"a weight with {k} inputs has no whole blocks of {elements}, as {form} has them; set "
            f"engine.quantization to q8_0, all of whose blocks have 32, or to w8a16, which has none."
        )
    return _CODECS[form][1](weight_NK.float().view(n, -1, elements)).flatten(1).contiguous()


def _half(field: Tensor) -> Tensor:
    return field.contiguous().view(torch.float16).float()


def _half_bytes(half: Tensor) -> Tensor:
    return half.to(torch.float16).contiguous().view(torch.uint8)


def spread_bits(packed: Tensor, bits: int, run: int) -> Tensor:
    """Codes of so many bits, of bytes in the last dimension: the lowest ones of each `run` bytes, then their next."""
    runs = packed.reshape(*packed.shape[:-1], -1, run).contiguous()
    parts = [runs >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).flatten(-2)


def packed_bits(codes: Tensor, bits: int, run: int) -> Tensor:
    """Bytes, as `spread_bits` reads them, of the lowest bits of codes."""
    runs = codes.reshape(*codes.shape[:-1], -1, 8 // bits, run) & (1 << bits) - 1
    result = runs[..., 0, :]
    for number in range(1, 8 // bits):
        result = result | runs[..., number, :] << number * bits
    return result.flatten(-2)


def _rounded(half: Tensor) -> Tensor:
    """A scale as fp16 has it, which codes are made for; never 0."""
    return half.to(torch.float16).float().clamp_min(_TINY)


def _codes(values: Tensor, most: int) -> Tensor:
    return values.round().clamp_(0, most).to(torch.uint8)


def _between(blocks: Tensor, groups: int, bits: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scale and step of minima of blocks, integer scales, integer minima up to `most`, codes): from 0 or less up."""
    grouped = blocks.reshape(*blocks.shape[:-1], groups, -1)
    least = -grouped.amin(dim=-1).clamp_max(0.0)
    wanted = (grouped.amax(dim=-1).clamp_min(0.0) + least) / (2**bits - 1)
    both = torch.stack((wanted.amax(dim=-1), least.amax(dim=-1)), dim=-1) / most
    scale, step = (part[..., None] for part in _rounded(both).unbind(-1))
    scales, minima = _codes(wanted / scale, most), _codes(least / step, most)
    divisors = (scales * scale).clamp_min(_TINY)[..., None]
    codes = _codes((grouped + (minima * step)[..., None]) / divisors, 2**bits - 1)
    return both, scales, minima, codes.flatten(-2)


def _about_zero(blocks: Tensor, bits: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """(scale of blocks, integer scales of sixteen groups up to `most`, codes about their middle)"""
    grouped, middle = blocks.reshape(*blocks.shape[:-1], 16, -1), 1 << bits - 1
    wanted = grouped.abs().amax(dim=-1) / (middle - 1)
    whole = wanted.amax(dim=-1, keepdim=True) / most
    scales = _codes(wanted / _rounded(whole), most)
    divisors = (scales * _rounded(whole)).clamp_min(_TINY)[..., None]
    return whole, scales, _codes(grouped / divisors + middle, 2 * middle - 1).flatten(-2)


def _read_32(b: Tensor, bits: int, has_least: bool) -> _Groups:
    """32 weights with one scale, about the middle code (q4_0, q5_0) or from a least value (q4_1, q5_1)."""
    scales, begin = _half(b[..., :2]), 4 if has_least else 2
    offsets = _half(b[..., 2:4]) if has_least else scales * -(1 << bits - 1)
    if bits == 4:
        return _Groups(spread_bits(b[..., begin:], 4, 16), scales, offsets)
    codes = spread_bits(b[..., begin + 4 :], 4, 16) | spread_bits(b[..., begin : begin + 4], 1, 1) << 4
    return _Groups(codes, scales, offsets)


def _write_32(blocks: Tensor, bits: int, has_least: bool) -> Tensor:
    """Without a least value, the largest magnitude goes on the lowest code."""
    most = 2**bits - 1
    if has_least:
        least = blocks.amin(dim=-1, keepdim=True).to(torch.float16).float()
        scale = (blocks.amax(dim=-1, keepdim=True) - least) / most
        codes, fields = _codes((blocks - least) / _rounded(scale), most), [_half_bytes(scale), _half_bytes(least)]
    else:
        middle = 1 << bits - 1
        largest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
        scale = (largest / -middle).to(torch.float16).float()
        codes, fields = _codes(blocks / torch.where(scale == 0, 1.0, scale) + middle, most), [_half_bytes(scale)]
    if bits == 5:
        fields.append(packed_bits(codes >> 4, 1, 1))
    return torch.cat((*fields, packed_bits(codes, 4, 16)), dim=-1)


def _write_q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    codes = (blocks / _rounded(scale)).round().clamp_(-127, 127).to(torch.int8)
    return torch.cat((_half_bytes(scale), codes.view(torch.uint8)), dim=-1)


def _read_q2_k(b: Tensor) -> _Groups:
    scales, both = b[..., :16], _half(b[..., 80:])
    return _Groups(spread_bits(b[..., 16:80], 2, 32), (scales & 15) * both[..., :1], (scales >> 4) * -both[..., 1:])


def _write_q2_k(blocks: Tensor) -> Tensor:
    both, scales, minima, codes = _between(blocks, 16, 2, 15)
    return torch.cat((scales | minima << 4, packed_bits(codes, 2, 32), _half_bytes(both)), dim=-1)


def _read_q3_k(b: Tensor) -> _Groups:
    """A code is 4 less where its high bit is not set."""
    scales = spread_bits(b[..., 96:104], 4, 8) | spread_bits(b[..., 104:108], 2, 4) << 4
    scales = scales.float().sub_(32) * _half(b[..., 108:])
    return _Groups(spread_bits(b[..., 32:96], 2, 32) | spread_bits(b[..., :32], 1, 32) << 2, scales, scales * -4)


def _write_q3_k(blocks: Tensor) -> Tensor:
    whole, scales, codes = _about_zero(blocks, 3, 31)
    scales = scales + 32
    scale_bytes = (packed_bits(scales, 4, 8), packed_bits(scales >> 4, 2, 4), _half_bytes(whole))
    return torch.cat((packed_bits(codes >> 2, 1, 32), packed_bits(codes, 2, 32), *scale_bytes), dim=-1)


def _read_minima_k(b: Tensor, bits: int) -> _Groups:
    """Eight scales and eight minima of six bits in twelve bytes; of the last four, the two highest bits lie apart."""
    first, second, low, both = b[..., 4:8], b[..., 8:12], b[..., 12:16], _half(b[..., :4])
    scales = torch.cat((first & 63, low & 15 | first >> 2 & 48), dim=-1)
    minima = torch.cat((second & 63, low >> 4 | second >> 2 & 48), dim=-1)
    codes = spread_bits(b[..., 16 if bits == 4 else 48 :], 4, 32)
    if bits == 5:
        codes = codes | spread_bits(b[..., 16:48], 1, 32) << 4
    return _Groups(codes, scales * both[..., :1], minima * -both[..., 1:])


def _write_minima_k(blocks: Tensor, bits: int) -> Tensor:
    both, scales, minima, codes = _between(blocks, 8, bits, 63)
    first, second = ((part[..., :4] | (part[..., 4:] >> 4) << 6) for part in (scales, minima))
    low = scales[..., 4:] & 15 | (minima[..., 4:] & 15) << 4
    high = [packed_bits(codes >> 4, 1, 32)] if bits == 5 else []
    return torch.cat((_half_bytes(both), first, second, low, *high, packed_bits(codes, 4, 32)), dim=-1)


def _read_q6_k(b: Tensor) -> _Groups:
    scales = b[..., 192:208].view(torch.int8) * _half(b[..., 208:])
    return _Groups(spread_bits(b[..., :128], 4, 64) | spread_bits(b[..., 128:192], 2, 32) << 4, scales, scales * -32)


def _write_q6_k(blocks: Tensor) -> Tensor:
    whole, scales, codes = _about_zero(blocks, 6, 127)
    return torch.cat((packed_bits(codes, 4, 64), packed_bits(codes >> 4, 2, 32), scales, _half_bytes(whole)), dim=-1)


_CODECS: Mapping[str, tuple[Callable[[Tensor], _Groups], Callable[[Tensor], Tensor]]] = {
    "q4_0": (partial(_read_32, bits=4, has_least=False), partial(_write_32, bits=4, has_least=False)),
    "q4_1": (partial(_read_32, bits=4, has_least=True), partial(_write_32, bits=4, has_least=True)),
    "q5_0": (partial(_read_32, bits=5, has_least=False), partial(_write_32, bits=5, has_least=False)),
    "q5_1": (partial(_read_32, bits=5, has_least=True), partial(_write_32, bits=5, has_least=True)),
    "q8_0": (lambda b: _Groups(b[..., 2:].view(torch.int8), _half(b[..., :2])), _write_q8_0),
    "q2_k": (_read_q2_k, _write_q2_k),
    "q3_k": (_read_q3_k, _write_q3_k),
    **{f"q{n}_k": (partial(_read_minima_k, bits=n), partial(_write_minima_k, bits=n)) for n in (4, 5)},
    "q6_k": (_read_q6_k, _write_q6_k),
}

# Format -> (weights, bytes) of a block.
BLOCK_SIZES: Mapping[str, list[int]] = {name: sizes for name, *sizes in GGML_BLOCKS.values() if name in _CODECS}
