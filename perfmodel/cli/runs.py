"""What `simulate` and `execute` share: the folder for files, the answer on the terminal or as JSON, the reports."""

__all__ = ["present", "run_to_folder"]

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from perfmodel.cli.terminal import EXIT_INTERRUPTED, give, progress_bar, say, word_when_long
from perfmodel.errors import PerfmodelError, SpecError

if TYPE_CHECKING:
    from perfmodel.answers.answer import Answer, Progress
    from perfmodel.report.runs import RunFolder
    from perfmodel.sim.records.result import RunResult

_MOST_BYTES_READ = 100_000_000  # of a steps.csv: about a million records


def run_to_folder(
    what: str,
    run: "Callable[[Progress | None, Path | None], Answer]",
    out: Path | None,
    as_json: bool,
    has_details: bool = False,
) -> None:
    """Run with a progress bar, write the files if there is a folder for them, and give the answer.

    Ctrl-C ends with status 130; records written so far stay where they are.
    """
    folder = _folder(out) if out is not None else None
    try:
        with progress_bar(what) as progress:
            answer = run(word_when_long(progress), folder.work if folder is not None else None)
        if folder is not None:
            _write_files(answer.result, folder.work)
            folder.finish()
    except KeyboardInterrupt:
        records = f"the finished requests are in {folder.work / 'requests.csv'}" if folder else None
        say(f"interrupted: {records or 'nothing was saved (no --out)'}.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (PerfmodelError, OSError) as error:
        if folder is None:
            raise
        folder.give_up()
        if isinstance(error, OSError):  # a disk that is full has no name
            raise SpecError(f"--out {out}: cannot be written: {error.strerror or error}.") from None
        raise
    present(answer, out, as_json, has_details)


def _folder(out: Path) -> "RunFolder":
    from perfmodel.report.runs import RunFolder

    return RunFolder(out)


def present(answer: "Answer", folder: Path | None, as_json: bool, has_details: bool) -> None:
    """Print the answer, in brief unless it `has_details`; with a folder, name the files that are in it."""
    give(answer, as_json, has_details=has_details)
    if folder is not None and not as_json:
        print(f"Report: {folder / 'report.html'}")
        print(f"Timeline for ui.perfetto.dev: {folder / 'timeline.json'}")
        print(f"Records: {folder / 'requests.csv'}, {folder / 'steps.csv'}")


def _write_files(result: "RunResult", folder: Path) -> None:
    import json

    from perfmodel.files.whole import write_whole
    from perfmodel.planning.sweeps.typical_step import estimate_mean_step
    from perfmodel.printable import to_jsonable
    from perfmodel.report.pages import render_page
    from perfmodel.report.runs import write_timeline
    from perfmodel.report.views.run import run_view

    result = _with_records(result, folder)
    write_whole(folder / "result.json", json.dumps(to_jsonable(result.to_json()), indent=2) + "\n")
    try:
        step = estimate_mean_step(result)
    except PerfmodelError:  # the run itself succeeded: its report must not fail for an illustration
        step = None
    write_whole(folder / "report.html", render_page(run_view(result, step)))
    write_timeline(folder / "timeline.json", result)


def _with_records(result: "RunResult", folder: Path) -> "RunResult":
    """`result` with its step records in memory, unless they are too many to draw."""
    from perfmodel.report.runs import read_steps

    streamed = folder / "steps.csv"
    if result.steps is not None or not streamed.exists():
        return result
    size = streamed.stat().st_size
    if size > _MOST_BYTES_READ:
        note = f"The {size / 1e6:,.0f} MB of step records are in steps.csv; they are too many to be drawn here."
        return replace(result, notes=(*result.notes, note))
    return replace(result, steps=read_steps(streamed))
