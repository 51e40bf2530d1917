"""What a document loses on a terminal of so many columns: words, digits, the ends of lines."""

__all__ = ["faults_on"]

import io
from typing import Any

from rich.console import Console

from perfmodel.report.document import Block, Commands, Document, Facts, Table, plain
from perfmodel.report.terminal import show_document


def faults_on(document: Document, width: int) -> set[str]:
    """Words of tables and facts that are not shown whole, lines that are too long, and `...` where something is cut."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    show_document(document, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    words, whole = set(text.split()), _to_copy(document)
    found = {line for line in text.splitlines() if len(line) > width and line not in whole}
    found |= {word for word in words if "\u2026" in word}
    return found.union(*(_missing(block, words) for block in document.blocks))


def _to_copy(document: Document) -> list[str]:
    """Lines for a shell, which would not run broken."""
    return [line for block in document.blocks if isinstance(block, Commands) for line in block.lines]


def _missing(block: Block, words: set[str]) -> set[str]:
    """Words of a table's cells and heads (but of the columns that name a row), or of facts, that are not shown."""
    wanted: list[Any] = []
    if isinstance(block, Table) and block.rows:
        count = len(block.head) - block.num_wide
        cells = [
            *block.head[block.left : count],
            *(plain(cell) for row in (*block.rows, block.total) for cell in row[:count]),
        ]
        wanted = [word for cell in cells for word in cell.split()]
    if isinstance(block, Facts):
        values = [word for _, facts in block.groups for fact in facts for word in (fact.value, fact.unit) if word]
        wanted = [word for each in values for word in each.split()]
    stripped = {word.strip(",") for word in words}
    return {word for word in wanted if word.strip(",") not in stripped}
