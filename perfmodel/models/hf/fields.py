"""`Fields`: a config.json read by the current name of a field, whatever name the file uses, with errors that say which.

Knows names, types and nesting; nothing of what a field means for the architecture."""

from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.tables import load_table

Json = Mapping[str, Any]

_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    name: tuple(names.split()) for name, names in load_table("config_fields").items()
}

_LARGEST = 10**12  # beyond any size in use: a slip of the keyboard, or a damaged file
_MAX_LAYERS = 10_000

# Where the text part of a multimodal file is nested.
_TEXT_BLOCKS = ("text_config", "language_config", "llm_config", "thinker_config")


class Fields:
    """One config.json (its text part), read by today's field names. `source` names the file in error messages.

    `class_defaults` (model type -> fields) answer for what a nested text part leaves to its class."""

    def __init__(self, config: Json, source: str, class_defaults: Mapping[str, Json] | None = None) -> None:
        if not isinstance(config, Mapping):
            raise SpecError(f"{source}: got {type(config).__name__}; expected a JSON object with the model's fields.")
        self.source = source
        self.outer = config
        self.config = _text_part(config)
        self.model_type = str(self.config.get("model_type") or config.get("model_type") or "unknown").replace("-", "_")
        self.fallback = (class_defaults or {}).get(self.model_type, {}) if self.config is not config else {}

    def error(self, sentence: str) -> SpecError:
        """A mistake in the file, which it names."""
        return SpecError(f"{self.source}: {sentence}")

    def get(self, name: str, default: Any = None) -> Any:
        """The value under any of the field's names; null counts as absent. The outer file answers for the text part."""
        for block in (self.config, self.outer, self.fallback):
            for key in _SYNONYMS.get(name, (name,)):
                value = block.get(key)
                if value is not None:
                    return value
        return default

    def has(self, *names: str) -> bool:
        """Whether any of the fields is there and not null."""
        return any(self.get(name) is not None for name in names)

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; without a default its absence is an error."""
        value = self.get(name, default)
        if value is None:
            names = " or ".join(_SYNONYMS.get(name, (name,))[:3])
            raise self.error(f"{names} is missing; without it the model's size is not known.")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        largest = _MAX_LAYERS if name == "num_hidden_layers" else _LARGEST
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= largest:
            raise self.error(f"{name}: got {value!r}; expected a whole number, {minimum} to {largest}.")
        return value

    def optional(self, name: str) -> int | None:
        """A whole number, or None where the field is absent, null or 0."""
        return self.integer(name, 0, minimum=0) or None

    def flag(self, name: str, default: bool = False) -> bool:
        """A true/false field."""
        value = self.get(name, default)
        if not isinstance(value, bool | int):
            raise self.error(f"{name}: got {value!r}; expected true or false.")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        """A string field."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name}: got {value!r}; expected a name.")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _LARGEST:
            raise self.error(f"{name}: got {value!r}; expected a positive number.")
        return value

    def optional_number(self, name: str) -> float | None:
        """A positive number, or None where the field is absent or null."""
        return self.number(name, 1.0) if self.has(name) else None

    def items(self, name: str) -> list[Any]:
        """A list; an absent one is empty."""
        value = self.get(name, [])
        if not isinstance(value, list | tuple):
            raise self.error(f"{name}: got {value!r}; expected a list.")
        return list(value)

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """A list with one entry per layer (a longer one is cut, it also describes prediction layers), or None."""
        value = self.get(name)
        if value is None or (isinstance(value, Sequence) and not isinstance(value, str) and not value):
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(f"{name}: got {value!r}; expected a list with one entry per layer.")
        if len(value) < num_layers:
            raise self.error(f"{name} has {len(value)} entries, but num_hidden_layers is {num_layers}.")
        return list(value[:num_layers])


def _text_part(config: Json) -> Json:
    """The block that describes the text decoder: nested in multimodal files, else the file itself."""
    for name in _TEXT_BLOCKS:
        block = config.get(name)
        if isinstance(block, Mapping) and block:
            return _text_part(block)
    return config
