"""A shell script as words and operators: quotes, escapes, comments, continued lines, here-documents; nothing is run.

What the shell would put in place of `$...` is kept as a reference, for `shell.py` to resolve. Source: POSIX.1-2024,
Shell Command Language, 2.2 Quoting, 2.3 Token Recognition, 2.6.2 Parameter Expansion; bash's arrays.
"""

__all__ = ["HereDocument", "Operator", "Part", "ShellReference", "Token", "Word", "parts_of", "tokens_of"]

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from perfmodel.errors import SpecError

_OPERATORS = re.compile(r"&>>|<<<|<<-|&&|\|\||;;|<<|>>|&>|>&|<&|>\||[;&|<>()]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SPECIAL = re.compile(r"[0-9@*#?$!-]")
_BLANK = " \t\r"
_LARGEST = 200_000  # characters; scripts that start servers have some thousands


@dataclass(frozen=True, slots=True)
class ShellReference:
    """`$NAME` or `${NAME...}`: what stands behind the name in the braces, and whether in quotes; or what cannot be
    known without running something (`name` empty, `rest` what it is)."""

    name: str
    rest: str = ""
    is_quoted: bool = False


Part = str | ShellReference


@dataclass(slots=True)
class Word:
    """parts: text and references; line: where it begins, from 1; is_quoted: any of it is."""

    line: int
    parts: list[Part] = field(default_factory=list)
    is_quoted: bool = False

    def add(self, text: str) -> None:
        """Text goes on."""
        if self.parts and isinstance(self.parts[-1], str):
            self.parts[-1] += text
        else:
            self.parts.append(text)

    @property
    def plain(self) -> str | None:
        """The text of a word without quotes and references, as keywords are."""
        return self.parts[0] if len(self.parts) == 1 and isinstance(self.parts[0], str) and not self.is_quoted else None


@dataclass(frozen=True, slots=True)
class Operator:
    """`;`, `&&`, `|`, `>`, a line's end (`\\n`) and their like."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class HereDocument:
    """The lines after `<< WORD`; is_literal: the word was quoted, nothing in it is replaced."""

    text: str
    line: int
    is_literal: bool


Token = Word | Operator | HereDocument


def tokens_of(text: str, place: str = "the line") -> list[Token]:
    """All tokens of a script. Raises SpecError with the line of a quote or bracket that is not closed.

    place: what errors call the text
    """
    if len(text) > _LARGEST:
        raise SpecError(f"{place}: {len(text):,} characters, allowed {_LARGEST:,}; give the command alone.")
    return list(_Lexer(text.replace("\r\n", "\n"), place).tokens())


def parts_of(text: str, place: str = "the line") -> list[Part]:
    """The parts of text in double quotes, as of a default in `${NAME:-default}` or a here-document."""
    lexer = _Lexer(text, place)
    word = Word(1)
    while lexer.at < len(text):
        lexer.quoted_character(word)
    return word.parts


class _Lexer:
    """`at`: the next character of `text`; `waiting`: here-documents whose lines come after this one."""

    def __init__(self, text: str, place: str) -> None:
        self.text, self.place, self.at = text, place, 0
        self.waiting: list[tuple[str, bool, bool]] = []
        self._ends = [match.start() for match in re.finditer("\n", text)]

    @property
    def line(self) -> int:
        return bisect_left(self._ends, self.at) + 1

    def tokens(self) -> Iterator[Token]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _BLANK:
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == "\n":
                yield Operator("\n", self.line)
                self.at += 1
                yield from self._documents()
            elif (operator := _OPERATORS.match(self.text, self.at)) is not None:
                yield Operator(operator[0], self.line)
                self.at = operator.end()
                if operator[0] in ("<<", "<<-"):
                    self._expect_document(operator[0])
            else:
                yield self._word()

    def _word(self) -> Word:
        word = Word(self.line)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _BLANK or char == "\n" or _OPERATORS.match(char):
                break
            if char == "'" or self.text.startswith("$'", self.at):
                self._single_quotes(word)
            elif char == '"':
                self._double_quotes(word)
            elif char == "\\":
                if self.text[self.at + 1 : self.at + 2] != "\n":
                    word.add(self.text[self.at + 1 : self.at + 2])
                    word.is_quoted = True
                self.at += 2
            elif char in "$`":
                self._reference(word, is_quoted=False)
            else:
                word.add(char)
                self.at += 1
        return word

    def _single_quotes(self, word: Word) -> None:
        begin = self.text.index("'", self.at) + 1
        end = self.text.find("'", begin)
        if end < 0:
            raise self._not_closed("a quote (')")
        word.add(self.text[begin:end])
        word.is_quoted, self.at = True, end + 1

    def _double_quotes(self, word: Word) -> None:
        opened = self._not_closed('a quote (")')
        word.add("")
        word.is_quoted = True
        self.at += 1
        while self.at < len(self.text):
            if self.text[self.at] == '"':
                self.at += 1
                return
            self.quoted_character(word)
        raise opened

    def quoted_character(self, word: Word) -> None:
        """One character in double quotes, or the reference that begins there."""
        char, after = self.text[self.at], self.text[self.at + 1 : self.at + 2]
        if char == "\\" and after and after in '$`"\\\n':
            word.add("" if after == "\n" else after)
            self.at += 2
        elif char in "$`":
            self._reference(word, is_quoted=True)
        else:
            word.add(char)
            self.at += 1

    def _reference(self, word: Word, is_quoted: bool) -> None:
        text, begin = self.text, self.at
        if text[begin] == "`":
            end = text.find("`", begin + 1)
            if end < 0:
                raise self._not_closed("a backtick (`)")
            self.at = end + 1
            word.parts.append(ShellReference("", text[begin : self.at], is_quoted))
        elif text.startswith("$(", begin):
            self.at = self._closing(begin + 1, "(", ")") + 1
            word.parts.append(ShellReference("", text[begin : self.at], is_quoted))
        elif text.startswith("${", begin):
            self.at = self._closing(begin + 1, "{", "}") + 1
            inside = text[begin + 2 : self.at - 1]
            name = _NAME.match(inside)
            found = ("", text[begin : self.at]) if name is None else (name[0], inside[name.end() :])
            word.parts.append(ShellReference(*found, is_quoted))
        else:
            name = _NAME.match(text, begin + 1) or _SPECIAL.match(text, begin + 1)
            self.at = begin + 1 if name is None else name.end()
            if name is None:
                word.add("$")
            elif name[0][0].isalpha() or name[0][0] == "_":
                word.parts.append(ShellReference(name[0], "", is_quoted))
            else:
                word.parts.append(ShellReference("", f"${name[0]}", is_quoted))

    def _closing(self, begin: int, opens: str, closes: str) -> int:
        """Where the bracket at `begin` is closed, brackets in quotes left out."""
        depth, at = 0, begin
        while at < len(self.text):
            char = self.text[at]
            if char == "\\":
                at += 1
            elif char == "'" and opens == "(":
                end = self.text.find("'", at + 1)
                at = len(self.text) if end < 0 else end
            elif char in (opens, closes):
                depth += 1 if char == opens else -1
                if not depth:
                    return at
            at += 1
        raise self._not_closed(f"a bracket ({opens})")

    def _expect_document(self, operator: str) -> None:
        while self.at < len(self.text) and self.text[self.at] in _BLANK:
            self.at += 1
        delimiter = self._word()
        text = "".join(part for part in delimiter.parts if isinstance(part, str))
        self.waiting.append((text, delimiter.is_quoted, operator == "<<-"))

    def _documents(self) -> Iterator[HereDocument]:
        for delimiter, is_literal, is_indented in self.waiting:
            first, lines = self.line, []
            while True:
                if self.at >= len(self.text):
                    raise SpecError(f"{self.place}:{first}: the lines until {delimiter!r} are not closed by it.")
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                found = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                if (found.lstrip("\t") if is_indented else found) == delimiter:
                    break
                lines.append(found.lstrip("\t") if is_indented else found)
            yield HereDocument("\n".join(lines), first, is_literal)
        self.waiting = []

    def _not_closed(self, what: str) -> SpecError:
        return SpecError(f"{self.place}:{self.line}: {what} is opened here and not closed; close it.")
