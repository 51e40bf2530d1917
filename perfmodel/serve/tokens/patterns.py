"""`text_of_pattern`: a text that a regular expression matches in full. The text is built from Python's parse tree; no
matching takes place, so no expression is slow."""

__all__ = ["text_of_pattern"]

import re
from collections.abc import Callable, Mapping
from re import _constants as ops  # type: ignore[attr-defined]  # opcodes of the parse tree; since Python 3.11
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_LONGEST_PATTERN = 4096
_MOST_CHARACTERS = 4096
_CANDIDATES = [chr(code) for code in (*range(ord("a"), ord("z") + 1), *range(ord(" "), ord("a")), *range(123, 0x250))]


def text_of_pattern(pattern: str, number: int) -> str:
    """A text that `pattern` matches. number: decides between alternatives

    Raises ValueError for invalid expressions, for lookarounds and word boundaries, and for texts of more than 4,096
    characters.
    """
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"regex: got {len(pattern):,} characters; expected at most {_LONGEST_PATTERN:,}")
    try:
        tree = _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(f"regex: {error}") from None
    return _Text(number).whole(tree)


class _Text:
    """Builds the text. `_groups` has the text of every group, for backreferences."""

    def __init__(self, number: int) -> None:
        self._number, self._text, self._ends_at = number, "", -1
        self._groups: dict[int, str] = {}

    def whole(self, tree: Any) -> str:
        """The text of a parsed expression."""
        self._add(tree)
        if self._ends_at not in (-1, len(self._text)):
            raise ValueError("regex: $ before the end of the text; leave it out")
        return self._text

    def _add(self, tree: Any) -> None:
        for op, argument in tree:
            write = _WRITERS.get(op)
            if write is None:
                raise ValueError(f"regex: {str(op).lower()} is not supported; leave it out")
            write(self, argument)
            if len(self._text) > _MOST_CHARACTERS:
                raise ValueError(f"regex: its text is longer than {_MOST_CHARACTERS:,} characters")

    def _literal(self, code: int) -> None:
        self._text += chr(code)

    def _other(self, code: int) -> None:
        self._text += next(character for character in _CANDIDATES if ord(character) != code)

    def _any(self, _: None) -> None:
        self._text += "a"

    def _one_of(self, items: list[tuple[Any, Any]]) -> None:
        is_negated = items[0][0] is ops.NEGATE
        first = items[is_negated:][self._number % (len(items) - is_negated)] if items[is_negated:] else None
        if not is_negated and first is not None and first[0] in (ops.LITERAL, ops.RANGE):
            self._text += chr(first[1] if first[0] is ops.LITERAL else first[1][0])
            return
        matching = (one for one in _CANDIDATES if _is_in(one, items[is_negated:]) is not is_negated)
        character = next(matching, None)
        if character is None:
            raise ValueError("regex: a set of characters has no supported character")
        self._text += character

    def _repeat(self, argument: tuple[int, Any, Any]) -> None:
        low, high, tree = argument
        count = max(int(low), min(int(high), 1))
        if count > _MOST_CHARACTERS:
            raise ValueError(f"regex: repeats {count:,} times; expected at most {_MOST_CHARACTERS:,}")
        for _ in range(count):
            before = len(self._text)
            self._add(tree)
            if len(self._text) == before:
                return  # an empty repetition stays empty

    def _branch(self, argument: tuple[None, list[Any]]) -> None:
        options = argument[1]
        self._add(options[self._number % len(options)])

    def _group(self, argument: tuple[int | None, int, int, Any]) -> None:
        group, *_, tree = argument
        before = len(self._text)
        self._add(tree)
        if group is not None:
            self._groups[group] = self._text[before:]

    def _reference(self, group: int) -> None:
        self._text += self._groups.get(group, "")

    def _at(self, place: Any) -> None:
        if place in (ops.AT_END, ops.AT_END_STRING):
            self._ends_at = len(self._text)
        elif place not in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING) or self._text:
            raise ValueError("regex: only ^ at the start and $ at the end are supported; leave the others out")


def _is_in(character: str, items: list[tuple[Any, Any]]) -> bool:
    code = ord(character)
    kinds: Mapping[Any, bool] = {
        ops.CATEGORY_DIGIT: character.isdecimal(),
        ops.CATEGORY_SPACE: character.isspace(),
        ops.CATEGORY_WORD: character.isalnum() or character == "_",
        ops.CATEGORY_NOT_DIGIT: not character.isdecimal(),
        ops.CATEGORY_NOT_SPACE: not character.isspace(),
        ops.CATEGORY_NOT_WORD: not (character.isalnum() or character == "_"),
    }
    for op, value in items:
        is_here = (
            kinds[value] if op is ops.CATEGORY else value[0] <= code <= value[1] if op is ops.RANGE else value == code
        )
        if is_here:
            return True
    return False


_WRITERS: Mapping[Any, Callable[[_Text, Any], None]] = {
    ops.LITERAL: _Text._literal,
    ops.NOT_LITERAL: _Text._other,
    ops.ANY: _Text._any,
    ops.IN: _Text._one_of,
    ops.MAX_REPEAT: _Text._repeat,
    ops.MIN_REPEAT: _Text._repeat,
    ops.POSSESSIVE_REPEAT: _Text._repeat,
    ops.BRANCH: _Text._branch,
    ops.SUBPATTERN: _Text._group,
    ops.ATOMIC_GROUP: lambda text, tree: text._add(tree),
    ops.GROUPREF: _Text._reference,
    ops.AT: _Text._at,
}
