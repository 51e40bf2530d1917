"""The compiled kernels of a step as a table: what each takes of the hardware, and how often its blocks fill it."""

__all__ = ["occupancy_table"]

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from perfmodel.report.runs.tables import rows_table

_HEAD = ("kernel", "tile", "count", "blocks", "waves", "warps", "registers", "SRAM", "spills", "tensor", "a unit", "by")


def occupancy_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """`rows` as `explain_occupancy` of the executor gives them. tensor: tensor-core instructions in the binary; a unit:
    blocks that run at once on a compute unit, with what keeps it from more."""
    return rows_table(_HEAD, [_cells(row) for row in rows], left=2)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    tensor = f"{row['tensor_instructions']:,}" if row["tensor_instructions"] else "none"
    return (
        str(row["kernel"]),
        _short(str(row["tile"])),
        f"{row['count']:,}",
        f"{row['blocks']:,}",
        f"{row['waves']:.2f}",
        str(row["warps"]),
        str(row["registers"]),
        f"{row['shared_bytes'] / 1024:.1f} KiB",
        str(row["spills"]),
        tensor,
        f"{row['blocks_per_unit']} ({row['occupancy']:.0%})",
        str(row["limited_by"]),
    )


def _short(tile: str) -> str:
    """The sizes of the tile among a kernel's constants: `BLOCK_M=32 BLOCK_K=64 GATED=True` is `M=32 K=64`."""
    sizes = [part.removeprefix("BLOCK_") for part in tile.split() if part.startswith(("BLOCK", "SPLIT", "TILE"))]
    return " ".join(sizes)
