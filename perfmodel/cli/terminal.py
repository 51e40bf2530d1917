"""What every command shares at its edge: consoles, the one JSON document, progress, errors as one line."""

import functools
import gc
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from perfmodel.errors import PerfmodelError
from perfmodel.renderable import to_jsonable

if TYPE_CHECKING:
    from perfmodel.commands.request import Answer, Pace
    from perfmodel.report.document import Document

P = ParamSpec("P")
R = TypeVar("R")
Progress = Callable[[int, int | None], None]

EXIT_BAD_INPUT = 2
_BRIEF_WIDTH, _PIPED_WIDTH = 100, 140  # of a pipe: of answers in brief, and of all others
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_CLOSED_PIPE = 1  # as the libraries for terminals leave it: `perfmodel ... | head -1`


def handle_errors(command: Callable[P, R]) -> Callable[P, R]:
    """`command` with what is wrong with the input, the disk or the memory as one line on stderr and status 2; other
    exceptions are bugs and pass."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()  # where a full disk, or a reader that has left, shows
            return result
        except PerfmodelError as error:
            say(f"error: {error}")
            raise typer.Exit(EXIT_BAD_INPUT) from None
        except BrokenPipeError:
            raise typer.Exit(EXIT_CLOSED_PIPE) from None
        except OSError as error:
            raise typer.Exit(say_refused(error)) from None
        except MemoryError:
            say("error: there is not enough memory for this; ask for fewer requests, replicas or values.")
            raise typer.Exit(EXIT_BAD_INPUT) from None
        except KeyboardInterrupt as error:
            say(f"interrupted: {error}." if str(error) else "interrupted.")
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return run


def say(text: str) -> None:
    """A line on stderr, which `--json` leaves free; where nobody can be told, the exit status says it."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def say_refused(error: OSError) -> int:
    """Say what the operating system did not let us read or write (a full disk, a folder of others); the exit status."""
    say(f"error: {error.filename or 'the answer'} cannot be read or written: {error.strerror or error}.")
    return EXIT_BAD_INPUT


def replace_unprintable() -> None:
    """Print what the console's encoding lacks, as a Windows code page does the minus sign, as `?` instead of ending."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def open_closed_streams() -> None:
    """Where the caller has closed stdout or stderr (`>&-`), let what is printed go nowhere, and say so if anybody can
    hear it: without, the first line would end a run whose files are still to be written."""
    for name in ("stderr", "stdout"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", newline="\n"))  # noqa: SIM115 (until the process ends)
            say(f"{name} is closed: nothing is printed there.")


def close_stdout() -> None:
    """Forget what could not be written, or the interpreter would try again on its way out and show a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(document: "Document", piped_width: int = _PIPED_WIDTH) -> None:
    """Print a document on stdout. piped_width: the most columns of its tables where no terminal says how many"""
    from rich.console import Console

    from perfmodel.report.terminal import show_document

    is_terminal = sys.stdout.isatty()
    show_document(document, Console(width=None if is_terminal else piped_width, soft_wrap=not is_terminal))


def show_text(text: str, width: int | None = None) -> None:
    """Print lines on stdout, wrapped between words at `width` columns (of the terminal, where there is one)."""
    import shutil
    import textwrap

    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    for line in text.splitlines():
        print(line if width is None or len(line) <= width else textwrap.fill(line, width))


def print_answer(answer: "Answer", as_json: bool, report_file: Path | None = None, has_details: bool = True) -> None:
    """Print an answer: as files where a report was asked for, then as JSON or on the terminal, there in brief unless it
    `has_details`."""
    if report_file is not None:
        from perfmodel.report.pages import write_report

        for written in write_report(answer.document, answer.data, report_file):
            say(f"Written to {written}")
    if as_json:
        print_json(answer.data)
        return
    if answer.text:
        show_text(answer.text) if answer.is_prose else sys.stdout.write(answer.text)
    elif answer.make_brief is not None and not has_details:
        show(answer.make_brief(), _BRIEF_WIDTH)
    elif answer.make_document is not None:
        show(answer.document)
    for line in answer.closing:
        print(line)


def print_json(document: Any) -> None:
    """One JSON document on stdout; numbers that JSON has no word for become null."""
    sys.stdout.write(json.dumps(to_jsonable(document), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def progress_line(what: str, done: int, total: int | None, passed_s: float, pace: "Pace") -> str:
    """`simulating: 400 of 1,600, about 30 s left`."""
    from perfmodel.report.numbers import format_duration

    if not done or not total:
        return f"{what}: {format_duration(passed_s)} so far"
    left_s = 0.0 if done >= total else pace.left_s(done, total, passed_s)
    left = f"{format_duration(passed_s)} so far" if left_s is None else f"about {format_duration(left_s)} left"
    return f"{what}: {done:,} of {total:,}, {left}"


@contextmanager
def progress_lines(what: str, every_s: float = 10.0) -> Iterator[Progress]:
    """A callback `(done, total)`, and a line on stderr about it every `every_s` seconds: for pipes and log files."""
    from perfmodel.commands.request import Pace

    gc.freeze()  # as in `progress_bar`
    begun, is_over, pace = time.monotonic(), threading.Event(), Pace()
    known: tuple[int, int | None] = 0, None

    def update(done: int, total: int | None) -> None:
        nonlocal known
        pace.since_first(done, time.monotonic() - begun)
        known = done, total

    def speak() -> None:
        while not is_over.wait(every_s):
            say(progress_line(what, *known, time.monotonic() - begun, pace))

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield update
    finally:
        is_over.set()
        speaker.join()


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """A callback `(done, total)` that draws on stderr, or None where no terminal is watching."""
    gc.freeze()  # what is loaded when long work begins stays: nobody need look there for cycles
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console
    from rich.text import Text

    class Done(bars.MofNCompleteColumn):
        """`3/18`; nothing where the whole is not known."""

        def render(self, task: bars.Task) -> Text:
            return Text() if task.total is None else super().render(task)

    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), Done(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
