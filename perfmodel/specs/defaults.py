"""What a field has where a file does not write it: for `--set engine.max_num_seqs=2x`."""

__all__ = ["default_at"]

import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined


def default_at(model: type[BaseModel], path: Sequence[str | int]) -> Any:
    """The default of the field at `path` below `model`; None where it has none, or there is no such field."""
    cls: type[BaseModel] | None = model
    value: Any = None
    for part in path:
        if isinstance(value, BaseModel):
            value = getattr(value, str(part), None)
            continue
        if cls is None:
            return None
        field = cls.model_fields.get(str(part))
        if field is None:  # a position in a list, or unknown
            continue
        value = None if field.default is PydanticUndefined else field.default
        cls = _model_in(field.annotation)
    return value


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The one model that a field holds: itself, or null, or several of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [model for each in typing.get_args(annotation) if (model := _model_in(each)) is not None]
    return found[0] if len(found) == 1 else None
