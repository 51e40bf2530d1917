"""A document as Markdown, whose pictures are files beside it, and as one HTML page; `--report FILE` writes either.

The page has no script and no address of another file: it opens without a network; equal documents give equal bytes."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from perfmodel.dates import today
from perfmodel.errors import SpecError
from perfmodel.files.atomic_write import atomic_write_all
from perfmodel.renderable import to_jsonable
from perfmodel.report import document as doc
from perfmodel.report.document import Block, Commands, Document, Fact, Facts, Heading, Item, Line, Plot, Table, Tiles
from perfmodel.report.drawing.figure_svg import figure_svg
from perfmodel.version import RELEASE

_MAX_NOTES = 40
_SPECIAL = re.compile(r"([*\\]|<(?=[A-Za-z/!]))")


def render_markdown(document: Document, origin: str = "", picture_file: Callable[[str], str] = "{}.svg".format) -> str:
    """The document's text. origin: who wrote it, when: a sentence below the command; picture_file: from a picture's
    name to the file that it is in"""
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
        case doc.Paragraph(line):
            yield from (_line(line), "")
        case doc.Sentences(lines, title):
            yield from _titled(title, level)
            yield from _list(lines)
        case Table():
            yield from _table(block, level)
        case Facts(title, groups):
            rows = [(fact.label, f"{fact.value} {fact.unit}".strip()) for _, group in groups for fact in group]
            yield from _table(Table(("", ""), rows, title), level)
        case Tiles(tiles):
            yield from _list([f"{tile.label}: {tile.value} {tile.unit} {tile.aside.text}".rstrip() for tile in tiles])
        case Plot(_, _, note, name) if name:
            file = picture_file(name)
            yield from (f"![{file}]({file})", "")
            yield from (_escaped(note), "") if note else ()
        case Commands(title, lines):
            yield from _titled(title, level)
            yield from ("```sh", *lines, "```", "")
        case doc.Notes(lines) if lines:
            more = [f"and {len(lines) - _MAX_NOTES} more in the JSON"] if len(lines) > _MAX_NOTES else []
            yield from _titled("Notes")
            yield from _list([*lines[:_MAX_NOTES], *more])
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
        for span in doc.spans(line)
    )


def _escaped(text: str) -> str:
    """`text` without what Markdown would take for its own; code in backticks stays code."""
    parts = text.split("`")
    return "`".join(part if number % 2 else _SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))


def render_page(document: Document) -> str:
    """The whole file."""
    tag = f'<span class="tag">{escape(document.tag)}</span>' if document.tag else ""
    head = f'<h1>{escape(document.title)}{tag}</h1><p class="sub">{escape(document.subtitle)}</p>'
    if document.command:
        head += f"<pre>{escape(document.command)}</pre>"
    body, style = (
        "".join(map(_section, document.flat)),
        Path(__file__).with_name("page.css").read_text(encoding="utf-8"),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(document.title)}</title><style>\n{style}</style></head>"
        f"<body><main>{head}{body}</main></body></html>\n"
    )


def _section(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case doc.Paragraph(line):
            return f"<p>{_html_line(line)}</p>"
        case doc.Sentences(lines, title):
            return _framed(title, _html_list(lines)) if lines else ""
        case Table():
            return _framed(block.title, _html_table(block), block.note) if block.rows else ""
        case Facts(title, groups):
            return _framed(title, _facts(groups))
        case Tiles():
            return _tiles(block)
        case Plot(title, _, note):
            return _framed(title, f'<div class="scroll figure">{figure_svg(block.draw(), title)}</div>', note)
        case Commands(title, lines):
            return _framed(title, f"<pre>{escape(chr(10).join(lines))}</pre>") if lines else ""
        case doc.Notes(lines):
            return _framed("Notes", _html_list(lines)) if lines else ""
    raise AssertionError(block)  # details are flattened


def _framed(title: str, inner: str, note: str = "") -> str:
    head = f"<h2>{escape(title)}</h2>" if title else ""
    tail = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section>{head}{tail}{inner}</section>"


def _html_list(lines: Sequence[Line | Item]) -> str:
    items = []
    for line in lines:
        item = line if isinstance(line, Item) else Item(line)
        parts = "".join(f"<li>{escape(part)}</li>" for part in item.parts)
        items.append(f"<li>{_html_line(item.line)}{f'<ul>{parts}</ul>' if parts else ''}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _html_table(table: Table) -> str:
    def row(cells: Sequence[Line], tag: str = "td") -> str:
        kinds = (' class="text"' if column and table.is_text(column) else "" for column in range(len(cells)))
        return "".join(f"<{tag}{kind}>{_html_line(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{row(cells)}</tr>" for cells in table.rows)
    total = f'<tr class="total">{row(table.total)}</tr>' if table.total else ""
    return f'<div class="scroll"><table><tr>{row(table.head, "th")}</tr>{body}{total}</table></div>'


def _facts(groups: Sequence[tuple[str, Sequence[Fact]]]) -> str:
    columns = []
    for name, facts in groups:
        columns.append(f"<div><h3>{escape(name)}</h3><dl>")
        for fact in facts:  # a number stays in one line with its unit
            kind = ' class="number"' if fact.value[:1].isdigit() and len(fact.value.split()) == 1 else ""
            text = escape(f"{fact.value} {fact.unit}".rstrip())
            columns.append(f"<dt>{escape(fact.label)}</dt><dd{kind}>{text}</dd>")
        columns.append("</dl></div>")
    return f'<div class="columns">{"".join(columns)}</div>'


def _tiles(block: Tiles) -> str:
    cells = [
        f'<div class="tile"><div class="label">{escape(tile.label)}</div><div class="value">{escape(tile.value)} '
        f'<small>{escape(tile.unit)}</small></div><div class="aside {tile.aside.tone}">{escape(tile.aside.text)}</div>'
        f"</div>"
        for tile in block.tiles
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _html_line(line: Line) -> str:
    return "".join(
        f'<span class="{span.tone}">{_text(span.text)}</span>' if span.tone else _text(span.text)
        for span in doc.spans(line)
    )


def _text(text: str) -> str:
    """Text with what stands in backticks set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def check_report_file(path: Path) -> None:
    """Raises SpecError for a path that ends in neither .md nor .html."""
    if path.suffix not in (".md", ".html"):
        raise SpecError(f"--report {path}: expected a file ending in .md or .html; its .json gets the same name.")


def pictures_of(document: Document) -> dict[str, str]:
    """Name -> SVG file of each plot that has one, drawn now."""
    plots = [block for block in document.flat if isinstance(block, Plot) and block.name]
    return {plot.name: figure_svg(plot.draw(), plot.title, is_file=True) for plot in plots}


def write_report(document: Document, answer: Mapping[str, Any], path: Path) -> list[Path]:
    """Write FILE.md with FILE.*.svg, or FILE.html, and `answer` as FILE.json beside it; returns the files, FILE first.
    Raises SpecError for another ending, or where nothing can be written."""
    check_report_file(path)
    texts = {path: ""}
    if path.suffix == ".md":
        origin = f"Generated by this command on {today().isoformat()}, perfmodel {RELEASE}."
        texts[path] = render_markdown(document, origin, lambda name: f"{path.stem}.{name}.svg")
        texts |= {path.with_suffix(f".{name}.svg"): svg for name, svg in pictures_of(document).items()}
    else:
        texts[path] = render_page(document)
    texts[path.with_suffix(".json")] = json.dumps(to_jsonable(answer), indent=1, ensure_ascii=False) + "\n"
    return atomic_write_all(texts)
