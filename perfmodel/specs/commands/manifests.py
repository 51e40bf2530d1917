"""A compose file or a Kubernetes manifest as the commands that its containers run."""

__all__ = ["is_manifest", "read_manifest"]

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.yaml_loader import load_yaml_text
from perfmodel.specs.commands.lexing import Word, parts_of
from perfmodel.specs.commands.shell import ShellCommand, ShellScript, expanded_text

_KEYS = re.compile(r"^(services|apiVersion|kind|containers|version|name|x-[\w-]+)\s*:", re.MULTILINE)
_BLOCKS = re.compile(r"^\s*(services|containers)\s*:", re.MULTILINE)


def is_manifest(text: str) -> bool:
    """Whether `text` looks like YAML with containers, and not like a script."""
    return _KEYS.search(text) is not None and _BLOCKS.search(text) is not None


def read_manifest(text: str, place: str) -> ShellScript:
    """The commands of all containers: image, entrypoint and command (compose), or command and args (Kubernetes).

    Raises SpecError for what is no YAML, with its line.
    """
    documents = [part for part in re.split(r"^---\s*$", text, flags=re.MULTILINE) if part.strip()]
    commands: list[ShellCommand] = []
    for document in documents:
        loaded = load_yaml_text(document, place)
        commands += _containers(loaded.data, place)
    return ShellScript(tuple(commands), {})


def _containers(data: Any, place: str) -> Iterator[ShellCommand]:
    """Every mapping below `data` that names an image or a command."""
    if isinstance(data, Mapping):
        if isinstance(data.get("image"), str) or "command" in data:
            yield _container(data, place)
            return
        for value in data.values():
            yield from _containers(value, place)
    elif isinstance(data, list):
        for value in data:
            yield from _containers(value, place)


def _container(data: Mapping[str, Any], place: str) -> ShellCommand:
    is_compose = "args" not in data
    entry = _words(data.get("entrypoint") if is_compose else data.get("command"), place)
    rest = _words(data.get("command") if is_compose else data.get("args"), place)
    image = _text(data["image"], place) if isinstance(data.get("image"), str) else "container"
    given = ["--entrypoint", *entry] if entry and entry[0] in ("sh", "bash", "/bin/sh", "/bin/bash") else entry
    words = [image, *given, *rest] if entry else [image, *rest]
    return ShellCommand(tuple(words), _environment(data.get("environment") or data.get("env"), place), 1)


def _words(value: Any, place: str) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        return [_text(str(item), place) for item in value]
    if not isinstance(value, str):
        raise SpecError(f"{place}: found {value!r} as a command, allowed text or a list of words.")
    try:
        return [_text(word, place) for word in shlex.split(value)]
    except ValueError as error:
        raise SpecError(f"{place}: the command {value[:60]!r} is not closed: {str(error).lower()}.") from None


def _text(value: str, place: str) -> str:
    """A word with compose's `${NAME:-default}` replaced; `$$` is a dollar, and quotes are nothing special."""
    plain = re.sub(r"[\\`]", r"\\\g<0>", value).replace("$$", "\\$")
    return expanded_text(Word(1, parts_of(plain, place), is_quoted=True), place)


def _environment(value: Any, place: str) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(name): "" if each is None else str(each) for name, each in value.items()}
    found = {}
    for item in value if isinstance(value, list) else []:
        if isinstance(item, Mapping):
            found[str(item.get("name"))] = str(item.get("value", ""))
        else:
            name, _, text = str(item).partition("=")
            found[name] = text
    return found
