"""`Document`: what an answer says, in blocks, whatever it will be shown on.

A view makes a document of a result and is pure; a renderer (`perfmodel.report.terminal`, `pages`) makes terminal
output, Markdown, HTML or JSON of a document. Blocks hold text and numbers as text; plots are drawn when a renderer asks
for them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pkgutil import resolve_name
from typing import Any, Literal

from perfmodel.renderable import to_jsonable

Tone = Literal["", "strong", "muted", "good", "bad", "warn", "compute", "memory", "communication", "overhead"]


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of text with what it means: a limit that is met, a bound, an aside."""

    text: str
    tone: Tone = ""


Line = str | Span | tuple[str | Span, ...]  # one line of text, or the content of a cell


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of what follows."""

    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One or more sentences in a line of their own."""

    line: Line


@dataclass(frozen=True, slots=True)
class Item:
    """A sentence with what explains it; where room is scarce, the first of `parts` stands for all."""

    line: Line
    parts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Sentences:
    """A list: the answer in sentences, one each."""

    lines: Sequence[Line | Item]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a head; the first `left` columns are text, the others numbers unless in `texts`.

    note:     what the columns mean
    total:    a last row that sums up the others
    num_wide: how many of the last columns are prose that only a page has room for"""

    head: Sequence[str]
    rows: Sequence[Sequence[Line]]
    title: str = ""
    left: int = 1
    texts: Sequence[int] = ()
    note: str = ""
    total: Sequence[Line] = ()
    num_wide: int = 0

    def is_text(self, column: int) -> bool:
        """Whether a column is aligned as text."""
        return column < self.left or column in self.texts or column >= len(self.head) - self.num_wide


@dataclass(frozen=True, slots=True)
class Fact:
    """A label with its value; where the value is a number, with its unit."""

    label: str
    value: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Labelled facts in groups: (group, its facts)."""

    title: str
    groups: Sequence[tuple[str, Sequence[Fact]]]


@dataclass(frozen=True, slots=True)
class Tile:
    """A number to be read at a glance; `aside` says what it is to be held against."""

    label: str
    value: str
    unit: str
    aside: Span = Span("")


@dataclass(frozen=True, slots=True)
class Tiles:
    """The numbers to look at first; a terminal has them in its tables."""

    tiles: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot. draw: gives a figure (`perfmodel.report.drawing.figures`); name: of its file beside Markdown, which has
    no others"""

    title: str
    draw: Callable[[], Any]
    note: str = ""
    name: str = ""


def named_plot(title: str, drawing: str, note: str, *data: Any) -> Plot:
    """A plot by its function in `perfmodel.report.plots`, which loads numpy: nothing is drawn before a page asks."""
    return Plot(title, lambda: resolve_name(f"perfmodel.report.plots.{drawing}")(*data), note)


@dataclass(frozen=True, slots=True)
class Commands:
    """Lines for a shell."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Notes:
    """What a reader has to know beside the figures: where times come from, what could not be had."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks for a page, which a terminal has no room for."""

    blocks: Sequence["Block"]


Block = Heading | Paragraph | Sentences | Table | Facts | Tiles | Plot | Commands | Notes | Details


@dataclass(frozen=True, slots=True)
class Document:
    """A title, the question or what was run, and blocks. tag: of which kind it is; command: what gives it again"""

    title: str
    blocks: Sequence[Block]
    subtitle: str = ""
    tag: str = ""
    command: str = ""

    @property
    def flat(self) -> Iterator[Block]:
        """All blocks, those of details in their place."""
        return _flat(self.blocks)


def _flat(blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        if isinstance(block, Details):
            yield from _flat(block.blocks)
        else:
            yield block


def spans(line: Line) -> Iterator[Span]:
    """The pieces of a line."""
    for piece in line if isinstance(line, tuple) else (line,):
        yield Span(piece) if isinstance(piece, str) else piece


def plain(line: Line) -> str:
    """A line without what its pieces mean."""
    return "".join(span.text for span in spans(line))


def document_json(document: Document) -> dict[str, Any]:
    """The fields of the document and its blocks by their names; `kind` of each block is its class. Text with meaning is
    {text, tone}, alone or in a list. A plot has its `figure`; of a table's columns `is_text` tells how they are
    aligned."""
    result: dict[str, Any] = _plain(document)
    return result


def _plain(value: Any) -> Any:
    if not is_dataclass(value):
        return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
    data = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.name != "draw"}
    match value:
        case Span():
            return data
        case Plot():
            data["figure"] = to_jsonable(value.draw())
        case Table():
            data["is_text"] = [value.is_text(column) for column in range(len(value.head))]
    return {"kind": type(value).__name__.lower(), **data}
