"""What every command shares at its edge: consoles, the one JSON document, progress, errors as one line."""

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_INTERRUPTED",
    "guarded",
    "print_json",
    "progress_bar",
    "say",
    "stdout",
    "to_jsonable",
]

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from perfmodel.errors import PerfmodelError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """`command` with the input's faults as one line on stderr and status 2; other exceptions are bugs and pass."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PerfmodelError as error:
            say(f"error: {error}")
            raise typer.Exit(EXIT_BAD_INPUT) from None
        except KeyboardInterrupt:
            say("interrupted.")
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return run


def say(text: str) -> None:
    """A line on stderr, which `--json` leaves free."""
    print(text, file=sys.stderr, flush=True)


def stdout() -> "Console":
    """The console for tables. Piped output is as wide as its tables need, not 80 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140, soft_wrap=not sys.stdout.isatty())


def print_json(document: Any) -> None:
    """One JSON document on stdout; numbers that JSON has no word for become null."""
    sys.stdout.write(json.dumps(to_jsonable(document), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def to_jsonable(value: Any) -> Any:
    """Plain dicts, lists, numbers, strings and None from what results and specs hold (numpy scalars, dates, paths)."""
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [to_jsonable(item) for item in items]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return to_jsonable(value.tolist())
    return str(value)


@contextmanager
def progress_bar(what: str, enabled: bool = True) -> Iterator[Callable[[int, int | None], None] | None]:
    """A callback `(done, total)` that draws on stderr, or None where nobody is watching."""
    if not enabled or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
