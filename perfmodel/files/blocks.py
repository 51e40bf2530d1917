"""Registry of file blocks defined by higher packages, such as `plan:` or `published:` of a scenario.

`perfmodel/__init__.py` registers classes by block name; they load when used. Unknown blocks and keys are errors."""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema


_B = TypeVar("_B")


_BLOCK_PROVIDERS: dict[str, tuple[str, str | None]] = {}  # class path, and completing function


def register_block(name: str, spec: str, complete: str | None = None) -> None:
    """Read block `name` as the class at `spec` ("package.module:Class").

    complete: a function ("package.module:function") that fills in fields that such a file may omit, in place"""
    _BLOCK_PROVIDERS[name] = (spec, complete)


def block_class(name: str) -> "type[BaseModel]":
    """Class of block `name`."""
    cls: type[BaseModel] = resolve_name(_BLOCK_PROVIDERS[name][0])
    return cls


def block_as(block: Any, cls: type[_B]) -> _B | None:
    """`block` as its registered class; None if absent."""
    if block is None:
        return None
    assert isinstance(block, cls), f"{type(block).__name__} is registered where {cls.__name__} is asked for"
    return block


def complete_blocks(data: dict[str, Any]) -> None:
    """Fill in fields of `data` that its blocks allow to be omitted."""
    for name, (_, complete) in _BLOCK_PROVIDERS.items():
        if name in data and complete is not None:
            resolve_name(complete)(data)


@dataclass(frozen=True, slots=True)
class Block:
    """Field annotation: `plan: Annotated[Spec, Block("plan")] | None = None`."""

    name: str

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(lambda value: block_class(self.name).model_validate(value))

    def __get_pydantic_json_schema__(self, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        return handler(block_class(self.name).__pydantic_core_schema__)
