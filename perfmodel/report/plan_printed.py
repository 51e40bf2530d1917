"""A plan on a terminal: the answer in words, the finalists, the command lines that serve the best of them."""

__all__ = ["print_plan"]

from rich.console import Console
from rich.text import Text

from perfmodel.plan.export import serve_commands
from perfmodel.plan.plan_result import PlanResult
from perfmodel.plan.plan_tables import plan_tables
from perfmodel.plan.plan_words import plan_words, ruled_out_words
from perfmodel.report.tables import rows_table


def print_plan(result: PlanResult, console: Console) -> None:
    """Print `result` on `console`."""
    for line in plan_words(result):
        console.print(Text(f"- {line}"))
    for table in plan_tables(result):
        console.print()
        console.print(Text(table.title))
        console.print(rows_table(table.head, table.rows, left=table.left))
    if result.winner is not None:
        for line in serve_commands(result, result.winner):
            console.print(Text(line, style="dim" if line.startswith("#") else ""))
    looked = f"{result.num_candidates:,} candidates, {result.num_serving:,} serve the rate"
    console.print(Text("; ".join([looked, *ruled_out_words(result)]), style="dim"))
    for note in result.notes:
        console.print(Text(f"Note: {note}", style="dim"))
