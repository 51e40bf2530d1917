"""From a matrix to llama.cpp's blocks, each group rounded to nearest: without the searches of its own quantiser.

The other way round than `gguf_reading`: codes and scales of all groups at once, then their bytes.
"""

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.weight_formats.containers import GgufWeight
from perfmodel_executors.kernels.weight_formats.gguf_reading import BLOCK_SIZES, HIGH_SHIFTS

_TINY = 1e-12  # in place of the scale of a block of zeros


def quantize_gguf(weight_NK: Tensor, form: str) -> GgufWeight:
    """`weight_NK` in blocks of `form`, a key of BLOCK_SIZES.

    Raises PerfmodelError where blocks do not fill the rows.
    """
    elements, _ = BLOCK_SIZES[form]
    n, k = weight_NK.shape
    if k % elements:
        raise PerfmodelError(
            f"a weight with {k} inputs has no whole blocks of {elements}, as {form} has them; set "
            f"engine.quantization to q8_0, all of whose blocks have 32, or to w8a16, which has none."
        )
    blocks = _WRITERS[form](weight_NK.float().view(n, -1, elements))
    return GgufWeight(blocks.flatten(1).contiguous(), form)


def _as_bytes(half: Tensor) -> Tensor:
    return half.to(torch.float16).contiguous().view(torch.uint8)


def _rounded(half: Tensor) -> Tensor:
    """A scale as fp16 has it, which codes are made for; never 0."""
    return half.to(torch.float16).float().clamp_min(_TINY)


def _codes(values: Tensor, most: int) -> Tensor:
    return values.round().clamp_(0, most).to(torch.uint8)


def _nibbles(codes: Tensor, run: int) -> Tensor:
    runs = codes.reshape(*codes.shape[:-1], -1, 2, run)
    return (runs[..., 0, :] & 15 | (runs[..., 1, :] & 15) << 4).flatten(-2)


def _pairs(codes: Tensor) -> Tensor:
    runs = codes.reshape(*codes.shape[:-1], -1, 4, 32)
    return sum(
        ((runs[..., i, :] & 3) << s for i, s in enumerate(HIGH_SHIFTS)), torch.zeros_like(runs[..., 0, :])
    ).flatten(-2)


def _bits(codes: Tensor, dim: int) -> Tensor:
    """Eight of `codes`, 0 or 1, along `dim` to a byte, the first in its lowest bit."""
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    shape = [1] * codes.dim()
    shape[dim] = 8
    return (codes << places.view(shape)).sum(dim=dim, dtype=torch.uint8)


def _in_turn(high: Tensor) -> Tensor:
    return _bits(high.reshape(*high.shape[:-1], -1, 8), -1)


def _across(high: Tensor) -> Tensor:
    return _bits(high.reshape(*high.shape[:-1], 8, -1), -2)


def _symmetric(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(scale, codes about the middle): the largest magnitude goes on the lowest code."""
    middle = 1 << bits - 1
    largest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
    scale = (largest / -middle).to(torch.float16).float()
    divisor = torch.where(scale == 0, 1.0, scale)
    return scale, _codes(blocks / divisor + middle, 2 * middle - 1)


def _from_least(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, least, codes): from the least to the largest."""
    least = blocks.amin(dim=-1, keepdim=True).to(torch.float16).float()
    scale = (blocks.amax(dim=-1, keepdim=True) - least) / (2**bits - 1)
    return scale, least, _codes((blocks - least) / _rounded(scale), 2**bits - 1)


def _q4_0(blocks: Tensor) -> Tensor:
    scale, codes = _symmetric(blocks, 4)
    return torch.cat((_as_bytes(scale), _nibbles(codes, 16)), dim=-1)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, least, codes = _from_least(blocks, 4)
    return torch.cat((_as_bytes(scale), _as_bytes(least), _nibbles(codes, 16)), dim=-1)


def _q5_0(blocks: Tensor) -> Tensor:
    scale, codes = _symmetric(blocks, 5)
    return torch.cat((_as_bytes(scale), _in_turn(codes >> 4), _nibbles(codes, 16)), dim=-1)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, least, codes = _from_least(blocks, 5)
    return torch.cat((_as_bytes(scale), _as_bytes(least), _in_turn(codes >> 4), _nibbles(codes, 16)), dim=-1)


def _q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    codes = (blocks / _rounded(scale)).round().clamp_(-127, 127).to(torch.int8)
    return torch.cat((_as_bytes(scale), codes.view(torch.uint8)), dim=-1)


def _between(blocks: Tensor, groups: int, bits: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scale and step of minima of blocks, integer scales, integer minima, codes): from 0 or less up to the largest,
    with scales and minima up to `most`."""
    grouped = blocks.reshape(*blocks.shape[:-1], groups, -1)
    least = -grouped.amin(dim=-1).clamp_max(0.0)
    wanted = (grouped.amax(dim=-1).clamp_min(0.0) + least) / (2**bits - 1)
    both = torch.stack((wanted.amax(dim=-1), least.amax(dim=-1)), dim=-1) / most
    scale, step = (each[..., None] for each in _rounded(both).unbind(-1))
    scales, minima = _codes(wanted / scale, most), _codes(least / step, most)
    divisors = (scales * scale).clamp_min(_TINY)[..., None]
    codes = _codes((grouped + (minima * step)[..., None]) / divisors, 2**bits - 1)
    return both, scales, minima, codes.flatten(-2)


def _about_zero(blocks: Tensor, groups: int, bits: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """(scale of blocks, integer scales up to `most`, codes about their middle)"""
    grouped, middle = blocks.reshape(*blocks.shape[:-1], groups, -1), 1 << bits - 1
    wanted = grouped.abs().amax(dim=-1) / (middle - 1)
    whole = wanted.amax(dim=-1, keepdim=True) / most
    scales = _codes(wanted / _rounded(whole), most)
    divisors = (scales * _rounded(whole)).clamp_min(_TINY)[..., None]
    return whole, scales, _codes(grouped / divisors + middle, 2 * middle - 1).flatten(-2)


def _q2_k(blocks: Tensor) -> Tensor:
    both, scales, minima, codes = _between(blocks, 16, 2, 15)
    return torch.cat((scales | minima << 4, _pairs(codes), _as_bytes(both)), dim=-1)


def _q3_k(blocks: Tensor) -> Tensor:
    whole, scales, codes = _about_zero(blocks, 16, 3, 31)
    stored = scales + 32
    high = (stored >> 4).reshape(*stored.shape[:-1], 4, 4)
    shifts = torch.tensor(HIGH_SHIFTS, dtype=torch.uint8, device=blocks.device)
    twos = (high << shifts[:, None]).sum(dim=-2, dtype=torch.uint8)
    return torch.cat((_across(codes >> 2), _pairs(codes), _nibbles(stored, 8), twos, _as_bytes(whole)), dim=-1)


def _twelve_bytes(scales: Tensor, minima: Tensor) -> Tensor:
    first, second = ((each[..., :4] | (each[..., 4:] >> 4) << 6) for each in (scales, minima))
    return torch.cat((first, second, scales[..., 4:] & 15 | (minima[..., 4:] & 15) << 4), dim=-1)


def _q4_k(blocks: Tensor) -> Tensor:
    both, scales, minima, codes = _between(blocks, 8, 4, 63)
    return torch.cat((_as_bytes(both), _twelve_bytes(scales, minima), _nibbles(codes, 32)), dim=-1)


def _q5_k(blocks: Tensor) -> Tensor:
    both, scales, minima, codes = _between(blocks, 8, 5, 63)
    fields = (_as_bytes(both), _twelve_bytes(scales, minima), _across(codes >> 4), _nibbles(codes, 32))
    return torch.cat(fields, dim=-1)


def _q6_k(blocks: Tensor) -> Tensor:
    whole, scales, codes = _about_zero(blocks, 16, 6, 127)
    return torch.cat((_nibbles(codes, 64), _pairs(codes >> 4), scales, _as_bytes(whole)), dim=-1)


_WRITERS: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
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
