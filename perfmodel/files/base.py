"""The base of every specification read from a file, how a field names another file, and the default of a field."""

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticUndefined, core_schema

from perfmodel.files.blocks import Block, block_class

LONGEST_NAME = 60


class Spec(BaseModel):
    """Immutable, validated, and closed: a key that is not a field is an error, never ignored.

    about_key: what a key that is no field means to those who use it, as far as a kind of spec knows
    """

    about_key: ClassVar[Callable[[str], str] | None] = None

    # Validators are built when something is first read with them: a run uses a third of the specs that it imports.
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=False, allow_inf_nan=False, defer_build=True
    )


def as_file_name(name: str) -> str:
    """`name`. Raises ValueError for what is a path, or no file's name on some machine."""
    is_path = "/" in name or "\\" in name or name.startswith(".")
    if is_path or not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        raise ValueError(
            f"found {name[:LONGEST_NAME]!r}, allowed a name that a file can have (reports are called after it): up to "
            f"{LONGEST_NAME} characters without / and \\, the first no dot"
        )
    return name


# What files are called after: never a path.
FileName = Annotated[str, AfterValidator(as_file_name)]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A field that is a name in the file and the finished spec here: only its type is checked, nothing is copied."""

    description: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.is_instance_schema(source)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "description": self.description}


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
    """The one spec that a field's annotation holds: itself, or null, or several of; that of a block by its name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    arguments = typing.get_args(annotation)
    block = next((each for each in arguments if isinstance(each, Block)), None)
    if block is not None:
        return block_class(block.name)
    found = [model for each in arguments if (model := _model_in(each)) is not None]
    return found[0] if len(found) == 1 else None
