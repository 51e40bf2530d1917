"""From a matrix to its weight formats, by rounding to nearest; on any device.

Symmetric scales put the largest magnitude on the largest code, so that |w - dequantised| <= scale / 2 everywhere (for
e4m3, 2^-4 of the value, or half the smallest step). Scales are rounded to their stored dtype first, codes follow.

E2M1 numbers in groups with a scale: MXFP4 and NVFP4, from matrices and from files, and back.

E2M1 has a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. A scale is a power of two in E8M0
for 32 inputs (OCP Microscaling Formats 1.0), or in E4M3 for 16, with another one in fp32 above (NVIDIA, NVFP4).
"""

from math import gcd

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.weight_formats.containers import (
    FP8_BLOCK,
    BlockFp8Weight,
    Fp4Weight,
    Fp8Weight,
    Int4Int8Weight,
    Int4Weight,
    Int8Weight,
    SignsWeight,
    Sparse24Weight,
)

FP8_MAX = 448.0  # largest finite e4m3
INT8_MAX = 127.0
OUTLIER_THRESHOLD = 6.0  # of LLM.int8 (Dettmers et al. 2022), and bitsandbytes' default
_INT4_SYMMETRIC_MAX = 7.0
_PROTECTED_MAX = 119.0  # so that half a step of a group, 8 at most, leaves an INT8 number (QServe, section 4.1)
_ROW_GROUP = 128  # at most, where all inputs of an output share a scale
_TINY = 1e-12  # in place of the scale of a row of zeros


def quantize_int8(
    weight_NK: Tensor, quantizes_input: bool = False, outlier_threshold: float | None = None
) -> Int8Weight:
    """One scale for each output, codes -127..127."""
    wide = weight_NK.float()
    scales_N = (wide.abs().amax(dim=1) / INT8_MAX).clamp_min(_TINY)
    values_NK = (wide / scales_N[:, None]).round_().to(torch.int8)
    return Int8Weight(values_NK, scales_N, quantizes_input, outlier_threshold)


def quantize_fp8(weight_NK: Tensor, per_tensor: bool = False, quantizes_input: bool = True) -> Fp8Weight:
    """A scale for each output, or one for all."""
    wide = weight_NK.float()
    scales_N = wide.abs().amax(dim=1)
    if per_tensor:
        scales_N = scales_N.amax().expand_as(scales_N)
    scales_N = (scales_N / FP8_MAX).clamp_min(_TINY).contiguous()
    values_NK = (wide / scales_N[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Fp8Weight(values_NK, scales_N, quantizes_input)


def quantize_fp8_block(weight_NK: Tensor) -> BlockFp8Weight:
    """A scale for each block of 128 x 128, whose largest magnitude goes on 448."""
    n, k = weight_NK.shape
    padded = functional.pad(weight_NK.float(), (0, -k % FP8_BLOCK, 0, -n % FP8_BLOCK))
    blocks = padded.view(len(padded) // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scales_RG = (blocks.abs().amax(dim=(1, 3)) / FP8_MAX).clamp_min(_TINY)
    values = (blocks / scales_RG[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return BlockFp8Weight(values.view(padded.shape)[:n, :k].contiguous(), scales_RG)


def quantize_int4(weight_NK: Tensor, group_size: int = 128, has_zeros: bool = False) -> Int4Weight:
    """Groups of `group_size` inputs; symmetric (codes 1..15 about 8), or with zero points (codes 0..15).

    With a group size of 0 all inputs of an output share a scale, stored once for each group that the kernels read.

    Raises PerfmodelError where the groups do not fill the rows.
    """
    n, k = weight_NK.shape
    shares_row, group_size = not group_size, group_size or gcd(k, _ROW_GROUP)
    _check_groups(k, group_size)
    grouped_NGI = weight_NK.float().view(n, k // group_size, group_size)
    shape = (n, k // group_size)
    spans_NSI = grouped_NGI.view(n, 1, k) if shares_row else grouped_NGI
    if has_zeros:
        low = spans_NSI.amin(dim=2).clamp_max(0.0).expand(shape)
        scales_NG = (spans_NSI.amax(dim=2).clamp_min(0.0).expand(shape) - low) / 15.0
    else:
        scales_NG = spans_NSI.abs().amax(dim=2).expand(shape) / _INT4_SYMMETRIC_MAX
    scales_NG = scales_NG.clamp_min(torch.finfo(weight_NK.dtype).tiny).to(weight_NK.dtype)
    wide_scales = scales_NG.float()
    zeros_NG = (-low / wide_scales).round_().clamp_(0, 15) if has_zeros else torch.full_like(wide_scales, 8.0)
    codes = (grouped_NGI / wide_scales[..., None]).round_() + zeros_NG[..., None]
    codes_NGI = codes.clamp_(0 if has_zeros else 1, 15).to(torch.uint8)
    zeros_GN = zeros_NG.to(torch.uint8).T.contiguous() if has_zeros else None
    return Int4Weight(_in_pairs(codes_NGI), scales_NG.T.contiguous(), zeros_GN, group_size)


def quantize_int4_int8(weight_NK: Tensor, group_size: int = 128) -> Int4Int8Weight:
    """Each output's weights as integers up to 119 first, then each group of those as 0..15 about a zero point, with a
    step that is an integer, too.

    Raises PerfmodelError where the groups do not fill the rows.
    """
    n, k = weight_NK.shape
    _check_groups(k, group_size)
    wide = weight_NK.float()
    rows_N = (wide.abs().amax(dim=1) / _PROTECTED_MAX).clamp_min(_TINY)
    whole_NGI = (wide / rows_N[:, None]).round_().view(n, k // group_size, group_size)
    low_NG = whole_NGI.amin(dim=2).clamp_max(0.0)
    steps_NG = ((whole_NGI.amax(dim=2).clamp_min(0.0) - low_NG) / 15.0).ceil_().clamp_min(1.0)
    zeros_NG = (-low_NG / steps_NG).round_()
    codes_NGI = ((whole_NGI / steps_NG[..., None]).round_() + zeros_NG[..., None]).clamp_(0, 15).to(torch.uint8)
    scales_GN, zeros_GN = (each.to(torch.uint8).T.contiguous() for each in (steps_NG, zeros_NG))
    return Int4Int8Weight(_in_pairs(codes_NGI), scales_GN, zeros_GN, rows_N, group_size)


def _check_groups(inputs: int, group_size: int) -> None:
    if group_size % 2 or inputs % group_size:
        raise PerfmodelError(
            f"a weight with {inputs} inputs has no whole groups of {group_size}; choose a group size that divides "
            f"{inputs}, or a format without groups (engine.quantization: w8a16)."
        )


def _in_pairs(codes_NGI: Tensor) -> Tensor:
    """The bytes [N, K / 2] of an Int4Weight."""
    low, high = codes_NGI.chunk(2, dim=2)
    return (low | (high << 4)).flatten(1)


def quantize_signs(weight_NK: Tensor, bits: int = 2) -> SignsWeight:
    """Ternary (2 bits): w over the mean magnitude, rounded to -1, 0 or 1. Binary (1 bit): the sign of w less the mean.

    Raises PerfmodelError where rows do not fill bytes.
    Source: Ma et al. 2024 (BitNet b1.58), eq. 1 to 3; Wang et al. 2023 (BitNet), eq. 1 to 3.
    """
    n, k = weight_NK.shape
    per_byte = 8 // bits
    if k % per_byte:
        raise PerfmodelError(f"a weight with {k} inputs cannot be packed {per_byte} to a byte; use w8a8_int8.")
    wide = weight_NK.float()
    scale = wide.abs().mean().clamp_min(_TINY)
    codes_NK = (wide / scale).round_().clamp_(-1, 1) + 1 if bits == 2 else wide > wide.mean()
    fields = codes_NK.to(torch.uint8).view(n, per_byte, k // per_byte)
    bytes_NJ = fields[:, 0]
    for place in range(1, per_byte):
        bytes_NJ = bytes_NJ | fields[:, place] << place * bits
    return SignsWeight(bytes_NJ.contiguous(), scale, bits)


def sparsify_24(weight_NK: Tensor) -> Sparse24Weight:
    """The two of each four inputs with the largest magnitudes, the first of equal ones.

    Raises PerfmodelError where K is no multiple of 8.
    """
    n, k = weight_NK.shape
    if k % 8:
        raise PerfmodelError(f"2:4 sparsity packs inputs in eights; a weight with {k} inputs cannot be stored so.")
    fours_NF4 = weight_NK.view(n, k // 4, 4)
    order = fours_NF4.abs().argsort(dim=2, descending=True, stable=True)
    kept_NF2 = order[..., :2].sort(dim=2).values
    values_NJ = fours_NF4.gather(2, kept_NF2).reshape(n, k // 2)
    codes_NF = (kept_NF2[..., 0] | (kept_NF2[..., 1] << 2)).to(torch.uint8)
    return Sparse24Weight(values_NJ, codes_NF[:, 0::2] | (codes_NF[:, 1::2] << 4))


SPAN = 64  # inputs that a run of 32 bytes has
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, table 5
_LARGEST_EXPONENT = 2  # of a magnitude
_E8M0_BIAS = 127
_E4M3_MAX = 448.0
_MXFP4_GROUP, _NVFP4_GROUP = 32, 16


def quantize_mxfp4(weight_NK: Tensor) -> Fp4Weight:
    """The scale of a group is the power of two that leaves its largest magnitude below 8, where codes saturate at 6
    (OCP Microscaling Formats 1.0, 6.3).

    Raises PerfmodelError where K is no multiple of 64.
    """
    groups_NGI = _groups(weight_NK, _MXFP4_GROUP)
    largest_NG = groups_NGI.abs().amax(dim=2).clamp_min(torch.finfo(torch.float32).tiny)
    exponents_NG = (torch.frexp(largest_NG).exponent - 1 - _LARGEST_EXPONENT).clamp(-_E8M0_BIAS + 1, _E8M0_BIAS)
    codes_NK = _codes(torch.ldexp(groups_NGI, -exponents_NG[..., None])).view(weight_NK.shape)
    return Fp4Weight(_packed(codes_NK), (exponents_NG + _E8M0_BIAS).to(torch.uint8).T.contiguous())


def quantize_nvfp4(weight_NK: Tensor) -> Fp4Weight:
    """The largest magnitude of a group on 6, the largest scale of an output on 448.

    Raises PerfmodelError where K is no multiple of 64.
    """
    groups_NGI = _groups(weight_NK, _NVFP4_GROUP)
    wanted_NG = groups_NGI.abs().amax(dim=2) / _MAGNITUDES[-1]
    rows_N = (wanted_NG.amax(dim=1) / _E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales_NG = (wanted_NG / rows_N[:, None]).clamp(2.0**-9, _E4M3_MAX).to(torch.float8_e4m3fn)
    codes_NK = _codes(groups_NGI / (scales_NG.float() * rows_N[:, None])[..., None]).view(weight_NK.shape)
    return Fp4Weight(_packed(codes_NK), scales_NG.view(torch.uint8).T.contiguous(), rows_N)


def fp4_from_pairs(blocks: Tensor, scales: Tensor) -> Fp4Weight:
    """MXFP4 as files have it: [N, G, 16] bytes of two neighbours each (the first in the low bits), [N, G] exponents.

    Raises PerfmodelError where the groups of 32 are not even in number.
    """
    codes_NK = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    _check(codes_NK.shape[1])
    return Fp4Weight(_packed(codes_NK), scales.T.contiguous())


def dequantize_fp4(weight: Fp4Weight) -> Tensor:
    """The matrix in fp32."""
    (n, k), bytes_NSJ = weight.shape, weight.packed_NJ.view(len(weight.packed_NJ), -1, SPAN // 2)
    codes_NK = torch.cat((bytes_NSJ & 15, bytes_NSJ >> 4), dim=2).view(n, k)
    table = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), device=codes_NK.device)
    groups_NGI = table[codes_NK.int()].view(n, -1, weight.group_size)
    if weight.group_size == _MXFP4_GROUP:
        groups_NGI = torch.ldexp(groups_NGI, (weight.scales_GN.int().T - _E8M0_BIAS)[..., None])
    else:
        groups_NGI = groups_NGI * weight.scales_GN.T.contiguous().view(torch.float8_e4m3fn).float()[..., None]
    rows = 1.0 if weight.row_scales_N is None else weight.row_scales_N[:, None]
    return groups_NGI.view(n, k) * rows


def _groups(weight_NK: Tensor, group_size: int) -> Tensor:
    n, k = weight_NK.shape
    _check(k)
    return weight_NK.float().view(n, k // group_size, group_size)


def _check(inputs: int) -> None:
    if inputs % SPAN:
        raise PerfmodelError(
            f"weights in 4-bit floats are packed {SPAN} inputs at a time; a weight with {inputs} inputs cannot be "
            f"stored so. Choose a format without groups (engine.quantization: w8a16)."
        )


def _codes(values: Tensor) -> Tensor:
    """The nearest E2M1 codes, of two equally near ones the even one."""
    magnitudes = torch.tensor(_MAGNITUDES, device=values.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = torch.bucketize(values.abs(), middles)
    above = torch.bucketize(values.abs(), middles, right=True)
    return torch.where(below % 2 == 0, below, above).to(torch.uint8) | (values < 0).to(torch.uint8) << 3


def _packed(codes_NK: Tensor) -> Tensor:
    n, k = codes_NK.shape
    halves_NSHJ = codes_NK.view(n, k // SPAN, 2, SPAN // 2)
    return (halves_NSHJ[:, :, 0] | (halves_NSHJ[:, :, 1] << 4)).reshape(n, k // 2)
