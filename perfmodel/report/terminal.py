"""A document on a terminal, and any result by its kind: how results print themselves in Python.

Tables too wide for a terminal are set closely, turned, or stacked, a row below the other."""

import io
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from perfmodel.report import document as doc
from perfmodel.report.document import Block, Commands, Document, Facts, Heading, Item, Line, Notes, Table, plain, spans

_STYLES = {
    **{"": "", "strong": "bold", "muted": "dim", "good": "green", "warn": "yellow", "bad": "red"},
    **{"compute": "blue", "memory": "green", "communication": "yellow", "overhead": "bright_black"},
}
_WIDTH = 140  # of what is shown as text
_BETWEEN = 3  # characters from column to column; or, in a table that is too wide so, one
_PAGE = '<pre style="line-height:normal;font-family:monospace;white-space:pre;overflow-x:auto">{code}</pre>'


def show_document(document: Document, console: Console) -> None:
    """Print `document` on `console`; pictures, plots, tiles and details are left out."""
    if document.title:
        console.print()
        console.print(Text(document.title, style="bold"))
    if document.subtitle:
        console.print(Text(document.subtitle))
    for block in document.blocks:
        _show(block, console)


def render_text(document: Document) -> str:
    """What `show_document` prints, without colours or an empty line at the end."""
    text = io.StringIO()
    # In a notebook rich would show what is written instead of writing it, and the text would stay empty.
    console = Console(file=text, width=_WIDTH, soft_wrap=True, no_color=True, force_terminal=False, force_jupyter=False)
    show_document(document, console)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def render_html(document: Document) -> str:
    """The same as one element of HTML, in colours: for notebooks."""
    console = Console(file=io.StringIO(), width=_WIDTH, record=True, force_terminal=True, force_jupyter=False)
    show_document(document, console)
    return console.export_html(inline_styles=True, code_format=_PAGE)


def _show(block: Block, console: Console) -> None:
    match block:
        case Heading(text):
            console.print()
            console.print(Text(text, style="bold cyan"))
        case doc.Paragraph(line):
            console.print(_text(line))
        case doc.Sentences(lines, title):
            if title:
                console.print()
                console.print(Text(title, style="bold"))
            for item in (line if isinstance(line, Item) else Item(line) for line in lines):
                console.print(Text("- ").append_text(_text(item.line)))
                for part in item.parts[:1]:
                    console.print(Text(f"    {part}", style="dim"))
        case Table():
            _show_table(block, console)
        case Facts():
            drawn = RichTable(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
            drawn.add_column("quantity")
            drawn.add_column("value", justify="right")
            drawn.add_column("unit", style="dim")
            for name, group in block.groups:
                if group:
                    drawn.add_row(Text(name, style="bold cyan"), "", "")
                for fact in group:
                    drawn.add_row(f"  {fact.label}", Text(fact.value), fact.unit)
            console.print(drawn)
        case Commands(_, lines):
            console.print()
            for line in lines:
                console.print(Text(line, style="dim" if line.startswith("#") else ""), soft_wrap=True)
        case Notes(lines):
            for note in lines:
                console.print(Text(f"Note: {note}", style="dim"))
        case _:
            pass  # a page's


def _show_table(table: Table, console: Console) -> None:
    if not table.rows:
        return
    if table.title:
        console.print()
        console.print(Text(table.title, style="bold"))
    every = [*table.rows, *([table.total] if table.total else [])]
    # Columns as rows: what few rows of many numbers need to fit.
    tops = [" ".join(plain(cell) for cell in row[: table.left] if plain(cell)) for row in every]
    numbers = range(table.left, len(table.head) - table.num_wide)
    turned = Table(("", *tops), [(table.head[column], *(row[column] for row in every)) for column in numbers])
    for item, between in ((table, _BETWEEN), (table, 1), (turned, _BETWEEN), (turned, 1)):
        widths = _widths(item, console.width, between)
        if widths:
            console.print(_drawn(item, widths, between), no_wrap=False, soft_wrap=False, crop=False)
            return
    # Each row as lines: its first cell, then a line with its name for each other one.
    names = table.head[1 : len(table.head) - table.num_wide]
    width = max(map(len, names), default=0)
    for row in every:
        console.print(Text(plain(row[0]), style="bold"))
        for name, cell in zip(names, row[1:], strict=False):
            if plain(cell):
                console.print(Text(f"  {name:<{width}}  ").append_text(_text(cell)))


def _drawn(table: Table, widths: Sequence[int], between: int) -> RichTable:
    """`table` without the columns that only a page has room for; widths, between: characters of columns and gaps."""
    is_close = between < _BETWEEN
    padding = 0 if is_close else (0, 1)
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, show_edge=not is_close)
    for column, width in enumerate(widths):
        justify: Literal["left", "right"] = "left" if table.is_text(column) else "right"
        drawn.add_column(table.head[column], justify=justify, width=width, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(_text, row[: len(widths)]))
    if table.total:
        drawn.add_section()
        drawn.add_row(*map(_text, table.total[: len(widths)]), style="bold")
    return drawn


def _widths(table: Table, room: int, between: int) -> list[int]:
    """Characters for each column, so that no word is broken and few lines are; none where `room` is too small."""
    columns = [
        [head, *(plain(row[column]) for row in table.rows), *([plain(table.total[column])] if table.total else [])]
        for column, head in enumerate(table.head[: len(table.head) - table.num_wide])
    ]
    whole = [max(map(len, cells)) for cells in columns]
    widths = [max(len(word) for cell in cells for word in (cell.split() or [""])) for cells in columns]
    left = room - sum(widths) - between * len(widths) + 1
    if left < 0:
        return []
    while left > 0 and widths != whole:
        widest = max(range(len(widths)), key=lambda column: (whole[column] - widths[column]) / max(widths[column], 1))
        widths[widest] += 1
        left -= 1
    return widths


def _text(line: Line) -> Text:
    return Text.assemble(*((span.text, _STYLES[span.tone]) for span in spans(line)))


# A result's class -> its view, loaded when one is printed: a run pays nothing for plans.
_VIEWS = {
    "JobPlan": "plan:job_view",
    "MemoryPlan": "memory:memory_view",
    "PlansReport": "validation:plans_view",
    "PlanResult": "plan:plan_view",
    "ResultComparison": "catalog:comparison_view",
    "RunResult": "run:run_view",
    "SpeculationAdvice": "whatif:speculation_view",
    "StepEstimate": "step:estimate_view",
    "StepReport": "step:step_view",
    "StudyResult": "study:study_view",
    "SweepResult": "whatif:sweep_view",
    "ValidationReport": "validation:validation_view",
    "WhatIfResult": "whatif:whatif_view",
}


def document_of(result: Any) -> Document:
    """The document of a result."""
    place = next(_VIEWS[kind.__name__] for kind in type(result).__mro__ if kind.__name__ in _VIEWS)
    document: Document = resolve_name(f"perfmodel.report.views.{place}")(result)
    return document


def as_text(result: Any) -> str:
    """What the result's command shows on a terminal, without colours."""
    return render_text(document_of(result))


def as_html(result: Any) -> str:
    """The same as one element of HTML, in colours."""
    return render_html(document_of(result))
