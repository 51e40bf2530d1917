"""A document as plain data, block by block, for a page that draws it itself."""

__all__ = ["document_json"]

from dataclasses import fields, is_dataclass
from typing import Any

from perfmodel.files.jsonable import to_jsonable
from perfmodel.report.document import Document, Picture, Plot, Span, Table


def document_json(document: Document) -> dict[str, Any]:
    """The fields of the document and its blocks by their names; `kind` of each block is its class.

    Text with meaning is {text, tone}, alone or in a list. A picture has its `svg`, a plot plotly's data and layout as
    `figure`; of a table's columns `is_text` tells how they are aligned.
    """
    found: dict[str, Any] = _plain(document)
    return found


def _plain(value: Any) -> Any:
    if not is_dataclass(value):
        return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
    data = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.name != "draw"}
    match value:
        case Span():
            return data
        case Picture():
            data["svg"] = value.draw()
        case Plot():
            data["figure"] = to_jsonable(value.draw().to_plotly_json())
        case Table():
            data["is_text"] = [value.is_text(column) for column in range(len(value.head))]
    return {"kind": type(value).__name__.lower(), **data}
