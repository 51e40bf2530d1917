"""Base classes of specs read from files, specs with variants, references to other files, and field defaults."""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticUndefined, core_schema

from perfmodel.files.blocks import Block, block_class

LONGEST_NAME = 60


class Spec(BaseModel):
    """Immutable, validated, and closed: a key that is not a field is an error, never ignored.

    about_key: what a key that is no field means to those who use it, as far as a kind of spec knows"""

    about_key: ClassVar[Callable[[str], str] | None] = None

    # Validators are built when something is first read with them: a run uses a third of the specs that it imports.
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=False, allow_inf_nan=False, defer_build=True
    )


UsedBy = Mapping[str, tuple[str, ...]]  # field -> the variants that use it


class CheckedSpec(Spec):
    """Rejects fields that do not go together."""

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        for sentence in self._conflicts():
            raise ValueError(sentence)
        return self

    def _conflicts(self) -> Iterator[str]:
        """A sentence for each reason why the fields do not go together; the first one is reported."""
        return iter(())


class VariantSpec(CheckedSpec):
    """Rejects a field that the variant does not use, and names the fields that it uses."""

    discriminator: ClassVar[str] = ""  # the field that selects the variant; "" if all fields are always used
    used_by: ClassVar[UsedBy] = {}  # the variants that use a field, for fields that not all variants use
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()  # groups of mutually exclusive fields

    @classmethod
    def unused_fields(cls, variant: object) -> list[str]:
        """Fields that `variant` does not use."""
        return [name for name, variants in cls.used_by.items() if variant not in variants]

    def _conflicts(self) -> Iterator[str]:
        variant = getattr(self, self.discriminator) if self.discriminator else None
        for name in self.unused_fields(variant):
            if self._is_given(name):
                own = [field for field, variants in self.used_by.items() if variant in variants]
                fields = f"uses {', '.join(own)}" if own else "has no fields of its own"
                others = " or ".join(self.used_by[name])
                yield f"got {name} with {self.discriminator}={variant}, which {fields}; remove it, or use {others}"
        for group in self.alternatives:
            given = [name for name in group if self._is_given(name)]
            if len(given) > 1:
                yield f"got {' and '.join(given)}; expected only one of them"

    def _is_given(self, name: str) -> bool:
        default = type(self).model_fields[name].get_default(call_default_factory=True, validated_data={})
        return name in self.model_fields_set and getattr(self, name) != default


def drop_unused_fields(model: type[VariantSpec], block: dict[str, Any], overridden: set[str]) -> None:
    """Drop from `block` the previous variant's fields and alternatives of fields that overrides set (`overridden`)."""
    unused = model.unused_fields(block.get(model.discriminator)) if model.discriminator in overridden else []
    for group in model.alternatives:
        unused += group if overridden & set(group) else ()
    for name in unused:
        if name not in overridden:
            block.pop(name, None)


def as_file_name(name: str) -> str:
    """`name`. Raises ValueError for paths and names invalid on some platform."""
    is_path = "/" in name or "\\" in name or name.startswith(".")
    if is_path or not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        raise ValueError(
            f"got {name[:LONGEST_NAME]!r}; expected a name that a file can have (reports are called after it): up to "
            f"{LONGEST_NAME} characters without / and \\, the first no dot"
        )
    return name


# Names of files: never a path.
FileName = Annotated[str, AfterValidator(as_file_name)]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A field that is a name in the file and a finished spec here: type-checked, not copied."""

    description: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.is_instance_schema(source)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "description": self.description}


def default_at(model: type[BaseModel], path: Sequence[str | int]) -> Any:
    """Default of the field at `path` below `model`; None if it has none or does not exist."""
    cls: type[BaseModel] | None = model
    value: Any = None
    for part in path:
        if isinstance(value, BaseModel):
            value = getattr(value, str(part), None)
            continue
        if cls is None:
            return None
        field = cls.model_fields.get(str(part))
        if field is None:  # a position in a list, which has no default of its own, or unknown
            value = None
            continue
        value = None if field.default is PydanticUndefined else field.default
        cls = _model_in(field.annotation)
    return value


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The single spec in a field's annotation (optional, or in a list); of a block by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    arguments = typing.get_args(annotation)
    block = next((argument for argument in arguments if isinstance(argument, Block)), None)
    if block is not None:
        return block_class(block.name)
    models = [model for argument in arguments if (model := _model_in(argument)) is not None]
    return models[0] if len(models) == 1 else None
