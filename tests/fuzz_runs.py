"""One case of the fuzzer, run in this process under limits: what it printed, and what is wrong with that.

Right is: an end within 20 seconds of CPU time and a gigabyte; exit status 0, or 1 where `plan` finds nothing; or status
2 with a sentence (or one line per mistake of a file) and nothing on stdout. For a request: see `fuzz_servers`. An alarm
breaks into Python code; a loop inside a library's C code outlives it, and then whoever has started this process must
end it.
"""

__all__ = ["MAX_BYTES", "MAX_SECONDS", "Outcome", "TooSlowError", "limit_memory", "run_case"]

import contextlib
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuzz_cases import FuzzCase
from fuzz_servers import run_request, traced
from typer.testing import CliRunner

MAX_SECONDS = 20.0
MAX_BYTES = 1_000_000_000
_MAX_LINES = 6  # five mistakes of one file, and how many more


class TooSlowError(BaseException):
    """No `except Exception` swallows it."""


@dataclass(frozen=True)
class Outcome:
    """status: exit or HTTP status; wrong: the fault, empty if there is none; seconds: CPU time"""

    status: int
    wrong: str
    seconds: float


def limit_memory() -> None:
    """Let this process have a gigabyte more than now; for good.

    pyarrow would set gigabytes of addresses apart at its first table, whatever it needs of them.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run_case(case: FuzzCase) -> Outcome:
    """Run a command in a folder of its own, or send a request to a server in this process."""
    run = run_request if case.args[0] in ("page", "emulator") else _run_command
    before = resource.getrusage(resource.RUSAGE_SELF)
    with _folder(case), _one_core(), _alarm():
        try:
            status, wrong = run(case)
        except (TooSlowError, BaseExceptionGroup):
            status, wrong = -1, f"not done after {MAX_SECONDS:g} s of CPU time"
        except Exception as error:
            status, wrong = 1, traced(error)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Outcome(status, wrong, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _run_command(case: FuzzCase) -> tuple[int, str]:
    """The exit status of `perfmodel` on a case, and what is wrong."""
    from perfmodel.cli import app

    result = CliRunner().invoke(app, list(case.args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, traced(result.exception)
    return result.exit_code, _judged(case.args[0], result.exit_code, result.stdout, result.stderr)


def _judged(command: str, status: int, stdout: str, stderr: str) -> str:
    if status == 0 or (status == 1 and command == "plan"):
        own = stdout.replace("'NaN'", "").replace("'nan'", "")  # less what quotes an input
        return "nan in an answer" if "NaN" in own or " nan " in own else ""
    if status != 2:
        return f"exit status {status}"
    lines = stderr.strip().splitlines()
    if not stderr.startswith("error: ") and "Usage:" not in stderr:
        return f"status 2 without a sentence: {stderr[:200]!r}"
    if stdout:
        return f"status 2 with an answer: {stdout[:100]!r}"
    if "enough memory" in stderr:
        return "more than a gigabyte"
    if len(lines) > _MAX_LINES and "Usage:" not in stderr:
        return f"{len(lines)} lines of error"
    return ""


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """On one core nothing is worked on in other processes, which no limit here would reach."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _folder(case: FuzzCase) -> Iterator[None]:
    back = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        for file, content in case.files.items():
            (Path(name) / file).parent.mkdir(parents=True, exist_ok=True)
            (Path(name) / file).write_bytes(content)
        os.chdir(name)
        try:
            yield
        finally:
            os.chdir(back)


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
