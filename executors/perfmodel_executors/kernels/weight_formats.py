"""What a weight [N, K] (N outputs, K inputs) is stored as in fewer bits, how a matrix becomes it, and what it means.
Matrices are rounded to nearest, scales to their stored dtype first. Symmetric scales put the largest magnitude on the
largest code: |w - dequantised| <= scale / 2 (for e4m3, 2^-4 of the value, or half the smallest step)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.gguf_blocks import BLOCK_SIZES, pack_blocks, packed_bits, spread_bits, unpack_blocks

FP8_BLOCK = 128  # rows and columns that share a scale of a BlockFp8Weight
FP8_MAX = 448.0  # largest finite e4m3
INT8_MAX = 127.0
OUTLIER_THRESHOLD = 6.0  # of LLM.int8 (Dettmers et al. 2022), and bitsandbytes' default
FP4_SPAN = 64  # inputs that a run of 32 bytes of E2M1 codes has
_INT4_SYMMETRIC_MAX = 7.0
_PROTECTED_MAX = 119.0  # so that half a step of a group, 8 at most, leaves an INT8 number (QServe, section 4.1)
_ROW_GROUP = 128  # at most, where all inputs of an output share a scale
_TINY = 1e-12  # in place of the scale of a row of zeros
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, table 5
_E2M1_LARGEST_EXPONENT = 2
_E8M0_BIAS = 127
_MXFP4_GROUP, _NVFP4_GROUP = 32, 16


class _Stored:
    """A container: its first tensor has the codes, a row for each output; names end with the tensors' shapes.
    Containers are compared by identity, so that a library's own packing of one can be remembered beside it."""

    per_column: ClassVar[int] = 1  # inputs in a column of the codes
    quantizes_input: bool = False  # whether activations are quantised for it

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def shape(self) -> tuple[int, int]:
        codes = next(iter(self.tensors.values()))
        return codes.shape[0], codes.shape[1] * self.per_column


@dataclass(frozen=True, eq=False)
class _ScaledRows(_Stored):
    """w = values * scales[:, None]: 8-bit values with an fp32 scale for each output."""

    values_NK: Tensor
    scales_N: Tensor

    def dense(self) -> Tensor:
        return self.values_NK.float() * self.scales_N[:, None]


@dataclass(frozen=True, eq=False)
class Int8Weight(_ScaledRows):
    """Values in INT8. quantizes_input: activations are quantised to INT8 too, with a scale for each token;
    outlier_threshold: columns of activations with a larger magnitude are multiplied apart, unquantised (LLM.int8);
    input_scale: fp32, of no dimension: of all activations, known beforehand (SmoothQuant); None: each token's own."""

    quantizes_input: bool = False
    outlier_threshold: float | None = None
    input_scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Fp8Weight(_ScaledRows):
    """Values in e4m3; equal scales: one per tensor. quantizes_input: activations are e4m3, too, scaled by token."""

    quantizes_input: bool = True


@dataclass(frozen=True, eq=False)
class BlockFp8Weight(_Stored):
    """Values in e4m3 with a scale for each block of 128 x 128 (DeepSeek-V3), whose last ones may be smaller. scales_RG:
    fp32 [ceil(N / 128), ceil(K / 128)]; activations have a scale for each token and 128 inputs."""

    values_NK: Tensor
    scales_RG: Tensor
    quantizes_input = True

    def dense(self) -> Tensor:
        n, k = self.shape
        scales_NK = self.scales_RG.repeat_interleave(FP8_BLOCK, dim=0)[:n].repeat_interleave(FP8_BLOCK, dim=1)[:, :k]
        return self.values_NK.float() * scales_NK


@dataclass(frozen=True, eq=False)
class Fp4Weight(_Stored):
    """Values in E2M1 (a sign, two bits of exponent, one of mantissa) with a scale for each output and group of inputs:
    of 32 a power of two in E8M0 (MXFP4; OCP Microscaling Formats 1.0), of 16 in E4M3 (NVFP4; NVIDIA). packed_NJ: uint8
    [N, K / 2]: byte j of 32 has input j of 64 in its low four bits, input 32 + j in the others; scales_GN: uint8 [K /
    group, N], the scales' own bits; row_scales_N: fp32, of each output (equal ones: NVFP4's of a tensor), if any."""

    packed_NJ: Tensor
    scales_GN: Tensor
    row_scales_N: Tensor | None = None
    per_column: ClassVar[int] = 2

    @property
    def group_size(self) -> int:
        return self.shape[1] // len(self.scales_GN)

    def dense(self) -> Tensor:
        codes_NK = spread_bits(self.packed_NJ, 4, FP4_SPAN // 2)
        table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes_NK.device)
        groups_NGI = table[codes_NK.int()].view(len(codes_NK), -1, self.group_size)
        if self.group_size == _MXFP4_GROUP:
            groups_NGI = torch.ldexp(groups_NGI, (self.scales_GN.int().T - _E8M0_BIAS)[..., None])
        else:
            groups_NGI = groups_NGI * self.scales_GN.T.contiguous().view(torch.float8_e4m3fn).float()[..., None]
        return groups_NGI.view(self.shape) * (1.0 if self.row_scales_N is None else self.row_scales_N[:, None])


@dataclass(frozen=True, eq=False)
class Int4Weight(_Stored):
    """w = (q - zero) * scale, q in 0..15, with a scale (and zero point) for each output and group of inputs.

    packed_NJ: uint8 [N, K / 2]. A group of G inputs takes G / 2 bytes: byte j has input j of the group in its low four
               bits and input G/2 + j in its high four. So one mask and one shift give two contiguous halves of a group,
               and neither loads nor products need a shuffle.
    scales_GN: [K / G, N] in the dtype of the activations
    zeros_GN:  uint8 [K / G, N]; None where all are 8 (symmetric)
    """

    packed_NJ: Tensor
    scales_GN: Tensor
    zeros_GN: Tensor | None
    group_size: int
    per_column: ClassVar[int] = 2

    def codes(self) -> Tensor:
        """0..15, uint8 [N, K]."""
        return spread_bits(self.packed_NJ, 4, self.group_size // 2)

    def dense(self) -> Tensor:
        zeros_NG1: Tensor | float = 8.0 if self.zeros_GN is None else self.zeros_GN.float().T[..., None]
        codes_NGI = self.codes().float().view(self.shape[0], -1, self.group_size)
        return ((codes_NGI - zeros_NG1) * self.scales_GN.float().T[..., None]).view(self.shape)


@dataclass(frozen=True, eq=False)
class Int4Int8Weight(_Stored):
    """w = (q - zero) * scale * row scale, q in 0..15; INT8 activations meet (q - zero) * scale, an INT8 number (QServe;
    Lin et al. 2024, 4.1). packed_NJ: as of an Int4Weight; scales_GN, zeros_GN: uint8 [K / G, N]; row_scales_N: fp32."""

    packed_NJ: Tensor
    scales_GN: Tensor
    zeros_GN: Tensor
    row_scales_N: Tensor
    group_size: int
    quantizes_input = True
    per_column: ClassVar[int] = 2

    def int8_values(self) -> Tensor:
        """The INT8 numbers that 4-bit codes stand for, [N, K]."""
        zeros_NG1, scales_NG1 = (x.T.contiguous().view(torch.int8)[..., None] for x in (self.zeros_GN, self.scales_GN))
        codes_NGI = spread_bits(self.packed_NJ, 4, self.group_size // 2).view(torch.int8).view(*zeros_NG1.shape[:2], -1)
        return codes_NGI.sub_(zeros_NG1).mul_(scales_NG1).view(self.shape)

    def dense(self) -> Tensor:
        return self.int8_values().float() * self.row_scales_N[:, None]


@dataclass(frozen=True, eq=False)
class Sparse24Weight(_Stored):
    """Two of each four consecutive inputs are kept (2:4). values_NJ: [N, K / 2], the kept ones in order; indices_NP:
    uint8 [N, K / 8]: two bits for each position (0..3) in its four, of two fours of inputs, from the lowest on."""

    values_NJ: Tensor
    indices_NP: Tensor
    per_column: ClassVar[int] = 2

    def dense(self) -> Tensor:
        n, k = self.shape
        positions_NF2 = spread_bits(self.indices_NP, 2, 1).view(n, k // 4, 2).long()
        values = self.values_NJ.float().view(n, k // 4, 2)
        return values.new_zeros(n, k // 4, 4).scatter_(2, positions_NF2, values).view(n, k)


@dataclass(frozen=True, eq=False)
class SignsWeight(_Stored):
    """w = scale * s with s in -1, 0, 1 (2 bits) or -1, 1 (1 bit), and one scale for the whole matrix. bytes_NJ: uint8
    [N, K / n] of n = 8 / bits codes each: input i shares its byte with i + K / n, i + 2 K / n, ..., so that a field of
    all bytes is a contiguous part of the inputs; scale: fp32, of no dimension."""

    bytes_NJ: Tensor
    scale: Tensor
    bits: int = 2
    quantizes_input = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.bytes_NJ.shape[0], self.bytes_NJ.shape[1] * 8 // self.bits

    def fields(self) -> list[Tensor]:
        """The codes of each part of the inputs in turn, int8 [N, K / n]: 0, 1, 2 for -1, 0, 1, or 0, 1 for -1, 1."""
        mask = 2**self.bits - 1
        return [(self.bytes_NJ >> place & mask).view(torch.int8) for place in range(0, 8, self.bits)]

    def dense(self) -> Tensor:
        codes_NK = torch.cat(self.fields(), dim=1).float()
        return self.scale * (codes_NK - 1 if self.bits == 2 else 2 * codes_NK - 1)


@dataclass(frozen=True, eq=False)
class GgufWeight(_Stored):
    """Rows in llama.cpp's blocks. blocks_NJ: uint8 [N, K / weights * bytes of a block]; form: a key of BLOCK_SIZES."""

    blocks_NJ: Tensor
    form: str

    @property
    def shape(self) -> tuple[int, int]:
        weights, size = BLOCK_SIZES[self.form]
        return self.blocks_NJ.shape[0], self.blocks_NJ.shape[1] // size * weights

    def dense(self) -> Tensor:
        return unpack_blocks(self.blocks_NJ, self.form)


MatrixWeight = (
    Tensor | Int8Weight | Int4Weight | Int4Int8Weight | Fp8Weight | BlockFp8Weight | Fp4Weight | Sparse24Weight
    | SignsWeight | GgufWeight
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LowRankWeight:
    """W = outputs_NR inputs_RK: two thin matrices, each in a format of its own; x goes through the second first."""

    inputs_RK: MatrixWeight
    outputs_NR: MatrixWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs_NR.shape[0], self.inputs_RK.shape[1]

    def dense(self) -> Tensor:
        return dequantize(self.outputs_NR) @ dequantize(self.inputs_RK)


@dataclass(frozen=True, eq=False)
class RowsWeight:
    """Parts of the outputs one below the other, each in a format of its own."""

    parts: tuple[MatrixWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dense(self) -> Tensor:
        return torch.cat([dequantize(part) for part in self.parts])


AdapterRows = Sequence[tuple[int, Tensor]]  # an adapter, and the rows of a step that name it


class AdapterBatch:
    """What all adapted layers of a decoder read of the step under way."""

    rows: AdapterRows = ()


@dataclass(frozen=True, eq=False)
class AdaptedWeight:
    """`base` with adapters: inputs_ASRK, of S slices of the outputs, and for each slice outputs_ANR."""

    base: "MatrixWeight | LowRankWeight | RowsWeight"
    inputs_ASRK: Tensor
    outputs: tuple[Tensor, ...]
    batch: AdapterBatch

    @property
    def shape(self) -> tuple[int, int]:
        return self.base.shape[0], self.base.shape[1]

    def dense(self) -> Tensor:
        return dequantize(self.base)

    def merged(self, adapter: int) -> Tensor:
        """[N, K] in fp32: base + B A of one adapter."""
        inputs_SRK = self.inputs_ASRK[adapter].float()
        parts = [outputs[adapter].float() @ own for outputs, own in zip(self.outputs, inputs_SRK, strict=True)]
        return self.dense() + torch.cat(parts)

    def add_to(self, product_TN: Tensor, x_TK: Tensor) -> Tensor:
        """`product_TN` with what the adapters add to the step's rows."""
        for adapter, rows in self.batch.rows:
            thin_TD = x_TK[rows] @ self.inputs_ASRK[adapter].flatten(0, 1).T
            thin = thin_TD.chunk(len(self.outputs), dim=1)
            parts = [own @ outputs[adapter].T for own, outputs in zip(thin, self.outputs, strict=True)]
            product_TN.index_add_(0, rows, parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        return product_TN


Weight = MatrixWeight | LowRankWeight | RowsWeight


def dequantize(weight: Weight) -> Tensor:
    """The weight as an fp32 matrix [N, K]."""
    return weight.float() if isinstance(weight, Tensor) else weight.dense()


_expanded: WeakKeyDictionary[Any, dict[torch.dtype, Tensor]] = WeakKeyDictionary()


def expanded(weight: MatrixWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype` (e4m3 values without their scales), remembered for formats that the processor cannot multiply:
    expanding at each call would take ten times as long as the product on a CPU."""
    by_dtype = _expanded.setdefault(weight, {})
    if dtype not in by_dtype:
        values = weight.values_NK if isinstance(weight, Fp8Weight) else dequantize(weight)
        by_dtype[dtype] = values.to(dtype)
    return by_dtype[dtype]


def quantize_int8(
    weight_NK: Tensor, quantizes_input: bool = False, outlier_threshold: float | None = None
) -> Int8Weight:
    """One scale for each output, codes -127..127."""
    wide = weight_NK.float()
    scales_N = (wide.abs().amax(dim=1) / INT8_MAX).clamp_min(_TINY)
    values_NK = (wide / scales_N[:, None]).round_().to(torch.int8)
    return Int8Weight(values_NK, scales_N, quantizes_input, outlier_threshold)


def quantize_fp8(weight_NK: Tensor, per_tensor: bool = False, quantizes_input: bool = True) -> Fp8Weight:
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
    """Groups of `group_size` inputs (0: an output's share a scale, stored for each group that kernels read); symmetric
    (codes 1..15 about 8), or with zero points (0..15). Raises PerfmodelError where the groups do not fill the rows."""
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
    packed_NJ = packed_bits(codes_NGI.flatten(1), 4, group_size // 2)
    return Int4Weight(packed_NJ, scales_NG.T.contiguous(), zeros_GN, group_size)


def quantize_int4_int8(weight_NK: Tensor, group_size: int = 128) -> Int4Int8Weight:
    """Each output's weights as integers up to 119 first, then each group of those as 0..15 about a zero point, with a
    step that is an integer, too. Raises PerfmodelError where the groups do not fill the rows."""
    n, k = weight_NK.shape
    _check_groups(k, group_size)
    wide = weight_NK.float()
    rows_N = (wide.abs().amax(dim=1) / _PROTECTED_MAX).clamp_min(_TINY)
    whole_NGI = (wide / rows_N[:, None]).round_().view(n, k // group_size, group_size)
    low_NG = whole_NGI.amin(dim=2).clamp_max(0.0)
    steps_NG = ((whole_NGI.amax(dim=2).clamp_min(0.0) - low_NG) / 15.0).ceil_().clamp_min(1.0)
    zeros_NG = (-low_NG / steps_NG).round_()
    codes_NGI = ((whole_NGI / steps_NG[..., None]).round_() + zeros_NG[..., None]).clamp_(0, 15).to(torch.uint8)
    scales_GN, zeros_GN = (part.to(torch.uint8).T.contiguous() for part in (steps_NG, zeros_NG))
    packed_NJ = packed_bits(codes_NGI.flatten(1), 4, group_size // 2)
    return Int4Int8Weight(packed_NJ, scales_GN, zeros_GN, rows_N, group_size)


def quantize_signs(weight_NK: Tensor, bits: int = 2) -> SignsWeight:
    """Ternary (2 bits): w over the mean magnitude, rounded to -1, 0 or 1. Binary (1 bit): the sign of w less the mean.
    Raises PerfmodelError where rows fill no bytes. Source: Ma et al. 2024 and Wang et al. 2023 (BitNet), eq. 1 to 3."""
    k, per_byte = weight_NK.shape[1], 8 // bits
    if k % per_byte:
        raise PerfmodelError(f"a weight with {k} inputs cannot be packed {per_byte} to a byte; use w8a8_int8.")
    wide = weight_NK.float()
    scale = wide.abs().mean().clamp_min(_TINY)
    codes_NK = (wide / scale).round_().clamp_(-1, 1) + 1 if bits == 2 else wide > wide.mean()
    return SignsWeight(packed_bits(codes_NK.to(torch.uint8), bits, k // per_byte), scale, bits)


def sparsify_24(weight_NK: Tensor) -> Sparse24Weight:
    """The two of each four inputs with the largest magnitudes. Raises PerfmodelError where K is no multiple of 8."""
    n, k = weight_NK.shape
    if k % 8:
        raise PerfmodelError(f"2:4 sparsity packs inputs in eights; a weight with {k} inputs cannot be stored so.")
    fours_NF4 = weight_NK.view(n, k // 4, 4)
    order = fours_NF4.abs().argsort(dim=2, descending=True, stable=True)
    kept_NF2 = order[..., :2].sort(dim=2).values
    values_NJ = fours_NF4.gather(2, kept_NF2).reshape(n, k // 2)
    return Sparse24Weight(values_NJ, packed_bits(kept_NF2.to(torch.uint8).flatten(1), 2, 1))


def quantize_mxfp4(weight_NK: Tensor) -> Fp4Weight:
    """The scale of a group is the power of two that leaves its largest magnitude below 8, where codes saturate at 6
    (OCP Microscaling Formats 1.0, 6.3). Raises PerfmodelError where K is no multiple of 64."""
    groups_NGI = _fp4_groups(weight_NK, _MXFP4_GROUP)
    largest_NG = groups_NGI.abs().amax(dim=2).clamp_min(torch.finfo(torch.float32).tiny)
    exponents_NG = (torch.frexp(largest_NG).exponent - 1 - _E2M1_LARGEST_EXPONENT).clamp(-_E8M0_BIAS + 1, _E8M0_BIAS)
    packed_NJ = _e2m1_packed(torch.ldexp(groups_NGI, -exponents_NG[..., None]))
    return Fp4Weight(packed_NJ, (exponents_NG + _E8M0_BIAS).to(torch.uint8).T.contiguous())


def quantize_nvfp4(weight_NK: Tensor) -> Fp4Weight:
    """A group's largest magnitude on 6, an output's largest scale on 448. Raises PerfmodelError unless 64 divides K."""
    groups_NGI = _fp4_groups(weight_NK, _NVFP4_GROUP)
    wanted_NG = groups_NGI.abs().amax(dim=2) / _E2M1[-1]
    rows_N = (wanted_NG.amax(dim=1) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales_NG = (wanted_NG / rows_N[:, None]).clamp(2.0**-9, FP8_MAX).to(torch.float8_e4m3fn)
    packed_NJ = _e2m1_packed(groups_NGI / (scales_NG.float() * rows_N[:, None])[..., None])
    return Fp4Weight(packed_NJ, scales_NG.view(torch.uint8).T.contiguous(), rows_N)


def fp4_from_pairs(blocks: Tensor, scales: Tensor) -> Fp4Weight:
    """MXFP4 as files have it: [N, G, 16] bytes of two neighbours each (the first in the low bits), [N, G] exponents.
    Raises PerfmodelError where the groups of 32 are not even in number."""
    codes_NGI = _fp4_groups(spread_bits(blocks, 4, 1).flatten(1), _MXFP4_GROUP)
    return Fp4Weight(packed_bits(codes_NGI.flatten(1), 4, FP4_SPAN // 2), scales.T.contiguous())


def quantize_gguf(weight_NK: Tensor, form: str) -> GgufWeight:
    """In blocks of `form`, a key of BLOCK_SIZES. Raises PerfmodelError where blocks do not fill the rows."""
    return GgufWeight(pack_blocks(weight_NK, form), form)


def _check_groups(inputs: int, group_size: int) -> None:
    if group_size % 2 or inputs % group_size:
        raise PerfmodelError(
            f"a weight with {inputs} inputs has no whole groups of {group_size}; choose a group size that divides "
            f"{inputs}, or a format without groups (engine.quantization: w8a16)."
        )


def _fp4_groups(matrix_NK: Tensor, group_size: int) -> Tensor:
    n, k = matrix_NK.shape
    if k % FP4_SPAN:
        raise PerfmodelError(
            f"weights in 4-bit floats are packed {FP4_SPAN} inputs at a time; a weight with {k} inputs cannot be "
            f"stored so. Choose a format without groups (engine.quantization: w8a16)."
        )
    return (matrix_NK if matrix_NK.dtype == torch.uint8 else matrix_NK.float()).view(n, k // group_size, group_size)


def _e2m1_packed(values: Tensor) -> Tensor:
    """Bytes of the nearest codes, of two equally near ones the even one."""
    magnitudes = torch.tensor(_E2M1, device=values.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    below, above = (torch.bucketize(values.abs(), middles, right=right) for right in (False, True))
    codes = torch.where(below % 2 == 0, below, above).to(torch.uint8) | (values < 0).to(torch.uint8) << 3
    return packed_bits(codes.flatten(1), 4, FP4_SPAN // 2)
