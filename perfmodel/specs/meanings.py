"""What the fields of files mean: as the docstrings of their specs and the comments beside them say, and `meanings.yaml`
where these say nothing, or say it of several at once."""

__all__ = ["every_spec", "meanings_of", "summary_of"]

import ast
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from perfmodel.files.base import Spec
from perfmodel.files.yaml_loader import load_yaml

_ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): +(?P<text>.*)$")


def summary_of(cls: type[Any]) -> str:
    """The class's docstring without its list of fields: paragraphs of prose."""
    lines, is_entry = [], False
    for line in _docstring(cls).splitlines():
        is_entry = bool(_entry_of(line, cls)) or (is_entry and line.startswith(" "))
        if not is_entry:
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


@cache
def meanings_of(cls: type[Any]) -> dict[str, str]:
    """What is said of each field; those of which nothing is said are left out."""
    notes = dict[str, str]()
    for base in reversed(cls.__mro__):
        if getattr(base, "model_fields", None):
            notes |= _of_comments(base)
            notes |= _of_docstring(base)
    notes |= _listed().get(cls.__name__, {})
    return {name: notes[name] for name in cls.model_fields if notes.get(name)}


def every_spec() -> dict[str, type[Spec]]:
    """All specs that are loaded, by the name of their class."""
    found, left = dict[str, type[Spec]](), [Spec]
    while left:
        cls = left.pop()
        found.setdefault(cls.__name__, cls)
        left += cls.__subclasses__()
    return found


@cache
def _listed() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = load_yaml(Path(__file__).with_name("meanings.yaml")).data
    return found


def _docstring(cls: type[Any]) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


def _entry_of(line: str, cls: type[Any]) -> re.Match[str] | None:
    match = _ENTRY.match(line)
    if match is None or not any(name in cls.model_fields for name in match["names"].split(", ")):
        return None
    return match


def _of_docstring(cls: type[Any]) -> dict[str, str]:
    notes, names = dict[str, str](), list[str]()
    for line in _docstring(cls).splitlines():
        match = _entry_of(line, cls)
        if match is not None:
            names = match["names"].split(", ")
            notes |= dict.fromkeys(names, match["text"])
        elif names and line.startswith(" "):
            notes |= {name: f"{notes[name]} {line.strip()}" for name in names}
        else:
            names = []
    return notes


def _of_comments(cls: type[Any]) -> dict[str, str]:
    """Behind a field, else in the lines above it."""
    try:
        lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    except OSError:
        return {}
    notes = dict[str, str]()
    for node in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno is not None:
            behind = _comment(lines[node.end_lineno - 1][node.end_col_offset or 0 :])
            notes[node.target.id] = behind or _above(lines, node.lineno - 1)
    return notes


def _above(lines: list[str], at: int) -> str:
    found: list[str] = []
    while at > 0 and lines[at - 1].strip().startswith("#"):
        at -= 1
        found.insert(0, _comment(lines[at]))
    return " ".join(found)


def _comment(text: str) -> str:
    return text.partition("#")[2].strip()
