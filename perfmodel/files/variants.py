"""`VariantSpec`: a spec with a discriminator, whose variants use different fields."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from perfmodel.files.base import Spec

UsedBy = Mapping[str, tuple[str, ...]]  # field -> the variants that use it


class VariantSpec(Spec):
    """Rejects a field that the variant does not use, and names the fields that it uses."""

    discriminator: ClassVar[str] = ""  # the field that selects the variant; "" if all fields are always used
    used_by: ClassVar[UsedBy] = {}  # the variants that use a field, for fields that not all variants use
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()  # groups of mutually exclusive fields

    @classmethod
    def unused_fields(cls, variant: object) -> list[str]:
        """The fields that `variant` does not use."""
        return [name for name, variants in cls.used_by.items() if variant not in variants]

    @model_validator(mode="after")
    def _reject_unused_fields(self) -> "VariantSpec":
        variant = getattr(self, self.discriminator) if self.discriminator else None
        for name in self.unused_fields(variant):
            if self._is_given(name):
                own = [field for field, variants in self.used_by.items() if variant in variants]
                fields = f"uses {', '.join(own)}" if own else "has no fields of its own"
                others = " or ".join(self.used_by[name])
                raise ValueError(
                    f"got {name} with {self.discriminator}={variant}, which {fields}; remove it, or use {others}"
                )
        for group in self.alternatives:
            given = [name for name in group if self._is_given(name)]
            if len(given) > 1:
                raise ValueError(f"got {' and '.join(given)}; expected only one of them")
        return self

    def _is_given(self, name: str) -> bool:
        field = type(self).model_fields[name]
        default = field.get_default(call_default_factory=True, validated_data={})
        return name in self.model_fields_set and getattr(self, name) != default


def drop_unused_fields(model: type[VariantSpec], block: dict[str, Any], overridden: set[str]) -> None:
    """Remove from `block` the fields of the previous variant, and the alternatives of a field that an override set.

    overridden: fields that overrides set; these are kept
    """
    unused = model.unused_fields(block.get(model.discriminator)) if model.discriminator in overridden else []
    for group in model.alternatives:
        unused += group if overridden & set(group) else ()
    for name in unused:
        if name not in overridden:
            block.pop(name, None)
