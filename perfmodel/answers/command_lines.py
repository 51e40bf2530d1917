"""A command with its flags as anyone would type it."""

__all__ = ["Given", "command_line"]

import shlex
from collections.abc import Iterator
from pathlib import Path

Given = str | int | Path | list[str] | None


def command_line(name: str, *arguments: str, **flags: Given) -> str:
    """`perfmodel NAME ARGUMENTS --flag value ...`; flags that were not given (None, False, no values) are left out.

    Of a path elsewhere the last two parts are shown, of a file to be written there its name.
    """
    texts = [f"perfmodel {name}", *(shlex.quote(_place(argument)) for argument in arguments)]
    for flag, value in flags.items():
        texts += _texts(f"--{flag}", value)
    return " ".join(texts)


def _texts(flag: str, value: Given) -> Iterator[str]:
    for each in value if isinstance(value, list) else [value]:
        if each is True:
            yield flag
        elif isinstance(each, Path):
            yield f"{flag} {shlex.quote(each.name if each.is_absolute() else each.as_posix())}"
        elif each is not None and each is not False:
            yield f"{flag} {shlex.quote(str(each))}"


def _place(argument: str) -> str:
    is_elsewhere = argument.startswith(("/", "../"))
    return "/".join(Path(argument).parts[-2:]) if is_elsewhere else argument
