"""How the products of experts are cut: rows of a tile, candidate tiles, splits of the sum, all known on the host; and
which tile a program computes: an expert, its rows, and a block of columns.

sorted  (token, choice) pairs by expert, cut into tiles in one launch, without the host. One program an expert counts
        the rows of all, so it knows where its own begin, then scans the ids again and writes its pairs in their order.
        Only whole tiles are handed out, and none to an expert without rows; the host launches the most there can be:

            tiles = sum over experts of ceil(rows / B)  <=  D + (A - D) / B,   A pairs, D = min(E, A) experts with rows

        Programs walk down `GROUP` tiles before they take the next columns, so that the rows of an expert that needs
        several tiles find its weights in the L2.
capped  As sorted, where each expert has room for so many rows and multiplies all of them, with zeros where no pair is;
        first choices come first, and what exceeds the room is left out.
few     An expert's rows are one tile, and the program finds them in the routing table itself, which is cheaper than
        another launch. The grid has a tile for each pair; those whose expert an earlier pair has exit.
one     One token: each of its pairs is a tile.
"""

from math import sqrt
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel.ops.routing import distinct_experts
from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.stored_rows import ExpertWeight
from perfmodel_executors.kernels.tiles import Law, TileConfig, pipelined_bytes
from perfmodel_executors.kernels.triton.operand import Operand

GROUP = 8
FEW_TOKENS = 16
_FEW_PER_EXPERT = 2  # pairs: beyond, the programs that only exit take as long as sorting
_BLOCK = 2048  # ids that a program looks at in one pass
_ROWS = (16, 32, 64, 128)
_GROUP_ROWS = 64  # that a warp group multiplies at least
_WARP_PRODUCTS = 80  # a compute capability whose warps multiply, each on its own
_MAX_SUMS, _MAX_SUMS_GROUPED = 64, 32  # a thread can hold beside what it multiplies; twice
_BARRIER_BYTES = 16
_PROGRAMS = 512  # wanted in flight: the multiprocessors of a large GPU, two to four times
_MIN_STEPS = 8  # steps along the sum that a split has at least, to be worth the start of its pipeline

# Rows of a tile -> (columns, of each of gate and up; depth; warps; stages), the one to trust first.
_UP = {
    16: ((32, 128, 4, 4), (16, 256, 4, 4), (32, 64, 4, 6), (64, 128, 4, 3), (32, 64, 4, 3)),
    32: ((32, 128, 4, 4), (64, 128, 4, 3), (64, 64, 4, 4), (32, 64, 4, 3)),
    64: ((64, 64, 4, 4), (128, 64, 8, 3), (64, 128, 4, 3), (32, 64, 4, 3)),
    128: ((128, 64, 8, 4), (128, 64, 8, 3), (64, 64, 4, 4), (64, 64, 8, 4), (64, 32, 8, 3)),
}
_DOWN = {
    16: ((64, 128, 4, 4), (32, 256, 4, 4), (32, 128, 4, 4), (128, 128, 4, 3), (32, 64, 4, 3)),
    32: ((64, 128, 4, 4), (128, 64, 4, 4), (64, 64, 4, 5), (32, 64, 4, 3)),
    64: ((128, 64, 4, 4), (64, 128, 4, 3), (256, 64, 8, 3), (32, 64, 4, 3)),
    128: ((256, 64, 8, 4), (256, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 4), (64, 32, 8, 3)),
}

# The same of stored weights; columns are those of gate and of up together.
_FEW = ((64, 256, 4, 4), (64, 128, 4, 5), (128, 128, 4, 4), (32, 256, 2, 4), (64, 128, 4, 3))
_WEIGHT_ONLY = {
    8: _FEW,
    16: _FEW,
    32: ((64, 128, 4, 4), (128, 128, 4, 4), (64, 128, 4, 3)),
    64: ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3), (64, 64, 4, 3)),
    128: ((128, 64, 8, 4), (128, 64, 8, 3), (64, 64, 8, 3)),
}
_FEW_8_BITS = ((64, 256, 4, 4), (128, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 3))
_8_BITS = {
    16: _FEW_8_BITS,
    32: _FEW_8_BITS,
    64: ((64, 128, 4, 4), (128, 128, 4, 4), (64, 128, 4, 3)),
    128: ((128, 128, 8, 3), (128, 128, 4, 3), (64, 128, 4, 3)),
}
_BLOCKS = {  # have the sums of 128 inputs beside the sums of all
    16: ((64, 128, 4, 4), (128, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 3)),
    32: ((64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 3)),
    64: ((64, 128, 4, 4), (128, 128, 8, 3), (64, 128, 4, 3)),
    128: ((64, 128, 4, 3), (64, 128, 8, 3)),
}


def block_rows(num_tokens: int, num_experts: int, top_k: int, weight: Tensor | ExpertWeight | None = None) -> int:
    """The smallest tile that holds nearly every expert's rows: their mean and 2.5 standard deviations of a Poisson; of
    a stored `weight` as many as the tokens where those are few."""
    mean = num_tokens * top_k / num_experts
    needed = mean + 2.5 * sqrt(mean)
    return tile_rows(max(needed, min(num_tokens, FEW_TOKENS)) if isinstance(weight, ExpertWeight) else needed, weight)


def tile_rows(needed: float, weight: Tensor | ExpertWeight | None) -> int:
    """The smallest tile of `needed` rows or more; else the largest."""
    sizes = (8, *_ROWS) if isinstance(weight, ExpertWeight) and not weight.quantizes_input else _ROWS
    return next((rows for rows in sizes if rows >= needed), sizes[-1])


def candidates(kernel: str, rows: int, capability: int | None) -> list[TileConfig]:
    """Tiles of `up` or `down` with so many rows, the one to trust without measuring first. Where warps multiply, sums
    and both inputs are registers: more than `_MAX_SUMS` sums a thread spill."""
    table, gates = (_UP, 2) if kernel == "up" else (_DOWN, 1)
    by_warps = capability is not None and not _has_group_products(rows, capability)
    return [
        TileConfig({"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth}, Options(warps, stages))
        for columns, depth, warps, stages in table[rows]
        if not by_warps or gates * rows * columns <= _MAX_SUMS * 32 * warps
    ]


def stored_candidates(rows: int, operand: Operand, capability: int | None) -> list[TileConfig]:
    """The same of stored weights, as deep as whole groups are. Formats in groups have the sums of a group beside the
    sums of all: where warps multiply, all of these are registers."""
    table = _BLOCKS if operand.form == "blocks" else _8_BITS if operand.meets_codes else _WEIGHT_ONLY
    is_tight = operand.form in ("int4", "fp4", "blocks") and capability is not None and not 90 <= capability < 120
    return [
        TileConfig({"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": operand.depth(depth)}, Options(warps, stages))
        for columns, depth, warps, stages in table[rows]
        if not is_tight or rows * columns <= _MAX_SUMS_GROUPED * 32 * warps
    ]


def shared_bytes(gates: int, element_bytes: int) -> Law:
    """The law for `tiles.pick`: a stage holds rows of the input and of each of the `gates` matrices. Tiles multiplied
    by warps are pipelined as on Ampere, on any device. Blackwell has a barrier beside each sum."""

    def law(config: TileConfig, capability: int) -> int:
        sizes = config.sizes
        stage = (sizes["BLOCK_M"] + gates * sizes["BLOCK_N"]) * sizes["BLOCK_K"] * element_bytes
        if not _has_group_products(sizes["BLOCK_M"], capability):
            return pipelined_bytes(stage, config, _WARP_PRODUCTS)
        return pipelined_bytes(stage, config, capability) + (gates * _BARRIER_BYTES if capability >= 100 else 0)

    return law


def num_splits(num_tokens: int, num_experts: int, top_k: int, columns: int, depth: int, config: TileConfig) -> int:
    """Parts of the sum over `depth`: 1, 2, 4 or 8, enough to fill the device when few experts are touched."""
    programs = distinct_experts(num_experts, top_k, num_tokens) * -(-columns // config.sizes["BLOCK_N"])
    steps = -(-depth // config.sizes["BLOCK_K"])
    splits = 1
    while splits < 8 and 2 * splits * programs <= _PROGRAMS and steps >= 2 * splits * _MIN_STEPS:
        splits *= 2
    return splits


def _has_group_products(rows: int, capability: int) -> bool:
    """Whether four warps multiply together, from SRAM: Hopper, and Blackwell into its tensor memory."""
    return 90 <= capability < 120 and rows >= _GROUP_ROWS


class SortedPairs(NamedTuple):
    """order: [A] pairs (token * top_k + choice) by expert, each expert's ascending; tiles: [most, 3] of each tile: its
    expert, where in `order` it begins, how many rows it has; valid up to num_tiles: [1]."""

    order: Tensor
    tiles: Tensor
    num_tiles: Tensor


@triton.jit(do_not_specialize=["num_pairs", "room"])
def _sort_kernel(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_pairs, num_experts, top_k, room,
    IS_CAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)
    counts = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        ids = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=0).to(tl.int32)
        counts += tl.histogram(ids, EXPERTS, mask=pair < num_pairs)
    expert = tl.arange(0, EXPERTS)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    row = tl.sum(tl.where(expert < own, counts, 0), axis=0)
    tile = tl.sum(tl.where(expert < own, tiles, 0), axis=0)
    rows = tl.sum(tl.where(expert == own, counts, 0), axis=0)
    given = rows
    if IS_CAPPED:
        row, tile, given = own * room, own * tl.cdiv(room, BLOCK_M), room
        rows = tl.minimum(rows, room)
    for done in range(0, given, BLOCK_M):
        entry = tiles_ptr + (tile + done // BLOCK_M) * 3
        tl.store(entry, own)
        tl.store(entry + 1, row + done)
        tl.store(entry + 2, tl.maximum(tl.minimum(rows - done, BLOCK_M), 0))
    if own == num_experts - 1:
        tl.store(num_tiles_ptr, tile + tl.cdiv(given, BLOCK_M))
    if rows > 0:
        end = row + rows
        for begin in range(0, num_pairs, BLOCK):
            pair = begin + tl.arange(0, BLOCK)
            is_pair = pair < num_pairs
            if IS_CAPPED:  # of all tokens the first choices, then the second ones
                num_tokens = num_pairs // top_k
                pair = pair % num_tokens * top_k + pair // num_tokens
            ids = tl.load(experts_ptr + pair, mask=is_pair, other=-1).to(tl.int32)
            is_own = (ids == own).to(tl.int32)
            place = row - 1 + tl.cumsum(is_own, axis=0)
            tl.store(order_ptr + place, pair, mask=(is_own > 0) & (place < end))
            row += tl.sum(is_own, axis=0)


def sort_pairs(experts_TX: Tensor, num_experts: int, block_rows: int, room: int | None = None) -> SortedPairs:
    """The pairs of `experts_TX` (contiguous, ids in 0 .. num_experts - 1) in tiles of at most `block_rows`; room: rows
    of each expert, None: as many as it has pairs."""
    pairs, top_k = experts_TX.numel(), experts_TX.shape[1]
    places = pairs if room is None else num_experts * room
    order, num_tiles = (torch.empty(n, dtype=torch.int32, device=experts_TX.device) for n in (places, 1))
    most = most_tiles(pairs, num_experts, block_rows, room)
    tiles = torch.empty(most, 3, dtype=torch.int32, device=experts_TX.device)
    block = max(16, min(_BLOCK, triton.next_power_of_2(pairs)))
    experts = max(16, triton.next_power_of_2(num_experts))
    sizes = {"IS_CAPPED": room is not None, "BLOCK_M": block_rows, "BLOCK": block, "EXPERTS": experts}
    options = Options(num_warps=max(1, min(8, block // 256)), num_stages=1)
    args = (experts_TX, order, tiles, num_tiles, pairs, num_experts, top_k, room or 0)
    launch(_sort_kernel, (num_experts,), *args, options=options, **sizes)
    return SortedPairs(order, tiles, num_tiles)


def most_tiles(num_pairs: int, num_experts: int, block_rows: int, room: int | None = None) -> int:
    """Tiles that `num_pairs` rows make at most, however they fall on the experts; room: rows of each expert."""
    if room is not None:
        return num_experts * -(-room // block_rows)
    touched = min(num_experts, num_pairs)
    return touched + (num_pairs - touched) // block_rows


class ExpertRows:
    """Which rows go to which expert, in tiles of `rows`; unsorted where any expert's rows fit one tile. room: rows that
    each expert multiplies, None: one for each of its pairs."""

    def __init__(self, experts_TX: Tensor, num_experts: int, rows: int, room: int | None = None) -> None:
        self.experts_TX, self.num_experts, self.rows, self.room = experts_TX.contiguous(), num_experts, rows, room
        num_tokens, num_pairs = experts_TX.shape[0], experts_TX.numel()
        is_few = num_tokens <= min(rows, FEW_TOKENS) and num_pairs <= _FEW_PER_EXPERT * num_experts
        is_sorted = room is not None or not is_few
        self.pairs = sort_pairs(self.experts_TX, num_experts, rows, room) if is_sorted else None

    @property
    def form(self) -> str:
        if self.pairs is not None:
            return "sorted"
        return "one" if self.experts_TX.shape[0] == 1 else "few"

    @property
    def num_tiles(self) -> int:
        num_pairs = self.experts_TX.numel()
        if self.pairs is None:
            return num_pairs
        return int(triton.cdiv(most_tiles(num_pairs, self.num_experts, self.rows, self.room), GROUP)) * GROUP

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        return self.experts_TX, *(self.pairs or (None, None, None)), self.experts_TX.shape[0]

    @property
    def constants(self) -> dict[str, int | str]:
        top_k = self.experts_TX.shape[1]
        return {"TOP_K": top_k, "CHOICES": triton.next_power_of_2(top_k), "GROUP": GROUP, "FORM": self.form}


@triton.jit
def own_tile(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, blocks,
    BLOCK_M: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """(expert, its pairs, which rows have one, block of columns, whether there is anything to do)."""
    program = tl.program_id(0)
    row = tl.arange(0, BLOCK_M)
    if FORM == "sorted":
        num_tiles = tl.load(num_tiles_ptr)
        first = program // (GROUP * blocks) * GROUP
        depth = tl.maximum(tl.minimum(num_tiles - first, GROUP), 1)
        place = program % (GROUP * blocks)
        block = place // depth
        is_live = (first < num_tiles) & (block < blocks)
        entry = tiles_ptr + (first + place % depth) * 3
        expert = tl.load(entry, mask=is_live, other=0)
        begin = tl.load(entry + 1, mask=is_live, other=0)
        mask = row < tl.load(entry + 2, mask=is_live, other=0)
        pair = tl.load(order_ptr + begin + row, mask=mask, other=0)
    elif FORM == "one":
        pair = program // blocks + 0 * row
        block = program % blocks
        expert = tl.load(experts_ptr + program // blocks).to(tl.int32)
        mask = row == 0
        is_live = program >= 0
    else:
        slot = program // blocks
        block = program % blocks
        choice = tl.arange(0, CHOICES)
        pairs = row[:, None] * TOP_K + choice[None, :]
        is_pair = (row < num_tokens)[:, None] & (choice < TOP_K)[None, :]
        expert = tl.load(experts_ptr + slot).to(tl.int32)
        is_own = tl.load(experts_ptr + pairs, mask=is_pair, other=-1).to(tl.int32) == expert
        pair = tl.max(tl.where(is_own, pairs, -1), axis=1)
        mask = pair >= 0
        is_live = tl.min(tl.min(tl.where(is_own, pairs, slot), axis=1), axis=0) == slot
    return expert, pair, mask, block, is_live
