"""A pasted script to its commands: `shlex` splits, variables set by the script are expanded, nothing is run.

What only a run could know (`$(...)`, conditions, loops) is reported where a command needs it. Source: POSIX.1-2024,
Shell Command Language, 2.2 Quoting, 2.6.2 Parameter Expansion, 2.6.4 Arithmetic Expansion; bash's arrays."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from perfmodel.errors import SpecError
from perfmodel.specs.commands.scalers import Scaler

_MAX_SCRIPT = 200_000  # characters; scripts that start servers have some thousands
_MAX_EXPANDED = 100_000  # characters that variables add to a command
_MAX_SHOWN = 200  # characters of a word in an error
_OPENS, _CLOSES = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac")
_PASSED_OVER = ("then", "do", "else", "elif", "{", "}", "!", "time", "exec", "in")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_MARK = "\ue000"  # around the number of an unresolved reference in a word that shlex has still to split


def _closed(opens: str, closes: str, levels: int = 5) -> str:
    """Pattern for the inside of two brackets, with nested brackets and quotes."""
    inside = other = rf"\\.|'[^']*'|\"(?:\\.|[^\"\\])*+\"|[^{opens}{closes}'\"\\]"
    for _ in range(levels):
        inside = rf"{other}|\{opens}(?:{inside})*+\{closes}"
    return rf"\{opens}(?:{inside})*+\{closes}"


_REFERENCE = rf"`[^`]*`|\${_closed('(', ')')}|\${_closed('{', '}')}|\$[A-Za-z_]\w*|\$[0-9@*#?$!-]"
_PIECE = re.compile(
    rf"""(?P<skipped> \\\n | (?<![^\s;&|()])\#[^\n]* )
    | (?P<array> "\$\{{\w+\[@\]\}}" )
    | (?P<double> "(?:\\. | {_REFERENCE} | [^"\\])*+" )
    | (?P<reference> {_REFERENCE} )
    | (?P<assigns> (?<![^\s;&|(])[A-Za-z_]\w*\+?=\(? )
    | (?P<here> <<(?!<)(?P<tabs>-?)[ \t]*(?P<quote>[\\'"]?)(?P<until>\w+)['"]? )
    | (?P<redirect> (?:(?<!\S)\d+)?(?:&>>?|>>|>\||[<>]&|<<<|[<>])[ \t]*
        (?P<target> (?:"[^"\n]*"|'[^'\n]*'|[^\s;&|<>()"'])* ) )
    | (?P<ends> [;&|()\n] )
    | (?P<blank> [ \t\r]+ )
    | (?P<text> \\. | \$?'[^']*' | [^ \t\r\n\\'"`$;&|<>()]+ | \$(?![({{]) )
    | (?P<open> . )""",
    re.VERBOSE | re.DOTALL,
)
_IN_QUOTES = re.compile(rf"\\(?P<escaped>[$`\"\\])|\\\n|(?P<reference>{_REFERENCE})|(?P<open>`|\$[({{])", re.DOTALL)
_NAMED = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(.*)\})", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_MARKED = re.compile(rf"{_MARK}(\d+){_MARK}")

_LONGEST_SUM, _LARGEST_NUMBER = 200, 10**15
_SUM = re.compile(r"[\w\s+\-*/%()${}]*")
_SUM_NAME = re.compile(r"\$?\{?\b([A-Za-z_]\w*)\b\}?")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # towards zero, as C does
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}


class Unresolved(str):
    """A word that only running something would resolve: as written, and why."""

    reason: str  # a sentence's end: `is the output of a command, ...`

    def __new__(cls, text: str, reason: str) -> "Unresolved":
        made = super().__new__(cls, text)
        made.reason = reason
        return made


class PodPlacement(NamedTuple):
    """Placement of a container in a manifest, as far as stated.

    replicas: groups of `size` pods; device: GPU name in node labels; gpus: per pod; is_further: not the first pod
    scaler: what scales them"""

    replicas: int | None = None
    size: int | None = None
    device: str | None = None
    gpus: int | None = None
    is_further: bool = False
    scaler: Scaler | None = None


ANYWHERE = PodPlacement()


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """environment: set by itself or exported before; line: from 1."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int
    placement: PodPlacement = ANYWHERE


@dataclass(frozen=True, slots=True)
class ShellScript:
    """files: heredocs written by the script (`cat > FILE <<EOF`), by name."""

    commands: tuple[ShellCommand, ...]
    files: Mapping[str, str]


@dataclass(slots=True)
class _Command:
    """A command as shlex reads it: references replaced, redirections left out.

    document: heredoc lines; target: file written to; is_array: `NAME=(...)`"""

    line: int
    parts: list[str] = field(default_factory=list)
    document: str | None = None
    target: str | None = None
    is_array: bool = False


def read_shell(text: str, place: str = "the line", given: Mapping[str, str] | None = None) -> ShellScript:
    """Commands of `text` in order; `place` is its name in errors, `given` are variables set before.

    Raises SpecError for unclosed quotes and brackets."""
    if len(text) > _MAX_SCRIPT:
        raise SpecError(f"{place}: {len(text):,} characters; expected at most {_MAX_SCRIPT:,}; give the command alone.")
    reader, commands, files = _Reader(place, given or {}), [], {}
    for part in reader.split(text.replace("\r\n", "\n").replace(_MARK, "?")):
        command = reader.command(part)
        if command is not None:
            commands.append(command)
        target = command.words[-1] if command is not None and command.words[0] == "tee" else part.target
        if part.document is not None and target is not None:
            files[target] = part.document
    return ShellScript(tuple(commands), files)


def expanded_text(text: str, place: str) -> str:
    """Expand double-quoted text outside a script, with defaults for unset variables."""
    reader = _Reader(place, {})
    return reader.word(reader.replaced(text))


class _Reader:
    """State of one script: variables, and unresolved words."""

    def __init__(self, place: str, given: Mapping[str, str]) -> None:
        self.place, self.line = place, 1
        self.values: dict[str, list[str]] = {name: [value] for name, value in given.items()}
        self.exported: dict[str, str] = {}
        self.used: set[str] = set()  # the script's own variables, which words are made of
        self.unknown: list[Unresolved] = []
        self.depth = 0  # of conditions and loops
        self.expanded = 0  # characters that variables have added to this command

    def split(self, text: str) -> Iterator[_Command]:
        """Yield commands one by one, so that each sees earlier assignments."""
        at, document_lines, in_value, in_array = 0, 0, False, False
        command = _Command(1)
        while at < len(text):
            piece = _PIECE.match(text, at)
            assert piece is not None
            kind, written, at = piece.lastgroup, piece[0], piece.end()
            ends = kind == "ends" and not in_array
            if ends:
                yield command
            elif not command.parts:
                command.line = self.line
            if kind == "open" and written != "\\":
                raise self._not_closed(written)
            elif kind == "text":
                command.parts.append(written.removeprefix("$") if written.endswith("'") else written)
            elif kind == "double":
                escaped = re.sub(r'[\\"]', r"\\\g<0>", self.replaced(written[1:-1]))
                command.parts.append(f'"{escaped}"')
            elif kind == "array":
                command.parts.append(shlex.join(self._resolved(written[1:-1])))
            elif kind == "reference":
                value = " ".join(self._resolved(written))
                command.parts.append(shlex.quote(value) if in_value else re.sub(r"[^\w\s]", r"\\\g<0>", value))
            elif kind == "assigns":
                in_value, in_array = True, written.endswith("(")
                command.is_array = in_array
                command.parts.append(written.replace("(", " "))
            elif kind == "here":
                text, document = self._cut_document(text, piece)
                document_lines += document.count("\n") + 2 if document else 1
                read = document if piece["quote"] else self.word(self.replaced(document))
                command.document = document if isinstance(read, Unresolved) else read
            elif kind == "redirect":
                command.target = command.target or piece["target"].strip("'\"")
            elif kind in ("ends", "blank"):
                command.parts += [" "] if command.parts else []
                in_value = False
            self.line += written.count("\n")
            if written == "\n":
                self.line, document_lines = self.line + document_lines, 0
            if ends:
                command, self.expanded = _Command(self.line), 0
            elif written == ")":
                in_array = False
        yield command

    def _cut_document(self, text: str, here: re.Match[str]) -> tuple[str, str]:
        """(`text` without heredoc lines, those lines)."""
        begin = text.find("\n", here.end()) + 1
        end = re.compile(rf"^{chr(9) + '*' if here['tabs'] else ''}{here['until']}$", re.MULTILINE).search(text, begin)
        if not begin or end is None:
            raise SpecError(f"{self.place}:{self.line}: the lines until {here['until']!r} are not closed by it.")
        document = text[begin : end.start()].removesuffix("\n")
        if here["tabs"]:
            document = re.sub(r"^\t+", "", document, flags=re.MULTILINE)
        return text[:begin] + text[end.end() + 1 :], document

    def command(self, part: _Command) -> ShellCommand | None:
        """The command without shell keywords; None for pure shell syntax."""
        words = shlex.split("".join(part.parts))
        while words and words[0] in (*_OPENS, *_CLOSES, *_PASSED_OVER):
            self.depth = max(self.depth + (words[0] in _OPENS) - (words[0] in _CLOSES), 0)
            if words[0] in ("for", "select") and len(words) > 1:  # for NAME in ...
                count = max(len(words) - 3, 0) or "several"
                reason = f"takes {count} values in a loop (line {part.line}); put one of them in its place"
                self.values[words[1]] = [Unresolved(f"${words[1]}", reason)]
                return None
            del words[0]
        declares = bool(words) and words[0] in _DECLARES
        while declares and words and (words[0] in _DECLARES or words[0].startswith("-")):
            del words[0]
        own: dict[str, list[str]] = {}
        while words and (match := _ASSIGNMENT.fullmatch(words[0])) is not None:
            name, adds, value = match.groups()
            values = [self.word(word) for word in (words[1:] if part.is_array else (value,))]
            before = self.values.get(name, []) if adds else []
            own[name] = [*before, *values] if part.is_array or not before else ["".join((*before, *values))]
            del words[: len(words) if part.is_array else 1]
        if words and not declares:
            environment = {name: value for name, value in self.exported.items() if name not in self.used}
            environment |= {name: " ".join(values) for name, values in own.items()}
            return ShellCommand(tuple(map(self.word, words)), environment, part.line)
        reason = f"is set under a condition (line {part.line}); put its value in its place"
        for name, values in own.items():
            self.values[name] = [Unresolved(f"${name}", reason)] if self.depth else values
            if declares:
                known = self.values[name]
                self.exported[name] = known[0] if len(known) == 1 else " ".join(known)
        return None

    def replaced(self, text: str) -> str:
        """Expand double-quoted text; unresolved references become marks."""

        def plain(match: re.Match[str]) -> str:
            if match["open"]:
                raise self._not_closed(match["open"])
            return " ".join(self._resolved(match["reference"])) if match["reference"] else match["escaped"] or ""

        return _IN_QUOTES.sub(plain, text)

    def word(self, text: str) -> str:
        """Replace marks in a word by what they stand for."""
        first = _MARKED.search(text)
        if first is None:
            return text
        whole = _MARKED.sub(lambda mark: self.unknown[int(mark[1])], text)
        shown = whole if len(whole) <= _MAX_SHOWN else f"{' '.join(whole[:_MAX_SHOWN].split())} ..."
        return Unresolved(shown, self.unknown[int(first[1])].reason)

    def _resolved(self, written: str) -> list[str]:
        """Words of a reference; one mark if unknown."""
        values = self._values(written)
        if isinstance(values, str):
            name = re.fullmatch(r"\$\{(\w+)\}", written)
            self.unknown.append(Unresolved(f"${name[1]}" if name else written, values))
            return [f"{_MARK}{len(self.unknown) - 1}{_MARK}"]
        self.expanded += sum(map(len, values))
        if self.expanded > _MAX_EXPANDED:
            raise SpecError(
                f"{self.place}:{self.line}: got a word that its variables make longer than {_MAX_EXPANDED:,} "
                f"characters; write what it stands for."
            )
        return values

    def _values(self, written: str) -> list[str] | str:
        """Values of a reference, or why they are unknown."""
        if written.startswith("$((") and written.endswith("))"):
            known_values = {name: " ".join(values) for name, values in self.values.items()}
            self.used.update(name for name in known_values if name in written)
            result = _arithmetic(written[3:-2], known_values)
            why = "is arithmetic on more than whole numbers that are set; write its value"
            return why if result is None else [result]
        if written.startswith(("$(", "`")):
            return "is the output of a command, and none is ever run; write its value"
        match = _NAMED.fullmatch(written)
        if match is None:
            return "is known only where the script runs; write its value"
        name, rest = match[1] or match[2], match[3] or ""
        known = self.values.get(name)
        self.used.add(name)
        if rest in ("", "[@]", "[*]") or rest.startswith((":?", "?")):
            if known is None:
                return f"is not set; put {name}=... before the command, or its value in its place"
        elif (default := re.match(r":?[-=]", rest)) is None:
            return "is an expansion that is not read; write its value"
        elif known is None or (known == [""] and rest.startswith(":")):
            return [self.replaced(rest[default.end() :].strip("\"'"))]
        return next((value.reason for value in known if isinstance(value, Unresolved)), known)

    def _not_closed(self, opens: str) -> SpecError:
        what = {"'": "a quote (')", '"': 'a quote (")', "`": "a backtick (`)", "${": "a bracket ({)"}
        return SpecError(
            f"{self.place}:{self.line}: {what.get(opens, 'a bracket (()')} is opened here and not closed; close it."
        )


def _arithmetic(text: str, values: Mapping[str, str]) -> str | None:
    """Value of `$(( ))`; None beyond integer arithmetic."""
    if len(text) > _LONGEST_SUM or _SUM.fullmatch(text) is None:
        return None
    plain = _SUM_NAME.sub(lambda name: f"({values.get(name[1], 'unknown')})", text)
    try:
        return str(_number(ast.parse(plain.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int:
    """Raises ValueError for other than integers and binary operations."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            result = value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            result = _number(operand) * (-1 if isinstance(node.op, ast.USub) else 1)
        case ast.BinOp(left=left, right=right, op=op) if type(op) in _OPERATIONS:
            result = _OPERATIONS[type(op)](_number(left), _number(right))
        case _:
            raise ValueError
    if abs(result) > _LARGEST_NUMBER:
        raise ValueError
    return result
