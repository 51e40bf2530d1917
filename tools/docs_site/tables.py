"""Markdown tables of generated pages: cells in which no character means more than itself."""

__all__ = ["as_code", "in_cell", "table"]

import re
from collections.abc import Iterable, Sequence


def in_cell(text: str) -> str:
    """Prose for one cell: one line, no column ends in it, no HTML, and names with underscores as they are."""
    line = " ".join(str(text).split()).replace("|", "\\|")
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else _plain(part) for part in parts)


def _plain(text: str) -> str:
    return re.sub(r"([*_\[\]])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))


def as_code(text: object) -> str:
    """`text` in code type; nothing where there is none."""
    line = " ".join(str(text).split()).replace("|", "\\|")
    return f"`{line}`" if line else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
