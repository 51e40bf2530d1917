"""The base of every specification read from a file, how a field names another file, and the default of a field."""

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticUndefined, core_schema

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema


_B = TypeVar("_B")


@dataclass(frozen=True, slots=True)
class _Home:
    """`package.module:name` of the class, and of the function that completes the file around the block."""

    spec: str
    complete: str | None


_HOMES: dict[str, _Home] = {}


def register_block(name: str, spec: str, complete: str | None = None) -> None:
    """The block `name` is read as the class at `spec` ("package.module:Class").

    complete: a function ("package.module:function") that fills in what a file with this block may leave out, in place
    """
    _HOMES[name] = _Home(spec, complete)


def block_class(name: str) -> "type[BaseModel]":
    """The class that describes the block called `name`."""
    found: type[BaseModel] = _loaded(_HOMES[name].spec)
    return found


def block_as(block: Any, cls: type[_B]) -> _B | None:
    """A scenario's block as what its room registered for it; None where the scenario has none."""
    if block is None:
        return None
    assert isinstance(block, cls), f"{type(block).__name__} is registered where {cls.__name__} is asked for"
    return block


def complete_blocks(data: dict[str, Any]) -> None:
    """Fill in what `data` may leave out because of the blocks that it has."""
    for name, home in _HOMES.items():
        if name in data and home.complete is not None:
            _loaded(home.complete)(data)


def _loaded(home: str) -> Any:
    module, name = home.split(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True, slots=True)
class Block:
    """A field of a spec that holds the block of this name: `plan: Annotated[Spec, Block("plan")] | None = None`."""

    name: str

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self._validated)

    def __get_pydantic_json_schema__(self, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        return handler(block_class(self.name).__pydantic_core_schema__)

    def _validated(self, value: Any) -> Any:
        return block_class(self.name).model_validate(value)


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
