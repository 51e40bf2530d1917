"""Parse a command's arguments as its own parser does.

argparse and click: `--flag value`, `--flag=value`, `-f value`, `--no-flag`, underscores for hyphens, unambiguous
prefixes, the last of several counts. vLLM: `-O3`, `--json-flag '{"key": 1}'`, `--json-flag.key 1`,
`--json-flag.key+ item` (vllm/utils/argparse_utils.py, FlexibleArgumentParser)."""

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.units import parse_count
from perfmodel.specs.commands.description import CommandDescription, FlagRule
from perfmodel.specs.commands.shell import Unresolved

_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_SWITCH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_ALLOWED = {"integer": "a whole number", "number": "a number", "switch": "true or false", "json": "JSON"}
_MAX_LEVELS = 20


@dataclass(frozen=True, slots=True)
class Given:
    """A flag and its value."""

    rule: FlagRule
    name: str
    value: Any
    written: str  # as it stood in the line: `--tensor-parallel-size 4`


@dataclass(slots=True)
class Arguments:
    """Flags of one command.

    description: of its flags; place: for errors; given: last value by flag name; notes: approximations made"""

    description: CommandDescription
    place: str
    given: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self, words: Sequence[str]) -> "Arguments":
        """Add the flags in `words`. SpecError for an unknown flag (with the nearest), a bad value, a stray word."""
        left = deque(words)
        while left:
            word = left.popleft()
            if isinstance(word, Unresolved):
                raise self._error(f"{word} {word.reason}.")
            if not word.strip():
                raise self._error(
                    "got a word of blanks; a backslash that goes on in the next line must be the line's last."
                )
            if word == "--":
                continue
            if word.startswith("-") and not _NUMBER.fullmatch(word):
                self._read_flag(word, left)
                continue
            name = self.description.positional
            if name is None or name in self.given:
                already = "" if name is None else f" beside {self.given[name].value!r}"
                raise self._error(
                    f"{self.description.title}: got the word {word!r}{already}, which no flag takes; quote values "
                    f"with blanks, or leave it out."
                )
            self.add(Given(self.description.rules[name], name, word, word))
        return self

    def read_mapping(self, data: Mapping[str, Any]) -> "Arguments":
        """Add flags from a YAML mapping. Raises SpecError as `read` does."""
        for key, value in _flat(data):
            head, dot, tail = key.partition(".")
            name = head.replace("_", "-") + dot + tail
            rule, is_negated = self._rule(f"--{name}")
            if name in self.description.parents and isinstance(value, str):
                self._add_nested(name, value)
                continue
            read = value != is_negated if isinstance(value, bool) else self._checked(rule, value, f"{key}: {value}")
            self.add(Given(rule, rule.same_as or name, read, f"{key}: {json.dumps(value)}"))
        return self

    def add(self, flag: Given) -> None:
        before = self.given.pop(flag.name, None)
        if before is not None and before.value != flag.value:
            self.notes.append(f"{before.written} and then {flag.written}: the last counts")
        self.given[flag.name] = flag

    def _error(self, sentence: str) -> SpecError:
        return SpecError(f"{self.place}: {sentence}")

    def _read_flag(self, word: str, left: deque[str]) -> None:
        """Read a flag and its values from `left`."""
        name, value = _split(word, self.description)
        rule, is_negated = self._rule(name)
        plain = rule.name if "*" not in rule.name else name.removeprefix("--")
        if rule.takes == "nothing" and (rule.modelled is None or rule.modelled.kind == "switch"):
            is_on = True if value is None else _SWITCH.get(value.lower())
            if is_on is None:
                raise self._error(f"{name}={value}: got {value!r}; expected nothing, true or false.")
            written = f"--{'no-' if is_negated else ''}{plain}{'' if value is None else f'={value}'}"
            self.add(Given(rule, rule.same_as or plain, is_on != is_negated, written))
            return
        values = [value] if value is not None else []
        most = 0 if values else {"one": 1, "json": 1, "maybe": 1}.get(rule.takes, len(left))
        while left and len(values) < most and (left[0][:1] != "-" or left[0] == "-" or _NUMBER.fullmatch(left[0])):
            values.append(left.popleft())
        if not values and rule.takes != "maybe":
            after = f", and not {left[0]!r}" if left else ""
            raise self._error(f"{name} needs a value behind it{after}; give one, or leave the flag out.")
        for text in values:
            if isinstance(text, Unresolved):
                raise self._error(f"{name} {text} {text.reason}.")
        written = " ".join([name, *values]).strip()
        if plain in self.description.parents and "." not in name:
            self._add_nested(plain, values[0] if values else "")
            return
        read: Any = values if rule.takes == "many" else (values[0] if values else True)
        if name.endswith("+"):  # an item more
            read = [part.strip() for part in values[0].split(",")]
        self.add(Given(rule, rule.same_as or plain.rstrip("+"), self._checked(rule, read, written), written))

    def _rule(self, name: str) -> tuple[FlagRule, bool]:
        """Rule of a flag, and whether it is negated."""
        about, plain = self.description, name.removeprefix("--")
        if plain in about.config:
            return FlagRule(plain, "irrelevant", "one"), False
        rule = about.rule(plain)
        if rule is None and plain in about.parents:
            rule = FlagRule(plain, "modelled", "one")
        if rule is not None:
            return rule, False
        positive = about.rule(plain.removeprefix("no-")) if about.can_negate and plain.startswith("no-") else None
        if positive is not None and positive.takes == "nothing":
            return positive, True
        known = [*about.rules, *about.parents, *about.config]
        longer = sorted({flag for flag in known if flag.startswith(plain) and "." not in flag} if plain[2:] else [])
        if len(longer) == 1:
            self.notes.append(f"{name} is taken for --{longer[0]}, the only flag that begins so")
            return about.rule(longer[0]) or FlagRule(longer[0], "modelled", "one"), False
        could_be = ", ".join(f"--{flag}" for flag in longer[:4])
        near = f" It could be {could_be}." if longer else did_you_mean(plain, known)
        what = "flag" if name.startswith("--") else "short flag"
        raise self._error(
            f"{name}: {about.title} of version {about.version} has no such {what}.{near} Leave it out if it has no "
            f"part in time."
        )

    def _add_nested(self, parent: str, text: str) -> None:
        """Add each key of a flag's JSON as a dotted flag."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            if not re.fullmatch(r"-?\d+", text):
                raise self._error(
                    f"--{parent}: got {text[:60]!r}; expected JSON in quotes, as in '{{\"key\": 1}}' "
                    f"({getattr(error, 'msg', 'nested too deep')})."
                ) from None
            data = {"level": text}
        if isinstance(data, int):
            data = {"level": data}  # --compilation-config 3, as before vLLM 0.12
        if not isinstance(data, Mapping):
            raise self._error(f"--{parent}: got {text[:60]!r}; expected a mapping of JSON.")
        for key, value in _flat(data):
            name = f"{parent}.{key}"
            rule = self.description.rule(name)
            if rule is None:
                rules = self.description.rules
                keys = [flag.removeprefix(f"{parent}.") for flag in rules if flag.startswith(f"{parent}.")]
                raise self._error(
                    f"--{parent}: {self.description.title} of version {self.description.version} has no key {key!r} "
                    f"there.{did_you_mean(key, keys)} Leave it out if it has no part in time."
                )
            written = f"--{name} {value if isinstance(value, str) else json.dumps(value)}"
            self.add(Given(rule, rule.same_as or name, self._checked(rule, value, written), written))

    def _checked(self, rule: FlagRule, value: Any, written: str) -> Any:
        """`value` converted to the flag's kind; raises SpecError."""
        if rule.modelled is None or not isinstance(value, str):
            return value
        kind = rule.modelled.kind
        if kind == "text" or value in rule.modelled.map or rule.takes == "many":
            return value
        try:
            if kind == "integer":
                return int(parse_count(value))
            if kind == "number":
                return float(value)
            return _WORDS[value.lower()] if kind == "switch" else json.loads(value)
        except (KeyError, ValueError, OverflowError, RecursionError):
            raise self._error(f"{written}: got {value[:60]!r}; expected {_ALLOWED[kind]}.") from None


def _split(word: str, description: CommandDescription) -> tuple[str, str | None]:
    name, equals, value = word.partition("=")
    head, dot, tail = name.partition(".")
    attached = value if equals else None
    if word.startswith("--"):
        return head.replace("_", "-") + dot + tail, attached
    if head[1:] in description.short:
        return f"--{description.short[head[1:]]}{dot}{tail}", attached
    if name[1:2] in description.short and len(name) > 2:  # -O3, -q fp8
        return f"--{description.short[name[1]]}", word[2:].removeprefix("=")
    return name, attached


def _flat(data: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value and depth < _MAX_LEVELS:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value
