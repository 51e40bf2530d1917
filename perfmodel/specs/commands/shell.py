"""From a script to its commands: variables that it sets itself replaced, files that it writes kept; nothing is run.

What only a run could know, the output of `$(...)`, a condition, a loop, is named where a command needs it.
"""

__all__ = ["ANYWHERE", "PodPlacement", "ShellCommand", "ShellScript", "Unresolved", "expanded_text", "read_shell"]

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from perfmodel.errors import SpecError
from perfmodel.specs.commands.arithmetic import shell_arithmetic
from perfmodel.specs.commands.lexing import (
    HereDocument,
    Operator,
    Part,
    ShellReference,
    Token,
    Word,
    parts_of,
    tokens_of,
)

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)(\+?)=")
_OPENS, _CLOSES = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac")
_PASSED_OVER = ("then", "do", "else", "elif", "{", "}", "!", "time", "exec", "in")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_REDIRECTS = ("<", ">", ">>", ">|", "<<<", ">&", "<&", "&>", "&>>")
_DEEP = 20
_MOST_EXPANDED = 100_000  # characters of a word whose variables are replaced
_LONG = 200  # characters of a word that errors still show as a whole


class Unresolved(str):
    """A word that is not known without running something: as it was written, and why.

    reason: a sentence's end: `is the output of a command, ...`
    """

    reason: str

    def __new__(cls, text: str, reason: str) -> "Unresolved":
        made = super().__new__(cls, text)
        made.reason = reason
        return made


class PodPlacement(NamedTuple):
    """Where a manifest runs a container, as far as it says.

    replicas: how many equal groups of `size` pods; device: the GPU's name as its node is labelled; gpus: of a pod
    """

    replicas: int | None = None
    size: int | None = None
    device: str | None = None
    gpus: int | None = None


ANYWHERE = PodPlacement()


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """words: of the command; environment: what is set for it, by itself or exported before; line: from 1."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int
    placement: PodPlacement = ANYWHERE


@dataclass(frozen=True, slots=True)
class ShellScript:
    """files: those that it writes from lines of its own (`cat > FILE <<EOF`), by name."""

    commands: tuple[ShellCommand, ...]
    files: Mapping[str, str]


@dataclass
class _State:
    place: str
    given: Mapping[str, str]
    values: dict[str, list[str]] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    conditions: list[int] = field(default_factory=list)  # lines of what is open
    used: set[str] = field(default_factory=set)  # the script's own variables, which words are made of


def read_shell(text: str, place: str = "the line", given: Mapping[str, str] | None = None) -> ShellScript:
    """The commands of `text`, in their order.

    place: what errors call the text
    given: variables that are set before it

    Raises SpecError for quotes and brackets that are not closed.
    """
    state, commands, files = _State(place, given or {}), [], {}
    for words, documents, targets in _commands(tokens_of(text, place)):
        command = _command(words, state)
        for document, target in zip(documents, targets, strict=False):
            files[str(target)] = document.text if document.is_literal else _plain(document, state)
        if command is not None:
            commands.append(command)
            if command.words[0] == "tee" and documents:
                files[command.words[-1]] = _plain(documents[0], state)
    return ShellScript(tuple(commands), files)


def expanded_text(word: Word, place: str) -> str:
    """One word outside a script, with its defaults in place of what is not set."""
    found = _expanded(word, _State(place, {}))
    return found[0] if found else ""


def _commands(tokens: list[Token]) -> Iterator[tuple[list[Word | Operator], list[HereDocument], list[str]]]:
    """The words of each command, arrays' brackets among them, its here-documents, and the files that it writes to."""
    words: list[Word | Operator] = []
    targets: list[str] = []
    documents = [token for token in tokens if isinstance(token, HereDocument)]
    in_array, skips, here = False, False, 0
    for token in tokens:
        if isinstance(token, HereDocument):
            continue
        if isinstance(token, Word):
            if skips:
                targets += [token.plain or "".join(each for each in token.parts if isinstance(each, str))]
            else:
                words.append(token)
            skips = False
        elif token.text in ("<<", "<<-"):
            here += 1
        elif token.text in _REDIRECTS:
            if words and isinstance(words[-1], Word) and (words[-1].plain or "").isdigit() and token.text != "<<<":
                words.pop()
            skips = True
        elif token.text == "(" and words and isinstance(words[-1], Word) and _begins_array(words[-1]):
            in_array = True
            words.append(token)
        elif in_array:
            if token.text != "\n":
                words.append(token)
            in_array = token.text != ")"
        else:
            if words:
                yield words, documents[:here], targets
            documents, words, targets, here = documents[here:], [], [], 0
    if words:
        yield words, documents[:here], targets


def _begins_array(word: Word) -> bool:
    return isinstance(word.parts[-1], str) and word.parts[-1].endswith("=") if word.parts else False


def _command(tokens: list[Word | Operator], state: _State) -> ShellCommand | None:
    """The command that the tokens are, with the shell's own taken off; None where it is the shell's alone."""
    words = [token for token in tokens if isinstance(token, Word)]
    line = words[0].line if words else 0
    while words and (plain := words[0].plain) is not None:
        if plain in ("for", "select") and len(words) > 1:
            _loop(words, state)
            return None
        if plain in _OPENS:
            state.conditions.append(line)
        elif plain in _CLOSES:
            del state.conditions[-1:]
        elif plain not in _PASSED_OVER:
            break
        words = words[1:]
    if not words:
        return None
    own, is_array = {}, len(words) != len(tokens) and any(isinstance(token, Operator) for token in tokens)
    declares = words[0].plain in _DECLARES
    if declares:
        words = [word for word in words[1:] if not (word.plain or "").startswith("-")]
    first = 0
    while first < len(words) and (name := _assigned(words[first])) is not None:
        values = _expanded_all(words[first + 1 :], state) if is_array else [_value(words[first], state)]
        own[name[0]] = [*state.values.get(name[0], []), *values] if name[1] and is_array else values
        if name[1] and not is_array:
            own[name[0]] = ["".join((*state.values.get(name[0], []), *values))]
        first = len(words) if is_array else first + 1
    words = words[first:]
    if not words or declares:
        _assign(own, state, line, declares)
        return None
    found = _expanded_all(words, state)
    environment = {name: value for name, value in state.exported.items() if name not in state.used}
    environment |= {name: " ".join(values) for name, values in own.items()}
    return ShellCommand(tuple(found), environment, line) if found else None


def _loop(words: list[Word], state: _State) -> None:
    name, line = words[1].plain or "", words[0].line
    values = _expanded_all(words[3:], state) if len(words) > 2 and words[2].plain == "in" else []
    state.conditions.append(line)
    reason = f"takes {len(values) or 'several'} values in a loop (line {line}); put one of them in its place"
    state.values[name] = values if len(values) == 1 else [Unresolved(f"${name}", reason)]


def _assigned(word: Word) -> tuple[str, bool] | None:
    """The name that a word assigns to, and whether it adds to what was there."""
    first = word.parts[0] if word.parts else ""
    match = _ASSIGNMENT.match(first) if isinstance(first, str) else None
    return None if match is None else (match[1], bool(match[2]))


def _value(word: Word, state: _State) -> str:
    assert isinstance(word.parts[0], str)
    rest = word.parts[0][word.parts[0].index("=") + 1 :]
    quoted: list[Part] = [
        part if isinstance(part, str) else replace(part, is_quoted=True) for part in (rest, *word.parts[1:])
    ]
    found = _expanded(Word(word.line, quoted, is_quoted=True), state)
    return found[0] if found else ""


def _assign(own: Mapping[str, list[str]], state: _State, line: int, declares: bool) -> None:
    for name, values in own.items():
        known = values
        if state.conditions:
            reason = f"is set under a condition (line {line}); put its value in its place"
            known = [Unresolved(f"${name}", reason)]
        state.values[name] = known
        if declares:
            state.exported[name] = " ".join(known) if len(known) != 1 else known[0]


def _expanded_all(words: list[Word], state: _State) -> list[str]:
    return [text for word in words for text in _expanded(word, state)]


def _expanded(word: Word, state: _State, depth: int = 0) -> list[str]:
    """The words that one becomes: references replaced, those without quotes split at blanks."""
    texts: list[str] = [""]
    was_text, unknown = word.is_quoted, ""
    for part in word.parts:
        if isinstance(part, str):
            texts[-1] += part
            was_text = True
            continue
        values = _values(part, state, depth)
        unknown = unknown or next((each.reason for each in values if isinstance(each, Unresolved)), "")
        if not part.is_quoted:
            values = [piece for value in values for piece in value.split()]
        elif not part.rest.startswith("[@]"):
            values = [" ".join(values)]
        was_text = was_text or bool(values)
        if values:
            texts[-1] += values[0]
            texts += values[1:]
    if sum(map(len, texts)) > _MOST_EXPANDED:
        raise SpecError(
            f"{state.place}:{word.line}: got a word that its variables make longer than {_MOST_EXPANDED:,} characters; "
            f"write what it stands for."
        )
    if unknown:
        whole = "".join(map(_written, word.parts))
        return [Unresolved(whole if len(whole) <= _LONG else f"{' '.join(whole[:_LONG].split())} ...", unknown)]
    return texts if was_text else []


def _values(reference: ShellReference, state: _State, depth: int) -> list[str]:
    written, name, rest = _written(reference), reference.name, reference.rest
    if not name and rest.startswith("$((") and rest.endswith("))"):
        known_values = {key: " ".join(each) for key, each in state.values.items()}
        state.used.update(key for key in known_values if key in rest)
        found = shell_arithmetic(rest[3:-2], known_values)
        reason = "is arithmetic on more than whole numbers that are set; write its value"
        return [Unresolved(written, reason) if found is None else str(found)]
    if not name and rest.startswith(("$(", "`")):
        return [Unresolved(written, "is the output of a command, and none is ever run; write its value")]
    if not name:
        return [Unresolved(written, "is known only where the script runs; write its value")]
    known = state.values.get(name)
    state.used.add(name)
    if known is None and name in state.given:
        known = [state.given[name]]
    if rest in ("", "[@]", "[*]") or rest.startswith((":?", "?")):
        reason = f"is not set; put {name}=... before the command, or its value in its place"
        return [Unresolved(written, reason)] if known is None else known
    default = re.match(r":?[-=]", rest)
    if default is None or depth > _DEEP:
        return [Unresolved(written, "is an expansion that is not read; write its value")]
    if known is not None and (known != [""] or not rest.startswith(":")):
        return known
    return _expanded(
        Word(0, parts_of(rest[default.end() :].strip("\"'"), state.place), is_quoted=True), state, depth + 1
    )


def _written(part: Part) -> str:
    if isinstance(part, str):
        return part
    return (
        f"${{{part.name}{part.rest}}}" if part.name and part.rest else part.rest if not part.name else f"${part.name}"
    )


def _plain(document: HereDocument, state: _State) -> str:
    found = _expanded(Word(document.line, parts_of(document.text, state.place), is_quoted=True), state)
    return document.text if not found or isinstance(found[0], Unresolved) else found[0]
