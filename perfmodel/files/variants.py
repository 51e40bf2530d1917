"""`VariantSpec`: a spec of several kinds, one of its fields says which, whose fields are not read by all of them."""

__all__ = ["ReadBy", "VariantSpec", "leave_out_unread"]

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from perfmodel.files.base import Spec

ReadBy = Mapping[str, tuple[str, ...]]  # field -> the kinds that read it


class VariantSpec(Spec):
    """A value that nothing would read is an error that names the fields which are read.

    chosen_by:    the field that says which kind it is; "": all fields are read
    read_by:      of the fields that some kinds read and others do not: the kinds that do
    alternatives: groups of fields of which at most one may be given
    """

    chosen_by: ClassVar[str] = ""
    read_by: ClassVar[ReadBy] = {}
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @classmethod
    def unread(cls, kind: object) -> list[str]:
        """The fields that `kind` does not read."""
        return [name for name, kinds in cls.read_by.items() if kind not in kinds]

    @model_validator(mode="after")
    def _has_nothing_that_is_not_read(self) -> "VariantSpec":
        kind = getattr(self, self.chosen_by) if self.chosen_by else None
        for name in self.unread(kind):
            if self._is_given(name):
                own = [field for field, kinds in self.read_by.items() if kind in kinds]
                fields = f"reads {', '.join(own)}" if own else "has no fields of its own"
                others = " or ".join(self.read_by[name])
                raise ValueError(
                    f"got {name} with {self.chosen_by}={kind}, which {fields}; leave it out, or use {others}"
                )
        for group in self.alternatives:
            given = [name for name in group if self._is_given(name)]
            if len(given) > 1:
                raise ValueError(f"got {' beside '.join(given)}; give one of them")
        return self

    def _is_given(self, name: str) -> bool:
        field = type(self).model_fields[name]
        default = field.get_default(call_default_factory=True, validated_data={})
        return name in self.model_fields_set and getattr(self, name) != default


def leave_out_unread(model: type[VariantSpec], block: dict[str, Any], overridden: set[str]) -> None:
    """Takes out of `block` what belongs to another kind, or is an alternative, of what an override asked for; what
    overrides gave stays."""
    unread = model.unread(block.get(model.chosen_by)) if model.chosen_by in overridden else []
    for group in model.alternatives:
        unread += group if overridden & set(group) else ()
    for name in unread:
        if name not in overridden:
            block.pop(name, None)
