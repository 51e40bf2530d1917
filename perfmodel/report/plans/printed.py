"""A plan on a terminal: the answer in words, the finalists, the command lines that serve the best of them."""

__all__ = ["print_plan"]

from rich.console import Console
from rich.text import Text

from perfmodel.plan.deployments.export import serve_commands
from perfmodel.plan.deployments.result import PlanResult
from perfmodel.plan.deployments.tables import plan_tables
from perfmodel.plan.deployments.words import plan_words, ruled_out_words
from perfmodel.plan.jobs.result import JobPlan
from perfmodel.plan.jobs.words import batch_command, job_table, job_words, looked_at
from perfmodel.report.runs.tables import rows_table


def print_plan(result: PlanResult | JobPlan, console: Console) -> None:
    """Print `result` on `console`."""
    if isinstance(result, JobPlan):
        _print_job(result, console)
        return
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


def _print_job(plan: JobPlan, console: Console) -> None:
    for line in job_words(plan):
        console.print(Text(f"- {line}"))
    table = job_table(plan)
    if table.rows:
        console.print()
        console.print(Text(table.title))
        console.print(rows_table(table.head, table.rows, left=table.left))
    if plan.winner is not None:
        for line in batch_command(plan, plan.winner):
            console.print(Text(line, style="dim" if line.startswith("#") else ""))
    console.print(Text(looked_at(plan), style="dim"))
    for note in plan.notes:
        console.print(Text(f"Note: {note}", style="dim"))
