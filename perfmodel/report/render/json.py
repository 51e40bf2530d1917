"""A document as plain data, block by block, for a page that draws it itself."""

__all__ = ["document_json"]

from collections.abc import Sequence
from typing import Any

from perfmodel.files.jsonable import to_jsonable
from perfmodel.report.document import (
    Block,
    Commands,
    Details,
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


def document_json(document: Document) -> dict[str, Any]:
    """`kind` says of each block which it is; lines are lists of {text, tone}; a plot is plotly's data and layout."""
    return {
        "title": document.title,
        "subtitle": document.subtitle,
        "tag": document.tag,
        "command": document.command,
        "blocks": _blocks(document.blocks),
    }


def _blocks(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    return [{"kind": type(block).__name__.lower(), **_block(block)} for block in blocks]


def _block(block: Block) -> dict[str, Any]:
    match block:
        case Heading(text):
            return {"text": text}
        case Paragraph(line):
            return {"line": _line(line)}
        case Sentences(lines, title):
            return {"title": title, "items": [_item(line) for line in lines]}
        case Table():
            return _table(block)
        case Facts(title, groups):
            return {"title": title, "groups": [{"title": name, "facts": _facts(facts)} for name, facts in groups]}
        case Tiles(tiles):
            facts = [{"label": t.label, "value": t.value, "unit": t.unit, "aside": _line(t.aside)} for t in tiles]
            return {"tiles": facts}
        case Picture(name):
            return {"name": name, "svg": block.draw()}
        case Plot(title, _, note):
            return {"title": title, "note": note, "figure": to_jsonable(block.draw().to_plotly_json())}
        case Commands(title, lines):
            return {"title": title, "lines": list(lines)}
        case Notes(lines):
            return {"lines": list(lines)}
        case Details(blocks):
            return {"blocks": _blocks(blocks)}


def _table(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "head": [{"text": name, "is_text": table.is_text(column)} for column, name in enumerate(table.head)],
        "rows": [[_line(cell) for cell in row] for row in table.rows],
        "total": [_line(cell) for cell in table.total],
        "note": table.note,
    }


def _item(line: Line | Item) -> dict[str, Any]:
    item = line if isinstance(line, Item) else Item(line)
    return {"line": _line(item.line), "parts": list(item.parts)}


def _facts(facts: Sequence[Any]) -> list[dict[str, str]]:
    return [{"label": fact.label, "value": fact.value, "unit": fact.unit} for fact in facts]


def _line(line: Line) -> list[dict[str, str]]:
    return [{"text": span.text, "tone": span.tone} for span in spans(line)]
