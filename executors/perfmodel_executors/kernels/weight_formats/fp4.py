"""E2M1 numbers in groups with a scale: MXFP4 and NVFP4, from matrices and from files, and back.

E2M1 has a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. A scale is a power of two in E8M0
for 32 inputs (OCP Microscaling Formats 1.0), or in E4M3 for 16, with another one in fp32 above (NVIDIA, NVFP4).
"""

__all__ = ["SPAN", "dequantize_fp4", "fp4_from_pairs", "quantize_mxfp4", "quantize_nvfp4"]

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.weight_formats.containers import Fp4Weight

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
