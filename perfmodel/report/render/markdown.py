"""A document as Markdown: headings, lists, pipe tables; pictures are files beside it."""

__all__ = ["render_markdown"]

import re
from collections.abc import Callable, Iterator, Sequence

from perfmodel.report.document import (
    Block,
    Commands,
    Document,
    Facts,
    Heading,
    Item,
    Line,
    Notes,
    Paragraph,
    Picture,
    Plot,
    Sentences,
    Table,
    Tiles,
    spans,
)

_MOST_NOTES = 40
_SPECIAL = re.compile(r"([*\\]|<(?=[A-Za-z/!]))")


def render_markdown(document: Document, origin: str = "", picture_file: Callable[[str], str] = "{}.svg".format) -> str:
    """The document's text.

    origin:       who wrote it, when: a sentence below the command
    picture_file: from a picture's name to the file that it is in
    """
    lines = [f"# {_escaped(document.title)}", ""]
    if document.command:
        lines += ["```", document.command, "```", ""]
    lines += [origin, ""] if origin else []
    lines += [f"**{_escaped(document.subtitle)}**", ""] if document.subtitle else []
    level = 2
    for block in document.flat:
        level = 3 if isinstance(block, Heading) else level  # what follows a heading stands below it
        lines += _lines(block, level, picture_file)
    return "\n".join(lines).rstrip() + "\n"


def _lines(block: Block, level: int, picture_file: Callable[[str], str]) -> Iterator[str]:
    match block:
        case Heading(text):
            yield from _titled(text)
        case Paragraph(line):
            yield from (_line(line), "")
        case Sentences(lines, title):
            yield from _titled(title, level)
            yield from _list(lines)
        case Table():
            yield from _table(block, level)
        case Facts(title, groups):
            rows = [(fact.label, f"{fact.value} {fact.unit}".strip()) for _, group in groups for fact in group]
            yield from _table(Table(("", ""), rows, title), level)
        case Tiles(tiles):
            yield from _list([f"{tile.label}: {tile.value} {tile.unit} {tile.aside.text}".rstrip() for tile in tiles])
        case Picture(name):
            file = picture_file(name)
            yield from (f"![{file}]({file})", "")
        case Commands(title, lines):
            yield from _titled(title, level)
            yield from ("```sh", *lines, "```", "")
        case Notes(lines) if lines:
            more = [f"and {len(lines) - _MOST_NOTES} more in the JSON"] if len(lines) > _MOST_NOTES else []
            yield from _titled("Notes")
            yield from _list([*lines[:_MOST_NOTES], *more])
        case Plot(title, _, note):
            yield from (f"{_escaped(title)}: see the HTML report. {_escaped(note)}".rstrip(), "")
        case _:
            pass


def _titled(title: str, level: int = 2) -> Iterator[str]:
    if title:
        yield from (f"{'#' * level} {_escaped(title)}", "")


def _list(lines: Sequence[Line | Item]) -> Iterator[str]:
    for line in lines:
        item = line if isinstance(line, Item) else Item(line)
        yield f"- {_line(item.line)}"
        yield from (f"  - {_escaped(part)}" for part in item.parts)
    if lines:
        yield ""


def _table(table: Table, level: int) -> Iterator[str]:
    if not table.rows:
        return
    yield from _titled(table.title, level)
    yield f"| {' | '.join(map(_cell, table.head))} |"
    yield "|" + "|".join("---" if table.is_text(column) else "---:" for column in range(len(table.head))) + "|"
    for row in (*table.rows, *([table.total] if table.total else [])):
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""
    if table.note:
        yield from (_escaped(table.note), "")


def _cell(cell: Line) -> str:
    return _line(cell).replace("|", "\\|").replace("\n", " ")


def _line(line: Line) -> str:
    return "".join(
        f"**{_escaped(span.text)}**" if span.tone == "strong" and span.text else _escaped(span.text)
        for span in spans(line)
    )


def _escaped(text: str) -> str:
    """`text` without what Markdown would take for its own; code in backticks stays code."""
    parts = text.split("`")
    return "`".join(part if number % 2 else _SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))
