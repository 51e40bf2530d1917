"""A compose file or a Kubernetes manifest as the commands that its containers run.

Compose replaces `$NAME` and `${NAME}` itself, Kubernetes `$(NAME)` by what the container's environment sets, and
leaves all else to a shell, where there is one (kubernetes.io, Define Dependent Environment Variables).
"""

__all__ = ["is_manifest", "read_manifest"]

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.yaml_loader import load_yaml_text
from perfmodel.specs.commands.lexing import Word, parts_of
from perfmodel.specs.commands.shell import ShellCommand, ShellScript, Unresolved, expanded_text

_KEYS = re.compile(r"^(services|apiVersion|kind|containers|version|name|x-[\w-]+)\s*:", re.MULTILINE)
_BLOCKS = re.compile(r"^\s*(services|containers)\s*:", re.MULTILINE)
_OF_KUBERNETES = ("containers", "initContainers")
_REPLACED = re.compile(r"\$\$|\$\((\w+)\)")
_FOR_A_SHELL = re.compile(r"\$(?:\(\w+\)|\w+|\{\w+\})")


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
        commands += _containers(loaded.data, place, is_compose=True)
    return ShellScript(tuple(commands), {})


def _containers(data: Any, place: str, is_compose: bool) -> Iterator[ShellCommand]:
    """Every mapping below `data` that names an image or a command."""
    if isinstance(data, Mapping):
        if isinstance(data.get("image"), str) or "command" in data:
            yield _container(data, place, is_compose and "args" not in data)
            return
        for key, value in data.items():
            yield from _containers(value, place, is_compose and key not in _OF_KUBERNETES)
    elif isinstance(data, list):
        for value in data:
            yield from _containers(value, place, is_compose)


def _container(data: Mapping[str, Any], place: str, is_compose: bool) -> ShellCommand:
    environment = _environment(data.get("environment") or data.get("env"), place)

    def text(value: str) -> str:
        return _text(value, place) if is_compose else _of_kubernetes(value, environment)

    entry = _words(data.get("entrypoint" if is_compose else "command"), text, place)
    rest = _words(data.get("command" if is_compose else "args"), text, place)
    image = text(data["image"]) if isinstance(data.get("image"), str) else "container"
    given = ["--entrypoint", *entry] if entry and entry[0] in ("sh", "bash", "/bin/sh", "/bin/bash") else entry
    words = [image, *given, *rest] if entry else [image, *rest]
    return ShellCommand(tuple(words), environment, 1)


def _words(value: Any, text: Callable[[str], str], place: str) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        return [text(str(item)) for item in value]
    if not isinstance(value, str):
        raise SpecError(f"{place}: found {value!r} as a command, allowed text or a list of words.")
    try:
        return [text(word) for word in shlex.split(value)]
    except ValueError as error:
        raise SpecError(f"{place}: the command {value[:60]!r} is not closed: {str(error).lower()}.") from None


def _text(value: str, place: str) -> str:
    """A word with compose's `${NAME:-default}` replaced; `$$` is a dollar, and quotes are nothing special."""
    plain = re.sub(r"[\\`]", r"\\\g<0>", value).replace("$$", "\\$")
    return expanded_text(Word(1, parts_of(plain, place), is_quoted=True), place)


def _of_kubernetes(value: str, environment: Mapping[str, str]) -> str:
    """A word with `$(NAME)` replaced; one that is no script for a shell must then be known."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[1] is None else environment.get(match[1], match[0])

    used = [environment[name] for name in _REPLACED.findall(value) if name in environment]
    unknown = next((each for each in used if isinstance(each, Unresolved)), None)
    if unknown is not None:
        return Unresolved(value, unknown.reason)
    found = _REPLACED.sub(replaced, value)
    if _FOR_A_SHELL.search(found) is not None and not re.search(r"\s", found):
        return Unresolved(value, "is replaced by nobody: no shell runs it, and the container sets no such variable")
    return found


def _environment(value: Any, place: str) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(name): _set_to(str(name), each) for name, each in value.items()}
    found = {}
    for item in value if isinstance(value, list) else []:
        if isinstance(item, Mapping):
            name = str(item.get("name"))
            found[name] = _set_to(name, item.get("value", None if "valueFrom" in item else ""))
        else:
            name, given, text = str(item).partition("=")
            found[name] = _set_to(name, text if given else None)
    return found


def _set_to(name: str, value: Any) -> str:
    """What a container's variable is set to; of one that comes from elsewhere, that it does."""
    return str(value) if value is not None else Unresolved(f"${name}", "is set elsewhere; write its value here")
