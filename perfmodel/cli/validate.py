"""`perfmodel validate KIND PATH`: predictions beside measurements."""

__all__ = ["Kind", "validate"]

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from perfmodel.answers.answer import Answer
from perfmodel.answers.asked import Asked, load
from perfmodel.answers.command_lines import Given, command_line
from perfmodel.cli.flags import takes_flags
from perfmodel.cli.options import Details, JsonFlag, Overrides, ReportFile, Seed
from perfmodel.cli.terminal import give, progress_bar, say
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
    bench = "bench"
    plans = "plans"


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
_EXIT_DIFFERS = 1  # of `plans`, where an engine decided otherwise
Progress = Callable[[int, int | None], None]

KindName = Annotated[
    Kind,
    typer.Argument(metavar="KIND", help="What to compare with.", show_default=False),
]
TruthPaths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATH...",
        help="For `executor`, a scenario; for `techniques`, a folder of them; for `bench`, files of load tools; else "
        "data.",
        show_default=False,
    ),
]
DeploymentName = Annotated[
    str | None,
    typer.Option(
        "--scenario",
        metavar="SCENARIO",
        help="With `bench`: the deployment that was measured; the traffic is the files'.",
        show_default=False,
    ),
]
Measured = Annotated[
    Path | None,
    typer.Option(
        "--measured",
        metavar="FOLDER",
        help="With `executor`: compare with a device measured before (reports/measured/<device>), offline; with a "
        "scenario, with a run of it (the --out of `execute`).",
        show_default=False,
    ),
]
Speed = Annotated[
    float | None,
    typer.Option(
        "--speed",
        metavar="S",
        help="With `bench`: the --speed of the emulator that was measured; times and rates are those of its clock.",
        show_default=False,
    ),
]
Repeats = Annotated[int, typer.Option("--repeat", min=1, help="Execute this many times.")]


@takes_flags("model", "hardware", "traffic", has_file=False)
def validate(
    asked: Asked,
    kind: KindName,
    paths: TruthPaths = None,
    deployment: DeploymentName = None,
    measured: Measured = None,
    overrides: Overrides = None,
    speed: Speed = None,
    repeat: Repeats = 1,
    as_json: JsonFlag = False,
    seed: Seed = None,
    report_file: ReportFile = None,
    has_details: Details = False,
) -> None:
    """Put predictions beside measurements and say how far apart they are.

    `executor` calibrates this machine, simulates the scenario, executes it, and compares step by step and request
    by request; `techniques` does so for each scenario of a folder with its `technique` and without, and compares the
    speedups. Both need the executor extra (torch) and take `--repeat`; `--set` and `--seed` go with `executor`.
    `bench` reads results of your own server as load tools write them (vllm bench serve, SGLang, GuideLLM, AIPerf,
    InferenceX, MLPerf, llama-bench, trtllm-bench); what ran says `--scenario`, or `--model` and `--hardware`, with
    `--set`. `plans` replays recorded decisions of an engine's own scheduler; exit status 1 says that one differs. The
    other kinds read recorded measurements. `--report` writes the comparison as a document, with its JSON
    and plots beside it; `techniques` saves each finished pair there meanwhile, resumes where it was cut off, and keeps
    what the report has of pairs whose files have not changed since.
    """
    from perfmodel.report.pages import check_report_file

    check_report_file(report_file)
    _refuse_misplaced(kind, asked, deployment, measured, overrides, seed, repeat)
    _check_speed(kind, speed)
    if kind is Kind.plans:
        _plans(_subject(kind, paths), as_json, report_file)
        return
    with progress_bar("validating") as progress:
        if kind is Kind.bench:
            report = _bench(paths or [], _GivenFlags(deployment, asked.given, speed), overrides, progress)
        elif measured is not None and _is_run(measured):
            report = _run_of_engine(_subject(kind, paths, measured), measured, overrides, seed, progress)
        elif measured is not None:
            from perfmodel.validate.executed.measured import validate_measured

            report = validate_measured(Path(_subject(kind, paths, measured)), progress)
        elif kind is Kind.executor:
            report = _executor(_subject(kind, paths), overrides, seed, repeat, progress)
        elif kind is Kind.techniques:
            report = _techniques(_subject(kind, paths), repeat, progress, report_file)
        else:
            report = _recorded(kind, _subject(kind, paths), progress)
    from perfmodel.report.views.validation import bench_brief, validation_view

    again = repeat if repeat != 1 else None
    given: dict[str, Given] = {"scenario": deployment, "measured": measured, "set": overrides, "seed": seed}
    flags: dict[str, Given] = {"repeat": again, "speed": None if speed is None else f"{speed:g}", **asked.given}
    command = command_line("validate", kind.value, *(paths or []), **given, **flags, report=report_file)
    brief = partial(bench_brief, report) if kind is Kind.bench else None
    answer = Answer(report.to_json, lambda: validation_view(report, command), make_brief=brief)
    give(answer, as_json, report_file, has_details)
    _journal(report_file).remove()


class _GivenFlags(NamedTuple):
    """What says which deployment `bench` was measured on: a scenario, or flags; and at which speed of the emulator."""

    scenario: str | None
    flags: dict[str, str]
    speed: float | None


def _refuse_misplaced(
    kind: Kind,
    asked: Asked,
    deployment: str | None,
    measured: Path | None,
    overrides: list[str] | None,
    seed: int | None,
    repeat: int,
) -> None:
    """Raises SpecError for flags that say nothing to this kind.

    kind, asked, deployment, measured, overrides, seed, repeat: as of `validate`
    """
    is_executed = kind is Kind.executor and (measured is None or _is_run(measured))
    if (seed is not None and not is_executed) or (overrides and not is_executed and kind is not Kind.bench):
        raise SpecError("--set and --seed go with `validate executor SCENARIO`; recorded data is as it is.")
    if not is_executed and kind is not Kind.techniques and repeat != 1:
        raise SpecError("--repeat goes with what is executed: `validate executor` and `validate techniques`.")
    if measured is not None and kind is not Kind.executor:
        raise SpecError("--measured FOLDER goes with `validate executor` alone, without a scenario.")
    said = [*(["scenario"] if deployment is not None else []), *asked.given]
    if said and kind is not Kind.bench:
        raise SpecError(f"--{said[0]} goes with `validate bench FILE...`, whose files do not say what was served.")
    beside = [name for name in said[1:] if name != "traffic"]
    if deployment is not None and beside:
        raise SpecError(f"--scenario beside --{beside[0]}: the scenario says what was served; change it with --set.")


def _check_speed(kind: Kind, speed: float | None) -> None:
    """Raises SpecError for a speed of no clock, and of measurements of real devices."""
    if speed is not None and kind is not Kind.bench:
        raise SpecError("--speed goes with `validate bench FILE...`, of an emulator (`perfmodel serve --speed`).")
    if speed is not None and not 0 < speed < float("inf"):
        raise SpecError(f"--speed: got {speed:g}; expected more than 0 simulated seconds per second.")


def _subject(kind: Kind, paths: list[str] | None, measured: Path | None = None) -> str:
    """What is compared with: a path or a scenario. Raises SpecError where there is none, or two."""
    if measured is not None and not _is_run(measured):
        if paths:
            raise SpecError("--measured FOLDER goes with `validate executor` alone, without a scenario.")
        return str(measured)
    if not paths:
        wanted = "a scenario, or --measured FOLDER" if kind is Kind.executor else "the path of measured data"
        raise SpecError(f"validate {kind.value}: give {wanted}.")
    if len(paths) > 1:
        raise SpecError(f"validate {kind.value}: found {len(paths)} paths, allowed one; `bench` takes several files.")
    return paths[0]


def _bench(
    paths: list[str], given: _GivenFlags, overrides: list[str] | None, progress: Progress | None
) -> "ValidationReport":
    from perfmodel.calibrate.bench.scenarios import GivenSetup
    from perfmodel.validate.bench import validate_bench

    if not paths:
        raise SpecError("validate bench: give the files that the load tool wrote.")
    return validate_bench(paths, GivenSetup(given.scenario, given.flags, overrides or (), given.speed), progress)


def _executor(
    scenario: str, overrides: list[str] | None, seed: int | None, repeat: int, progress: Progress | None
) -> "ValidationReport":
    loaded = load(scenario, overrides, seed)
    from perfmodel.validate.executed.bridge import load_executor

    return load_executor().validate_executor(loaded, repeats=repeat, progress=progress)


def _is_run(folder: Path) -> bool:
    """Whether it is a run's (`perfmodel execute --out`), not a measured device's."""
    return (folder / "requests.csv").is_file()


def _run_of_engine(
    scenario: str, folder: Path, overrides: list[str] | None, seed: int | None, progress: Progress | None
) -> "ValidationReport":
    from perfmodel.calibrate.engine_runs import read_chunks
    from perfmodel.files.bounded import read_json
    from perfmodel.report.runs import read_requests, read_steps
    from perfmodel.validate.executed.recorded import validate_recorded

    loaded = load(scenario, overrides, seed)
    if (folder / "result.json").is_file():  # settings that the engine came to have are those of the prediction, too
        changed = (read_json(folder / "result.json").get("measured_on") or {}).get("changed", {})
        loaded = loaded.model_copy(update={"engine": loaded.engine.model_copy(update=changed)})
    steps, chunks = folder / "steps.csv", folder / "chunks.csv"
    parts = read_chunks(chunks) if chunks.is_file() else {}
    records = read_requests(folder / "requests.csv"), read_steps(steps), parts
    return validate_recorded(loaded, *records, progress)


def _techniques(path: str, repeat: int, progress: Progress | None, report_file: Path | None) -> "ValidationReport":
    from perfmodel.validate.techniques.compare import validate_techniques

    return validate_techniques(path, repeat, progress, journal=_journal(report_file), judged=lambda row: say(str(row)))


def _journal(report_file: Path | None) -> "Journal":
    """The report's own pairs, and beside it those of a run that was cut off, for the same command to go on with."""
    from perfmodel.validate.techniques.compare import Journal

    return Journal(report_file.with_suffix(".json") if report_file else None)


def _plans(path: str, as_json: bool, report_file: Path | None) -> None:
    """Replay a recording of plans; the exit status is 1 where a case differs, or could not be replayed."""
    _check_exists(Kind.plans, path)
    from perfmodel.report.views.validation import plans_view
    from perfmodel.validate.plans import validate_plans

    with progress_bar("replaying") as progress:
        report = validate_plans(path, progress)
    command = command_line("validate", Kind.plans.value, path, report=report_file)
    give(Answer(report.to_json, lambda: plans_view(report, command)), as_json, report_file)
    if report.equal < report.rows:
        raise typer.Exit(_EXIT_DIFFERS)


def _check_exists(kind: Kind, path: str) -> None:
    if not Path(path).exists():
        raise SpecError(f"validate {kind.value} {path}: no such file or folder.")


def _recorded(kind: Kind, path: str, progress: Progress | None) -> "ValidationReport":
    _check_exists(kind, path)
    from importlib import import_module

    module, name = _READERS[kind].split(":")
    report: ValidationReport = getattr(import_module(module), name)(path, progress)
    return report
