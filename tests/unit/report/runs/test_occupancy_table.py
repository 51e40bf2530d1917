"""The table of compiled kernels shows what the rows say."""

from io import StringIO

from rich.console import Console

from perfmodel.report.runs.occupancy_table import occupancy_table

ROW = {
    "kernel": "few_tokens_kernel",
    "tile": "EVEN_K=True BLOCK_M=32 BLOCK_N=64 SPLIT_K=4",
    "count": 64,
    "blocks": 256,
    "waves": 0.97,
    "warps": 4,
    "registers": 64,
    "shared_bytes": 98304,
    "spills": 0,
    "tensor_instructions": 8,
    "blocks_per_unit": 2,
    "occupancy": 0.125,
    "limited_by": "shared memory",
}


def test_the_row_is_there_with_its_tile_in_short():
    console = Console(file=StringIO(), width=200)
    console.print(occupancy_table([ROW]))
    text = console.file.getvalue()
    for shown in ("few_tokens_kernel", "M=32 N=64 SPLIT_K=4", "96.0 KiB", "0.97", "shared memory"):
        assert shown in text
    assert "EVEN_K" not in text
