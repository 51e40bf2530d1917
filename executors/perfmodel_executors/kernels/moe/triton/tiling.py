"""How the products of experts are cut: rows of a tile, candidate tiles, splits of the sum; all known on the host.

Where each expert has few rows its weights are read once and little is multiplied: the tile has 16 rows, and what counts
is bytes in flight. A pipeline of 4 stages keeps 48 KiB of weights coming per program, so two programs a multiprocessor
cover the latency of HBM (about 25 KiB a multiprocessor at 4 TB/s and 0.8 us) with room for the fills and ends of
others. Where experts have many rows the tile grows to what the tensor cores are kept busy by.
"""

__all__ = ["block_rows", "candidates", "num_splits", "shared_bytes"]

from collections.abc import Callable
from math import sqrt

from perfmodel.ops.routing import distinct_experts
from perfmodel_executors.kernels.launch import Options
from perfmodel_executors.kernels.tiles import TileConfig, pipelined_bytes

_ROWS = (16, 32, 64, 128)
_GROUP_ROWS = 64  # that a warp group multiplies at least
_WARP_PRODUCTS = 80  # a compute capability whose warps multiply, each on its own
_MOST_SUMS = 64  # a thread can hold beside what it multiplies
_BARRIER_BYTES = 16
_PROGRAMS = 512  # wanted in flight: the multiprocessors of a large GPU, two to four times
_LEAST_STEPS = 8  # steps along the sum that a split has at least, to be worth the start of its pipeline

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


def block_rows(num_tokens: int, num_experts: int, top_k: int) -> int:
    """The smallest tile that holds nearly every expert's rows: their mean and 2.5 standard deviations of a Poisson."""
    mean = num_tokens * top_k / num_experts
    needed = mean + 2.5 * sqrt(mean)
    return next((rows for rows in _ROWS if rows >= needed), _ROWS[-1])


def candidates(kernel: str, rows: int, capability: int | None) -> list[TileConfig]:
    """Tiles of `up` or `down` with so many rows, the one to trust without measuring first.

    Where warps multiply, sums and both inputs are registers: more than `_MOST_SUMS` sums a thread spill.
    """
    table, gates = (_UP, 2) if kernel == "up" else (_DOWN, 1)
    by_warps = capability is not None and not _has_group_products(rows, capability)
    return [
        TileConfig({"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth}, Options(warps, stages))
        for columns, depth, warps, stages in table[rows]
        if not by_warps or gates * rows * columns <= _MOST_SUMS * 32 * warps
    ]


def shared_bytes(gates: int, element_bytes: int) -> Callable[[TileConfig, int], int]:
    """The law for `tiles.pick`: a stage holds rows of the input and of each of the `gates` matrices.

    Tiles multiplied by warps are pipelined as on Ampere, on any device. Blackwell has a barrier beside each sum.
    """

    def law(config: TileConfig, capability: int) -> int:
        sizes = config.sizes
        stage = (sizes["BLOCK_M"] + gates * sizes["BLOCK_N"]) * sizes["BLOCK_K"] * element_bytes
        if not _has_group_products(sizes["BLOCK_M"], capability):
            return pipelined_bytes(stage, config, _WARP_PRODUCTS)
        return pipelined_bytes(stage, config, capability) + (gates * _BARRIER_BYTES if capability >= 100 else 0)

    return law


def num_splits(num_tokens: int, num_experts: int, top_k: int, columns: int, depth: int, config: TileConfig) -> int:
    """Parts that the sum over `depth` is computed in: 1, 2, 4 or 8, enough to fill the device when few experts are
    touched."""
    programs = distinct_experts(num_experts, top_k, num_tokens) * -(-columns // config.sizes["BLOCK_N"])
    steps = -(-depth // config.sizes["BLOCK_K"])
    splits = 1
    while splits < 8 and 2 * splits * programs <= _PROGRAMS and steps >= 2 * splits * _LEAST_STEPS:
        splits *= 2
    return splits


def _has_group_products(rows: int, capability: int) -> bool:
    """Whether four warps multiply together, from SRAM: Hopper, and Blackwell into its tensor memory."""
    return 90 <= capability < 120 and rows >= _GROUP_ROWS
