"""The arguments of a command as its own parser takes them: which flag, with which value, or what is wrong.

As argparse and click do: `--flag value`, `--flag=value`, `-f value`, `--no-flag`, underscores for hyphens, unambiguous
beginnings of names; the last of several counts. As vLLM does: `-O3`, `--json-flag '{"key": 1}'`, `--json-flag.key 1`,
`--json-flag.key+ item` (vllm/utils/argparse_utils.py, FlexibleArgumentParser).
"""

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
_MOST_LEVELS = 20


@dataclass(frozen=True, slots=True)
class Given:
    """A flag with its value.

    written: as it stood in the line: `--tensor-parallel-size 4`
    """

    rule: FlagRule
    name: str
    value: Any
    written: str


@dataclass(slots=True)
class Arguments:
    """given: by the flag's name, the last where one is given twice; notes: what was taken for what."""

    given: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, each: Given) -> None:
        """A flag more."""
        before = self.given.pop(each.name, None)
        if before is not None and before.value != each.value:
            self.notes.append(f"{before.written} and then {each.written}: the last counts")
        self.given[each.name] = each


def read_arguments(words: Sequence[str], description: CommandDescription, place: str) -> Arguments:
    """The flags among `words`.

    place: of the command, in errors

    Raises SpecError for an unknown flag, with the nearest known ones, for a value that is missing or of another kind,
    and for a word that nothing is known of.
    """
    found, left = Arguments(), deque(words)
    while left:
        word = left.popleft()
        if isinstance(word, Unresolved):
            raise SpecError(f"{place}: {word} {word.reason}.")
        if not word.strip():
            raise SpecError(
                f"{place}: found a word of blanks; a backslash that goes on in the next line must be the line's last."
            )
        if word == "--":
            continue
        if not word.startswith("-") or _NUMBER.fullmatch(word):
            _positional(word, found, description, place)
            continue
        name, value = _split(word, description)
        rule, is_negated = _rule(name, description, found, place)
        for each in _given(rule, name, value, is_negated, left, description, place):
            found.add(each)
    return found


def flags_of_mapping(data: Mapping[str, Any], description: CommandDescription, place: str) -> Arguments:
    """The flags of a YAML file, whose keys they are. Raises SpecError as `read_arguments` does."""
    found = Arguments()
    for key, value in _flat(data):
        name = (
            key.replace("_", "-") if "." not in key else key.partition(".")[0].replace("_", "-") + key[key.index(".") :]
        )
        rule, is_negated = _rule(f"--{name}", description, found, place)
        if name in description.parents and isinstance(value, str):
            for each in _nested(name, value, description, place):
                found.add(each)
            continue
        read = _checked(rule, value, f"{key}: {value}", place) if not isinstance(value, bool) else value != is_negated
        found.add(Given(rule, rule.same_as or name, read, f"{key}: {json.dumps(value)}"))
    return found


def _positional(word: str, found: Arguments, description: CommandDescription, place: str) -> None:
    name = description.positional
    if name is None or name in found.given:
        already = "" if name is None or name not in found.given else f" beside {found.given[name].value!r}"
        raise SpecError(
            f"{place}: {description.title}: found the word {word!r}{already}, which no flag takes; quote values with "
            f"blanks, or leave it out."
        )
    rule = description.rules[name]
    found.add(Given(rule, name, word, word))


def _split(word: str, description: CommandDescription) -> tuple[str, str | None]:
    """The flag and what is attached to it."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        head, dot, tail = name.partition(".")
        return head.replace("_", "-") + dot + tail, value if equals else None
    name, equals, value = word[1:].partition("=")
    head, dot, tail = name.partition(".")
    if head in description.short:
        return f"--{description.short[head]}{dot}{tail}", value if equals else None
    if name[:1] in description.short and len(name) > 1 and len(name[:1]) == 1:  # -O3, -q fp8
        return f"--{description.short[name[0]]}", word[2:].removeprefix("=")
    return word.partition("=")[0], value if equals else None


def _rule(name: str, description: CommandDescription, found: Arguments, place: str) -> tuple[FlagRule, bool]:
    """What is known of a flag, and whether it is negated."""
    plain = name.removeprefix("--")
    if plain in description.config:
        return FlagRule(plain, "irrelevant", "one"), False
    rule = description.rule(plain)
    if rule is None and plain in description.parents:
        return FlagRule(plain, "modelled", "one"), False
    if rule is not None:
        return rule, False
    positive = plain.removeprefix("no-")
    if description.can_negate and plain != positive:
        rule = description.rule(positive)
        if rule is not None and rule.takes == "nothing":
            return rule, True
    known = [*description.rules, *description.parents, *description.config]
    longer = sorted({each for each in known if each.startswith(plain) and "." not in each}) if len(plain) > 2 else []
    if len(longer) == 1:
        found.notes.append(f"{name} is taken for --{longer[0]}, the only flag that begins so")
        return description.rule(longer[0]) or FlagRule(longer[0], "modelled", "one"), False
    near = (
        did_you_mean(plain, known) if not longer else f" It could be {', '.join(f'--{each}' for each in longer[:4])}."
    )
    what = "a flag" if name.startswith("--") else "a short flag"
    raise SpecError(
        f"{place}: {name}: {description.title} of version {description.version} has no such {what[2:]}.{near} Leave it "
        f"out if it has no part in time."
    )


def _given(
    rule: FlagRule,
    name: str,
    value: str | None,
    is_negated: bool,
    left: deque[str],
    description: CommandDescription,
    place: str,
) -> Iterator[Given]:
    plain = rule.name if "*" not in rule.name else name.removeprefix("--")
    is_added = name.endswith("+")
    if rule.takes == "nothing" and not (rule.modelled and rule.modelled.kind != "switch"):
        text = "" if value is None else f"={value}"
        on = not is_negated if value is None else _switch(value, name, place) != is_negated
        yield Given(rule, rule.same_as or plain, on, f"--{'no-' if is_negated else ''}{plain}{text}")
        return
    values = [value] if value is not None else list(_following(rule, left, name, place))
    for each in values:
        if isinstance(each, Unresolved):
            raise SpecError(f"{place}: {name} {each} {each.reason}.")
    written = " ".join([name, *values]).strip()
    if plain in description.parents and "." not in name:
        yield from _nested(plain, values[0] if values else "", description, place)
        return
    read: Any = values if rule.takes == "many" else (values[0] if values else True)
    if is_added:
        read = _list(values[0])
    yield Given(rule, rule.same_as or plain.rstrip("+"), _checked(rule, read, written, place), written)


def _following(rule: FlagRule, left: deque[str], name: str, place: str) -> Iterator[str]:
    """The words that a flag takes."""
    most = {"one": 1, "json": 1, "maybe": 1}.get(rule.takes, len(left))
    taken = 0
    while left and taken < most and (not left[0].startswith("-") or _NUMBER.fullmatch(left[0]) or left[0] == "-"):
        yield left.popleft()
        taken += 1
    if not taken and rule.takes != "maybe":
        after = f", and not {left[0]!r}" if left else ""
        raise SpecError(f"{place}: {name} needs a value behind it{after}; give one, or leave the flag out.")


def _nested(parent: str, text: str, description: CommandDescription, place: str) -> Iterator[Given]:
    """The keys of a flag's JSON, each as a flag with a dot."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        source = getattr(error, "msg", "nested too deep")
        if re.fullmatch(r"-?\d+", text):
            data = {"level": text}  # --compilation-config 3, as before vLLM 0.12
        else:
            raise SpecError(
                f"{place}: --{parent}: found {text[:60]!r}, allowed JSON in quotes, as in '{{\"key\": 1}}' ({source})."
            ) from None
    if isinstance(data, int):
        data = {"level": data}
    if not isinstance(data, Mapping):
        raise SpecError(f"{place}: --{parent}: found {text[:60]!r}, allowed a mapping of JSON.")
    for key, value in _flat(data):
        name = f"{parent}.{key}"
        rule = description.rule(name)
        if rule is None:
            mine = [each.removeprefix(f"{parent}.") for each in description.rules if each.startswith(f"{parent}.")]
            raise SpecError(
                f"{place}: --{parent}: {description.title} of version {description.version} has no key {key!r} "
                f"there.{did_you_mean(key, mine)} Leave it out if it has no part in time."
            )
        written = f"--{name} {value if isinstance(value, str) else json.dumps(value)}"
        yield Given(rule, rule.same_as or name, _checked(rule, value, written, place), written)


def _flat(data: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value and depth < _MOST_LEVELS:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _switch(value: str, name: str, place: str) -> bool:
    found = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(value.lower())
    if found is None:
        raise SpecError(f"{place}: {name}={value}: found {value!r}, allowed nothing, true or false.")
    return found


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _checked(rule: FlagRule, value: Any, written: str, place: str) -> Any:
    """The value as the kind that the flag takes. Raises SpecError for another."""
    if rule.modelled is None or not isinstance(value, str):
        return value
    kind, known = rule.modelled.kind, rule.modelled.map
    if kind == "text" or value in known or rule.takes == "many":
        return value
    allowed = {"integer": "a whole number", "number": "a number", "switch": "true or false", "json": "JSON"}[kind]
    try:
        if kind == "integer":
            return int(parse_count(value))
        if kind == "number":
            return float(value)
        if kind == "switch":
            return _WORDS[value.lower()]
        return json.loads(value)
    except (KeyError, ValueError, OverflowError, RecursionError):
        raise SpecError(f"{place}: {written}: found {value[:60]!r}, allowed {allowed}.") from None
