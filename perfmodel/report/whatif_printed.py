"""What-ifs on a terminal: the tables, then the answer in words."""

__all__ = ["print_whatif"]

from rich.console import Console
from rich.text import Text

from perfmodel.report.tables import rows_table
from perfmodel.report.whatif_written import WhatIfReport


def print_whatif(report: WhatIfReport, console: Console) -> None:
    """Print `report` on `console`."""
    console.print(Text(f"\n{report.title}", style="bold cyan"))
    for table in report.tables:
        console.print(Text(table.title, style="bold"))
        console.print(rows_table(table.head, table.rows, left=table.num_names))
    for line in report.words:
        console.print(Text(f"- {line}"))
    for note in report.notes:
        console.print(Text(f"Note: {note}", style="dim"))
