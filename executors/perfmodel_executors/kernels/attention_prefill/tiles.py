"""Tiles of flash attention: how many query rows and keys a program works on, and the SRAM that they take.

Where the tensor cores read their operands from SRAM (Hopper and later), tiles are large; before, queries and keys pass
through registers, of which a tile of 128 x 64 with heads of 128 needs more than there are: the compiler spills. The
binaries of every candidate that comes first were read (registers, spills) on sm_80, sm_90 and sm_100.
"""

__all__ = ["candidates_for", "shared_bytes"]

from perfmodel_executors.kernels.kv_pages.triton import page_buffers
from perfmodel_executors.kernels.launch import Options
from perfmodel_executors.kernels.tiles import TileConfig

_ROWS = (16, 32, 64, 128)
_WIDE = 128  # heads above take twice the registers for their sums


def candidates_for(
    rows: int, group: int, width: int, capability: int | None, is_quantized: bool = False
) -> list[TileConfig]:
    """Candidates for chunks of `rows` query rows (tokens times heads of a group) and heads `width` wide.

    Chunks that fill no tile of 128 rows get a smaller one, but never less than one token's `group`.
    """
    least = 1 << (group - 1).bit_length()
    size = max(least, next((size for size in _ROWS if size >= rows), _ROWS[-1]))
    small = max(least, 64)
    if size < _ROWS[-1]:
        sizes = [(size, keys, 4, 3) for keys in ((32, 16) if width > _WIDE else (64, 128, 32))] + [(size, 16, 4, 2)]
    elif _reads_from_sram(capability):
        large = [(size, 128, 8, 3), (size, 64, 8, 3), (size, 64, 8, 5), (small, 64, 4, 3), (small, 128, 4, 3)]
        # Quantised keys and values pass through registers to be widened.
        first = 1 if is_quantized or width > _WIDE else 0
        sizes = [*large[first:], *large[:first], (small, 32, 4, 2)]
    elif width > _WIDE:
        sizes = [(small, 32, 8, 3), (small, 16, 4, 3), (size, 32, 8, 2)]
    else:
        sizes = [(small, 32, 4, 3), (size, 32, 8, 3), (small, 64, 4, 3), (size, 64, 8, 3), (small, 32, 4, 2)]
    return [TileConfig({"ROWS": r, "KEYS": k}, Options(warps, stages)) for r, k, warps, stages in sizes]


def shared_bytes(config: TileConfig, capability: int, widths: tuple[int, int], product: int, stored: int) -> int:
    """An upper bound: queries, and the pipeline's buffers of keys, values, block ids and scales.

    product, stored: bytes of an element in the products, and in the pages

    Where the tensor cores read SRAM, there is one more buffer, which is filled while they read; what they read of
    quantised pages is a widened copy. Elsewhere the weights are exchanged between warps.
    """
    rows, keys = config.sizes["ROWS"], config.sizes["KEYS"]
    buffers = page_buffers(config.options.num_stages)
    widened = exchanged = 0
    if rows >= 64 and _reads_from_sram(capability):
        buffers += 1 if stored == product else 0
        widened = keys * sum(widths) * product if stored != product else 0
    else:
        exchanged = rows * keys * product
    per_token = sum(widths) * stored + 8 + (16 if stored == 1 else 0)
    return rows * max(widths) * product + buffers * keys * per_token + widened + exchanged + 4096


def _reads_from_sram(capability: int | None) -> bool:
    return capability is None or 90 <= capability < 120
