"""Keys and values as integers of 2, 4 or 8 bits, several to a byte, with a scale and a zero point for each group.

A group is `group_size` neighbouring elements of one token's head; asymmetric, q = round((x - least) / step) (the
quantiser of Liu et al. 2024, KIVI, along each token, so that a token is stored when it comes). Element i of a head
shares its byte with i + H / n, i + 2 H / n, ...: unpacked halves or quarters follow each other.

Pages of keys and values of one layer, plain or quantised, and what quantising means.

    float (bf16, fp16, fp32)  as they are
    fp8                       e4m3 with unit scale, saturating at +-448: what engines do without calibrated scales
    int8                      a scale per token and head, amax / 127, kept beside the pages; rounded to nearest even
    packed                    integers of 8, 4 or 2 bits in groups, see above; read by the torch kernels only

Scales lie [block, head, token], so that what one head reads of a page is contiguous, as its kernels want it.

Random pages for problems, and the same keys and values contiguous, as library calls want them.
"""

# ruff: noqa: N815 (fields carry the suffix of their shape, like the variables)

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from perfmodel_executors.kernels.problem import Inputs

_LEAST_STEP = 2.0**-24  # the smallest fp16: of groups of equal elements


class Packing(NamedTuple):
    """bits: of an element; group_size: elements that share a scale and a zero point, in fp16."""

    bits: int
    group_size: int

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    def fits(self, head_dim: int) -> bool:
        """Whether heads of this size are whole groups and whole bytes."""
        return head_dim % self.group_size == 0 and head_dim % self.per_byte == 0


def packed(x_TKH: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Bytes [..., K, H / n], and (step, least element) of each group, [..., K, G, 2]."""
    groups = x_TKH.float().reshape(*x_TKH.shape[:-1], -1, packing.group_size)
    least, largest = groups.aminmax(dim=-1)
    most = 2**packing.bits - 1
    scales = torch.stack((((largest - least) / most).clamp_(min=_LEAST_STEP), least), dim=-1).half()
    step, zero = scales.float().unbind(-1)
    numbers = ((groups - zero[..., None]) / step[..., None]).round_().clamp_(0, most).to(torch.uint8).flatten(-2)
    parts = numbers.chunk(packing.per_byte, dim=-1)
    result = parts[0]
    for index, part in enumerate(parts[1:], start=1):
        result = result | part << index * packing.bits
    return result, scales


def unpacked(bytes_TKP: Tensor, scales_TKG2: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Numbers again, [..., K, H] in `dtype`."""
    mask = 2**packing.bits - 1
    parts = [bytes_TKP >> index * packing.bits & mask for index in range(packing.per_byte)]
    numbers = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).to(dtype)
    step, zero = scales_TKG2.to(dtype).unbind(-1)
    groups = numbers.view(*numbers.shape[:-1], -1, packing.group_size)
    return torch.addcmul(zero[..., None], groups, step[..., None]).flatten(-2)


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
LEAST_SCALE = 1e-30  # of a token whose keys or values are all zero


class KVPages(NamedTuple):
    """Keys [B, S, K, H] and values [B, S, K, H_v] of B blocks of S tokens, and their scales [B, K, S] if int8.

    With `packing`, bytes of several elements, and scales [B, S, K, G, 2].
    """

    k_BSKH: Tensor
    v_BSKH: Tensor
    k_scale_BKS: Tensor | None = None
    v_scale_BKS: Tensor | None = None
    packing: Packing | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored."""
        return tuple(tensor for tensor in self[:4] if tensor is not None)

    @property
    def v_dim(self) -> int:
        """Elements of a head's value."""
        return self.v_BSKH.shape[3] * (1 if self.packing is None else self.packing.per_byte)

    @property
    def block_size(self) -> int:
        return self.k_BSKH.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_BSKH.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.k_BSKH.dtype

    @property
    def is_quantized(self) -> bool:
        return self.packing is not None or self.dtype in (FP8, torch.int8)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(math.prod(t.shape[1:]) * t.element_size() for t in self.tensors)

    def grown(self, num_blocks: int) -> "KVPages":
        """Room for `num_blocks`, with the same contents; new blocks are zero."""
        k, v = _grown(self.k_BSKH, num_blocks), _grown(self.v_BSKH, num_blocks)
        k_scale, v_scale = (
            None if scale is None else _grown(scale, num_blocks) for scale in (self.k_scale_BKS, self.v_scale_BKS)
        )
        return KVPages(k, v, k_scale, v_scale, self.packing)

    def gathered(self, blocks_M: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [M * S, K, H] and values of the named blocks, in `dtype`."""
        if self.packing is not None:
            k, v = (self._unpacked(side, blocks_M, dtype) for side in (0, 1))
            return k, v
        k = dequantized(self.k_BSKH, self.k_scale_BKS, blocks_M, dtype)
        return k, dequantized(self.v_BSKH, self.v_scale_BKS, blocks_M, dtype)

    def _unpacked(self, side: int, blocks_M: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.packing is not None
        tensors = self.tensors
        rows, scales = (tensors[i].index_select(0, blocks_M).flatten(0, 1) for i in (side, 2 + side))
        return unpacked(rows, scales, self.packing, dtype)

    def move(self, sources_M: Tensor, targets_M: Tensor) -> None:
        """Copy the tokens in slots `sources` to slots `targets`; all are read before any is written."""
        size = self.block_size
        if self.packing is not None:
            for tensor in self.tensors:
                rows = tensor.flatten(0, 1)
                rows[targets_M] = rows[sources_M]
            return
        for pages_BSKH in (self.k_BSKH, self.v_BSKH):
            rows = (pages_BSKH.view(torch.uint8) if self.dtype == FP8 else pages_BSKH).flatten(0, 1)
            rows[targets_M] = rows[sources_M]
        for scale_BKS in (self.k_scale_BKS, self.v_scale_BKS):
            if scale_BKS is not None:
                moved_MK = scale_BKS[sources_M // size, :, sources_M % size]
                scale_BKS[targets_M // size, :, targets_M % size] = moved_MK

    def fill_normal(self, first_block: int) -> None:
        """Random contents for the blocks from `first_block` on: standard normal."""
        if self.packing is not None:
            for values, scales in (self.tensors[0::2], self.tensors[1::2]):
                shape = (*values.shape[:3], values.shape[3] * self.packing.per_byte)
                normal = torch.randn(len(values) - first_block, *shape[1:], device=values.device)
                values[first_block:], scales[first_block:] = packed(normal, self.packing)
            return
        for pages_BSKH, scale_BKS in ((self.k_BSKH, self.k_scale_BKS), (self.v_BSKH, self.v_scale_BKS)):
            if not self.is_quantized:
                pages_BSKH[first_block:].normal_()
                continue
            new_BSKH = pages_BSKH[first_block:]
            normal = torch.randn(new_BSKH.shape, device=new_BSKH.device)
            values, scale_BSK = quantized(normal, self.dtype)
            new_BSKH.copy_(values)
            if scale_BKS is not None and scale_BSK is not None:
                scale_BKS[first_block:] = scale_BSK.transpose(1, 2)


def empty_pages(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    packing: Packing | None = None,
) -> KVPages:
    """Pages of zeros; `head_dims` are those of keys and of values."""
    if packing is not None:
        zeros = partial(torch.zeros, num_blocks, block_size, num_kv_heads)
        k, v = (zeros(d // packing.per_byte, dtype=torch.uint8, device=device) for d in head_dims)
        k_scale, v_scale = (zeros(d // packing.group_size, 2, dtype=torch.float16, device=device) for d in head_dims)
        return KVPages(k, v, k_scale, v_scale, packing)
    k, v = (torch.zeros(num_blocks, block_size, num_kv_heads, d, dtype=dtype, device=device) for d in head_dims)
    if dtype != torch.int8:
        return KVPages(k, v)
    k_scale, v_scale = (torch.zeros(num_blocks, num_kv_heads, block_size, device=device) for _ in range(2))
    return KVPages(k, v, k_scale, v_scale)


def quantized(x_TKH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """x as pages of `dtype` store it, and its scales [..., K] if it has any."""
    if dtype == torch.int8:
        x = x_TKH.float()
        scale_TK = (x.abs().amax(-1) / INT8_MAX).clamp_(min=LEAST_SCALE)
        return (x * scale_TK.reciprocal()[..., None]).round_().to(torch.int8), scale_TK
    if dtype == FP8:
        return x_TKH.clamp(-FP8_MAX, FP8_MAX).to(FP8), None
    return x_TKH.to(dtype), None


def dequantized(pages_BSKH: Tensor, scale_BKS: Tensor | None, blocks_M: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens of the named blocks, [M * S, K, H] in `dtype`."""
    # Bytes, since not every build of CUDA gathers e4m3.
    stored = pages_BSKH.view(torch.uint8) if pages_BSKH.dtype == FP8 else pages_BSKH
    rows = stored.index_select(0, blocks_M).view(pages_BSKH.dtype)
    if scale_BKS is not None:
        rows = rows * scale_BKS.index_select(0, blocks_M).transpose(1, 2)[..., None]
    return rows.flatten(0, 1).to(dtype)


def _grown(pages: Tensor, num_blocks: int) -> Tensor:
    grown = torch.zeros(num_blocks, *pages.shape[1:], dtype=pages.dtype, device=pages.device)
    grown[: pages.shape[0]] = pages
    return grown


# The names of tables of measured kernels, and how far a sum over keys may differ from the reference's.
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", FP8: "fp8", torch.int8: "int8"}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

_kept: Any = WeakTensorKeyDictionary()


def random_pages(
    inputs: Inputs,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> KVPages:
    """Standard normal keys and values of `dtype`, stored as `kv_dtype`."""
    pages: list[Tensor] = []
    scales: list[Tensor | None] = []
    for dim in head_dims:
        values, scale = quantized(inputs.normal(num_blocks, block_size, num_kv_heads, dim, dtype=dtype), kv_dtype)
        pages.append(values)
        scales.append(None if scale is None else scale.transpose(1, 2).contiguous())
    return KVPages(pages[0], pages[1], scales[0], scales[1])


def contiguous_kv(pages: KVPages, tables_DM: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [D, K, L, H] of equally long sequences; gathered once per pages, so that calls can be timed."""
    known: dict[int, tuple[Tensor, Tensor]] = _kept.get(pages.k_BSKH, {})
    if length not in known:
        k, v = (
            rows.view(len(tables_DM), -1, *rows.shape[1:])[:, :length].transpose(1, 2).contiguous()
            for rows in pages.gathered(tables_DM.flatten(), pages.dtype)
        )
        known = {length: (k, v)}
        _kept[pages.k_BSKH] = known
    return known[length]
