"""What a server's arguments say of a scenario: fields, what has no part in time, what has one that is not modelled."""

__all__ = ["Reading", "read_server"]

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.specs.commands.arguments import Arguments, Given
from perfmodel.specs.commands.description import CommandDescription, ModelledFlag

_LINE = "line."


@dataclass(slots=True)
class Reading:
    """What a command says.

    data:       the blocks of a scenario file that it fills
    sources:    field -> the argument that set it, as it was written
    line:       what its engine's own rules still turn into fields
    irrelevant: what has no part in time, as it was written
    unmodelled: what has one that is not modelled, and why
    notes:      what was taken for what; assumed: what the command leaves open
    """

    data: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    line: dict[str, Any] = field(default_factory=dict)
    irrelevant: list[str] = field(default_factory=list)
    unmodelled: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any, source: str = "") -> None:
        """The field at `path` has `value`."""
        around, keys = self.data, path.split(".")
        for key in keys[:-1]:
            around = around.setdefault(key, {})
        around[keys[-1]] = value
        if source:
            self.sources[path] = source

    def move(self, name: str, path: str) -> None:
        """Make the argument `name` of `line`, if it was given, the field at `path`."""
        if name in self.line:
            self.put(path, self.line.pop(name), self.sources[f"line.{name}"])

    def get(self, path: str) -> Any:
        """The value of a field, or None."""
        value: Any = self.data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def read_server(
    arguments: Arguments, environment: Mapping[str, str], description: CommandDescription, place: str
) -> Reading:
    """What arguments and environment say.

    description, place: of the command; where it stands, for errors

    Raises SpecError for values that no field takes.
    """
    reading = Reading(notes=list(arguments.notes))
    for each in arguments.given.values():
        _take(each, reading)
    for name, value in environment.items():
        _take_variable(name, value, reading, description, place)
    return reading


def _take(given: Given, reading: Reading) -> None:
    rule = given.rule
    if rule.modelled is not None:
        _take_modelled(given, rule.modelled, reading)
    elif rule.kind == "irrelevant" or rule.says_nothing(given.value):
        reading.irrelevant.append(given.written)
    else:
        reading.unmodelled.append((given.written, rule.why))


def _take_modelled(given: Given, flag: ModelledFlag, reading: Reading) -> None:
    text, value = str(given.value), given.value
    if text in flag.not_modelled:
        reading.unmodelled.append((given.written, flag.why))
    if isinstance(value, bool):
        text = str(value).lower()
    if text in flag.map:
        value = flag.map[text]
    elif flag.only is not None and text not in flag.only:
        reading.unmodelled.append((given.written, flag.why))
        return
    if value is None or flag.field is None:
        if text not in flag.not_modelled:
            reading.irrelevant.append(given.written)
        return
    for each in flag.approximate:
        pattern, _, what = each.partition(": ")
        if fnmatchcase(text, pattern):
            reading.notes.append(f"{given.written}: {what}")
    if flag.inverse and isinstance(value, bool):
        value = not value
    if flag.field.startswith(_LINE):
        reading.line[flag.field.removeprefix(_LINE)] = value
        reading.sources[flag.field] = given.written
    else:
        reading.put(flag.field, value, given.written)


def _take_variable(name: str, value: str, reading: Reading, description: CommandDescription, place: str) -> None:
    rules = description.environment
    if name in rules.modelled:
        target = rules.modelled[name]
        rule = description.rules[target]
        if rule.modelled is None:
            raise SpecError(f"{place}: {name}: no field of a scenario.")
        if rule.modelled.field not in reading.sources:
            is_count = rule.modelled.kind == "integer" and value.isdecimal()
            read = int(value) if is_count else value
            _take_modelled(Given(rule, target, read, f"{name}={value}"), rule.modelled, reading)
        else:
            reading.irrelevant.append(f"{name}={value}")
    elif (why := description.unmodelled_variable(name)) is None:
        reading.irrelevant.append(name)
    else:
        reading.unmodelled.append((f"{name}={value}", why))
