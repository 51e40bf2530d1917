"""Pages of keys and values of one layer, plain or quantised, and what quantising means.

float (bf16, fp16, fp32)  as they are
fp8                       e4m3 with unit scale, saturating at +-448: what engines do without calibrated scales
int8                      a scale per token and head, amax / 127, kept beside the pages; rounded to nearest even
packed                    integers of 8, 4 or 2 bits in groups of neighbouring elements of one token's head, with a
                          scale and a zero point each: q = round((x - least) / step), along each token, so that a
                          token is stored when it comes (the quantiser of Liu et al. 2024, KIVI); torch only
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from perfmodel_executors.kernels.gguf_blocks import packed_bits, spread_bits
from perfmodel_executors.kernels.problem import Inputs

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
MIN_SCALE = 1e-30  # of a token whose keys or values are all zero
_MIN_STEP = 2.0**-24  # the smallest fp16: of groups of equal elements


class Packing(NamedTuple):
    """bits: of an element; group_size: elements that share a scale and a zero point, in fp16. Element i of a head
    shares its byte with i + H / n, i + 2 H / n, ...: unpacked halves or quarters follow each other."""

    bits: int
    group_size: int

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    def fits(self, head_dim: int) -> bool:
        return head_dim % self.group_size == 0 and head_dim % self.per_byte == 0


def packed(x_TKH: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Bytes [..., K, H / n], and (step, least element) of each group, [..., K, G, 2]."""
    groups = x_TKH.float().reshape(*x_TKH.shape[:-1], -1, packing.group_size)
    least, largest = groups.aminmax(dim=-1)
    most = 2**packing.bits - 1
    scales = torch.stack((((largest - least) / most).clamp_(min=_MIN_STEP), least), dim=-1).half()
    step, zero = scales.float().unbind(-1)
    numbers = ((groups - zero[..., None]) / step[..., None]).round_().clamp_(0, most).to(torch.uint8).flatten(-2)
    return packed_bits(numbers, packing.bits, numbers.shape[-1] // packing.per_byte), scales


def unpacked(bytes_TKP: Tensor, scales_TKG2: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Numbers again, [..., K, H] in `dtype`."""
    numbers = spread_bits(bytes_TKP, packing.bits, bytes_TKP.shape[-1]).to(dtype)
    step, zero = scales_TKG2.to(dtype).unbind(-1)
    groups = numbers.view(*numbers.shape[:-1], -1, packing.group_size)
    return torch.addcmul(zero[..., None], groups, step[..., None]).flatten(-2)


class Chunks(NamedTuple):
    """Prompts' chunks behind one another, or trees of drafted tokens, whose keys and values are in pages.

    tables_GM:   block ids of each sequence, padded with anything up to the longest
    starts_G:    [G + 1]; chunk g has the query rows starts[g] : starts[g + 1]
    computed_G:  tokens of each sequence in the KV cache before its chunk
    ancestors_T: int64 [T], of trees: a query sees the whole prefix, and of its chunk (at most 64 tokens) token j if bit
                 j is set, its own included; None: a text
    nodes_G:     nodes of each tree in the KV cache, of which its queries are the last; None where they are all
    """

    tables_GM: Tensor
    starts_G: Tensor
    computed_G: Tensor
    ancestors_T: Tensor | None = None
    nodes_G: Tensor | None = None

    def spans(self) -> list[tuple[int, int, int]]:
        """First query row of each chunk, the row behind its last, and tokens before it."""
        starts: list[int] = self.starts_G.tolist()
        return list(zip(starts, starts[1:], self.computed_G.tolist(), strict=False))


class KVPages(NamedTuple):
    """Keys [B, S, K, H] and values [B, S, K, H_v] of B blocks of S tokens; with `packing`, bytes of several elements.
    Scales: [B, K, S] if int8, so that what one head reads of a page is contiguous; [B, S, K, G, 2] with `packing`."""

    k_BSKH: Tensor
    v_BSKH: Tensor
    k_scale_BKS: Tensor | None = None
    v_scale_BKS: Tensor | None = None
    packing: Packing | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self[:4] if tensor is not None)

    @property
    def sides(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        return (self.k_BSKH, self.k_scale_BKS), (self.v_BSKH, self.v_scale_BKS)

    @property
    def v_dim(self) -> int:
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
        return sum(math.prod(t.shape[1:]) * t.element_size() for t in self.tensors)

    def grown(self, num_blocks: int) -> "KVPages":
        """Room for `num_blocks`, with the same contents; new blocks are zero."""
        larger: Any = {name: grown(x, num_blocks) for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**larger)

    def gathered(self, blocks_M: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.packing is None:
            k, v = (dequantized(values, scales, blocks_M, dtype) for values, scales in self.sides)
            return k, v
        keys, values, k_scales, v_scales = (part.index_select(0, blocks_M).flatten(0, 1) for part in self.tensors)
        return unpacked(keys, k_scales, self.packing, dtype), unpacked(values, v_scales, self.packing, dtype)

    def first(self, num_tokens: int, table_M: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [L, K, H] of the first tokens of the sequence in these blocks."""
        k_LKH, v_LKH = self.gathered(table_M[: -(-num_tokens // self.block_size)], dtype)
        return k_LKH[:num_tokens], v_LKH[:num_tokens]

    def write(self, k_TKH: Tensor, v_TKH: Tensor, slots_T: Tensor) -> None:
        for x_TKH, (pages, scales) in zip((k_TKH, v_TKH), self.sides, strict=True):
            values, own_scales = self._encoded(x_TKH)
            _as_bytes(pages).flatten(0, 1).index_copy_(0, slots_T, _as_bytes(values))
            if scales is not None and own_scales is not None:
                self._set_scales(scales, slots_T, own_scales)

    def move(self, sources_M: Tensor, targets_M: Tensor) -> None:
        """Copy the tokens in slots `sources` to slots `targets`; all are read before any is written."""
        for pages, scales in self.sides:
            rows = _as_bytes(pages).flatten(0, 1)
            rows[targets_M] = rows[sources_M]
            if scales is not None:
                by_token = scales.transpose(1, 2) if self.packing is None else scales
                moved = by_token[sources_M // self.block_size, sources_M % self.block_size]
                self._set_scales(scales, targets_M, moved)

    def fill_normal(self, first_block: int) -> None:
        per_byte = 1 if self.packing is None else self.packing.per_byte
        for pages, scales in self.sides:
            new = pages[first_block:]
            if not self.is_quantized:
                new.normal_()
                continue
            values, own_scales = self._encoded(torch.randn(*new.shape[:3], new.shape[3] * per_byte, device=new.device))
            new.copy_(values)
            if scales is not None and own_scales is not None:
                scales[first_block:] = own_scales.transpose(1, 2) if self.packing is None else own_scales

    def _encoded(self, x_TKH: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.packing is not None:
            return packed(x_TKH, self.packing)
        return (x_TKH, None) if x_TKH.dtype == self.dtype else quantized(x_TKH, self.dtype)

    def _set_scales(self, scales: Tensor, slots_T: Tensor, own_scales: Tensor) -> None:
        if self.packing is None:
            scales[slots_T // self.block_size, :, slots_T % self.block_size] = own_scales
        else:
            scales.flatten(0, 1).index_copy_(0, slots_T, own_scales)


def empty_pages(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    packing: Packing | None = None,
) -> KVPages:
    zeros = partial(torch.zeros, num_blocks, block_size, num_kv_heads, device=device)
    sizes, (k_scale, v_scale) = list(head_dims), (None, None)
    if packing is not None:
        sizes, dtype = [dim // packing.per_byte for dim in head_dims], torch.uint8
        k_scale, v_scale = (zeros(dim // packing.group_size, 2, dtype=torch.float16) for dim in head_dims)
    elif dtype == torch.int8:
        k_scale, v_scale = (torch.zeros(num_blocks, num_kv_heads, block_size, device=device) for _ in head_dims)
    k, v = (zeros(size, dtype=dtype) for size in sizes)
    return KVPages(k, v, k_scale, v_scale, packing)


def quantized(x_TKH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """x as pages of `dtype` store it, and its scales [..., K] if it has any."""
    if dtype == torch.int8:
        x = x_TKH.float()
        scale_TK = (x.abs().amax(-1) / INT8_MAX).clamp_(min=MIN_SCALE)
        return (x * scale_TK.reciprocal()[..., None]).round_().to(torch.int8), scale_TK
    if dtype == FP8:
        return x_TKH.clamp(-FP8_MAX, FP8_MAX).to(FP8), None
    return x_TKH.to(dtype), None


def dequantized(pages_BSKH: Tensor, scale_BKS: Tensor | None, blocks_M: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens of the named blocks, [M * S, K, H] in `dtype`."""
    rows = _as_bytes(pages_BSKH).index_select(0, blocks_M).view(pages_BSKH.dtype)
    if scale_BKS is not None:
        rows = rows * scale_BKS.index_select(0, blocks_M).transpose(1, 2)[..., None]
    return rows.flatten(0, 1).to(dtype)


def _as_bytes(pages: Tensor) -> Tensor:
    """The CPU scatters no e4m3, and not every build of CUDA gathers it."""
    return pages.view(torch.uint8) if pages.dtype == FP8 else pages


def grown(pages: Tensor, num_blocks: int) -> Tensor:
    larger = torch.zeros(num_blocks, *pages.shape[1:], dtype=pages.dtype, device=pages.device)
    larger[: pages.shape[0]] = pages
    return larger


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
    pages = empty_pages(num_blocks, block_size, num_kv_heads, head_dims, kv_dtype, inputs.device)
    slots = num_blocks * block_size
    k, v = (inputs.normal(slots, num_kv_heads, dim, dtype=dtype) for dim in head_dims)
    pages.write(k, v, torch.arange(slots, device=inputs.device))
    return pages


def shuffled_tables(inputs: Inputs, num_seqs: int, width: int) -> Tensor:
    return inputs.permutation(width * num_seqs + 1)[: width * num_seqs].view(num_seqs, width)


def contiguous_kv(pages: KVPages, tables_DM: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [D, K, L, H] of equally long sequences; gathered once per pages, so that calls can be timed."""
    known: dict[int, tuple[Tensor, Tensor]] = _kept.get(pages.k_BSKH, {})
    if length not in known:
        k, v = (
            rows.view(len(tables_DM), -1, *rows.shape[1:])[:, :length].transpose(1, 2).contiguous()
            for rows in pages.gathered(tables_DM.flatten(), pages.dtype)
        )
        known = _kept[pages.k_BSKH] = {length: (k, v)}
    return known[length]
