"""`perfmodel validate KIND PATH`: predictions beside measurements."""

__all__ = ["Kind", "validate"]

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.options import Given, JsonFlag, Overrides, ReportFile, Seed, command_line, load
from perfmodel.cli.terminal import answer, progress_bar, say
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.validate.report import ValidationReport
    from perfmodel.validate.techniques.compare import Journal


class Kind(StrEnum):
    """What predictions can be compared with."""

    operators = "operators"
    serving = "serving"
    steady_state = "steady-state"
    per_request = "per-request"
    throughput = "throughput"
    executor = "executor"
    local = "local"
    mlperf = "mlperf"
    served = "served"
    published = "published"
    techniques = "techniques"


# Recorded measurements: where the function `(path, progress) -> ValidationReport` of each kind is.
_READERS = {
    Kind.local: "perfmodel.validate.local:validate_local",
    Kind.mlperf: "perfmodel.validate.served:validate_mlperf",
    Kind.operators: "perfmodel.validate.operators:validate_operators",
    Kind.per_request: "perfmodel.validate.per_request:validate_per_request",
    Kind.published: "perfmodel.validate.published.compare:validate_published",
    Kind.served: "perfmodel.validate.served:validate_served",
    Kind.serving: "perfmodel.validate.serving:validate_serving",
    Kind.steady_state: "perfmodel.validate.steady_state:validate_steady_state",
    Kind.throughput: "perfmodel.validate.throughput:validate_throughput",
}
Progress = Callable[[int, int | None], None]

KindName = Annotated[
    Kind,
    typer.Argument(metavar="KIND", help="What to compare with.", show_default=False),
]
TruthPath = Annotated[
    str | None,
    typer.Argument(
        metavar="PATH",
        help="For `executor`, a scenario; for `techniques`, a folder of them; else data.",
        show_default=False,
    ),
]
Measured = Annotated[
    Path | None,
    typer.Option(
        "--measured",
        metavar="FOLDER",
        help="With `executor`: compare with a device measured before (reports/measured/<device>), offline.",
        show_default=False,
    ),
]
Repeats = Annotated[int, typer.Option("--repeat", min=1, help="Execute this many times.")]


def validate(
    kind: KindName,
    path: TruthPath = None,
    measured: Measured = None,
    overrides: Overrides = None,
    repeat: Repeats = 1,
    as_json: JsonFlag = False,
    seed: Seed = None,
    report_file: ReportFile = None,
) -> None:
    """Put predictions beside measurements and say how far apart they are.

    `executor` calibrates this machine, simulates the scenario, executes it, and compares step by step and request
    by request; `techniques` does so for each scenario of a folder with its `technique` and without, and compares the
    speedups. Both need the executor extra (torch) and take `--repeat`; `--set` and `--seed` go with `executor`. The
    other kinds read recorded measurements. `--report` writes the comparison as a document, with its JSON and plots
    beside it; `techniques` saves each finished pair there meanwhile, resumes where it was cut off, and keeps what the
    report has of pairs whose files have not changed since.
    """
    from perfmodel.report.written import check_report_file

    check_report_file(report_file)
    is_executed = kind is Kind.executor and measured is None
    if not is_executed and (overrides or seed is not None):
        raise SpecError("--set and --seed go with `validate executor SCENARIO`; recorded data is as it is.")
    if not is_executed and kind is not Kind.techniques and repeat != 1:
        raise SpecError("--repeat goes with what is executed: `validate executor` and `validate techniques`.")
    shown = _subject(kind, path, measured)
    with progress_bar("validating") as progress:
        if measured is not None:
            from perfmodel.validate.executed.measured import validate_measured

            report = validate_measured(measured, progress)
        elif kind is Kind.executor:
            report = _executor(shown, overrides, seed, repeat, progress)
        elif kind is Kind.techniques:
            report = _techniques(shown, repeat, progress, report_file)
        else:
            report = _recorded(kind, shown, progress)
    from perfmodel.report.views.validation import validation_view

    paths = [path] if path is not None else []
    again = repeat if repeat != 1 else None
    given: dict[str, Given] = {"measured": measured, "set": overrides, "seed": seed, "repeat": again}
    command = command_line("validate", kind.value, *paths, **given, report=report_file)
    answer(validation_view(report, command), report.to_json(), as_json, report_file)
    _journal(report_file).remove()


def _subject(kind: Kind, path: str | None, measured: Path | None) -> str:
    """What is compared with: a path or a scenario. Raises SpecError where there is none, or two."""
    if measured is not None:
        if kind is not Kind.executor or path is not None:
            raise SpecError("--measured FOLDER goes with `validate executor` alone, without a scenario.")
        return str(measured)
    if path is None:
        wanted = "a scenario, or --measured FOLDER" if kind is Kind.executor else "the path of measured data"
        raise SpecError(f"validate {kind.value}: give {wanted}.")
    return path


def _executor(
    scenario: str, overrides: list[str] | None, seed: int | None, repeat: int, progress: Progress | None
) -> "ValidationReport":
    loaded = load(scenario, overrides, seed)
    from perfmodel.validate.executed.bridge import load_executor

    return load_executor().validate_executor(loaded, repeats=repeat, progress=progress)


def _techniques(path: str, repeat: int, progress: Progress | None, report_file: Path | None) -> "ValidationReport":
    from perfmodel.validate.techniques.compare import validate_techniques

    return validate_techniques(path, repeat, progress, journal=_journal(report_file), judged=lambda row: say(str(row)))


def _journal(report_file: Path | None) -> "Journal":
    """The report's own pairs, and beside it those of a run that was cut off, for the same command to go on with."""
    from perfmodel.validate.techniques.compare import Journal

    return Journal(report_file.with_suffix(".json") if report_file else None)


def _recorded(kind: Kind, path: str, progress: Progress | None) -> "ValidationReport":
    if kind not in _READERS:
        raise SpecError(
            f"validate {kind.value}: comparing with these measurements comes with the calibrations fitted to them, "
            f"which this version does not have yet; `validate executor SCENARIO` measures here and now."
        )
    if not Path(path).exists():
        raise SpecError(f"validate {kind.value} {path}: no such file or folder.")
    from importlib import import_module

    module, name = _READERS[kind].split(":")
    report: ValidationReport = getattr(import_module(module), name)(path, progress)
    return report
