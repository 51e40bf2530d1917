"""`perfmodel calibrate`: measure this machine and write its calibration."""

__all__ = ["Device", "calibrate"]

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.answers.answer import Answer
from perfmodel.cli.options import JsonFlag, Overrides
from perfmodel.cli.own_server import DEFAULT_FOLDER, OwnServer, fit_to_engine, fit_to_load_tests
from perfmodel.cli.terminal import give, print_json, progress_bar, say
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.files.base import Spec


class Device(StrEnum):
    """What can be measured in place."""

    cpu = "cpu"


DeviceName = Annotated[
    Device | None, typer.Option("--device", help="The device to measure; cpu unless given.", show_default=False)
]
ModelNames = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME", help="Models whose steps are timed; may be given several times."),
]
Measurements = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="PATH",
        help="Fit recorded measurements: kernel tables, a run with a layer profile, serving runs, steady states, or a "
        "device measured by the executor (reports/measured/<device>); with --name, load tests of your own server.",
        show_default=False,
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="With --from: the engine whose measurements are fitted; vllm, or perfmodel for the executor's.",
        show_default=False,
    ),
]
Generation = Annotated[
    str | None,
    typer.Option(
        "--generation",
        metavar="ARCHITECTURE",
        help="With --from: fit what this architecture leaves of the fractions that the one before achieves.",
        show_default=False,
    ),
]
Routing = Annotated[
    bool, typer.Option("--routing", help="With --from: fit how unequally popular the experts of trained routers are.")
]
WholeRuns = Annotated[
    bool,
    typer.Option(
        "--whole-runs", help="With --from: fit published serving results on devices whose kernels nobody has published."
    ),
]
Exchanges = Annotated[
    bool, typer.Option("--exchange", help="With --from: fit dispatch and combine of expert parallelism (.csv).")
]
Overheads = Annotated[
    bool,
    typer.Option(
        "--overheads", help="With --from: fit single figures of PCIe, launches without graphs and sampling (.csv)."
    ),
]
KernelErrorsFlag = Annotated[
    bool,
    typer.Option("--kernel-errors", help="With --from: fit what calls of a kernel in one run err alike by (tables)."),
]
Softmax = Annotated[
    bool,
    typer.Option("--softmax", help="With --from: fit what a softmax takes beside its products (two layer profiles)."),
]
MoreFiles = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE...]", help="With --name: more results after --from's; with --on: scenarios.", show_default=False
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ENGINE",
        help="Run the scenarios on vLLM (as of `execute --on`) and fit whole steps of this device; with --name.",
        show_default=False,
    ),
]
ServerName = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Fit host and front end of your own server to load tests; `engine.profile: NAME` then uses them.",
        show_default=False,
    ),
]
ServedScenario = Annotated[
    str | None,
    typer.Option(
        "--scenario",
        metavar="SCENARIO",
        help="With --name: the deployment that was measured; the traffic is the files'.",
        show_default=False,
    ),
]
ServedOn = Annotated[
    str | None,
    typer.Option(
        "--hardware", metavar="DEVICE", help="With --name, in place of a scenario: the device.", show_default=False
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option("--to", metavar="DIR", help="With --name: folder to write to; ./calibrations unless given."),
]
Forced = Annotated[bool, typer.Option("--force", help="With --from or --on: write over a calibration that is there.")]
CalibrationPath = Annotated[
    Path | None, typer.Option("--out", metavar="PATH", help="File to write the calibration to.", show_default=False)
]
# What each mode reads, by the flag that asks for it, besides --json.
_READS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "": frozenset({"--device", "--model", "--out"}),
        "--from": frozenset({"--from", "--out", "--force"}),  # and what is fitted
        "--name": frozenset(
            {
                "FILE...",
                "--model",
                "--from",
                "--engine",
                "--name",
                "--scenario",
                "--hardware",
                "--set",
                "--to",
                "--force",
            }
        ),
        "--on": frozenset({"FILE...", "--name", "--set", "--to", "--force"}),
    }
)


def calibrate(
    more: MoreFiles = None,
    device: DeviceName = None,
    model: ModelNames = None,
    measurements: Measurements = None,
    engine: EngineName = None,
    generation: Generation = None,
    routing: Routing = False,
    whole_runs: WholeRuns = False,
    exchange: Exchanges = False,
    overheads: Overheads = False,
    kernel_errors: KernelErrorsFlag = False,
    softmax: Softmax = False,
    on: On = None,
    name: ServerName = None,
    scenario: ServedScenario = None,
    hardware: ServedOn = None,
    overrides: Overrides = None,
    folder: Folder = None,
    force: Forced = False,
    out: CalibrationPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure whole steps on this machine and fit achieved fractions and overheads to them.

    Needs the executor extra (torch). Takes a minute or two. With --from, fits recorded measurements: kernel tables
    (`<system>/<op>.parquet`) or a layer profile give a calibration per device, serving runs (.json) and steady states
    (.csv) the engine's profile; with --name, load tests of your own server (any file of `validate bench`) the host and
    front end of that. With --on, runs scenarios on vLLM here and fits whole steps of this device: `--set
    engine.profile=NAME` predicts others. Calibrations that are there are fitted anew with --force alone.
    """
    kinds: dict[str, object] = {"--routing": routing, "--whole-runs": whole_runs, "--exchange": exchange}
    kinds |= {"--overheads": overheads, "--kernel-errors": kernel_errors, "--softmax": softmax}
    kinds["--generation"] = generation
    target_flag = next((flag for flag, value in kinds.items() if value), "--engine")
    given: dict[str, object] = {"FILE...": more, "--device": device, "--model": model, "--from": measurements}
    given |= {"--engine": engine, "--name": name, "--scenario": scenario, "--hardware": hardware}
    given |= {"--set": overrides, "--to": folder, "--force": force, "--out": out, **kinds}
    mode = "--on" if on is not None else "--name" if name is not None else "--from" if measurements is not None else ""
    _refuse_unread(mode, target_flag, [flag for flag, value in given.items() if value])
    if on is not None:
        if name is None:
            raise SpecError("--on goes with SCENARIO... and --name NAME.")
        target = OwnServer(name, "vllm", (), None, {}, overrides or (), folder or Path(DEFAULT_FOLDER), force)
        fit_to_engine(on, [str(file) for file in more or ()], target, as_json)
        return
    if name is not None:
        own = _own_server(name, measurements, more, engine, model)
        flags = {**own.flags, **({"hardware": hardware} if hardware else {})}
        target = replace(own, scenario=scenario, flags=flags, overrides=overrides or (), is_forced=force)
        fit_to_load_tests(target if folder is None else replace(target, folder=folder), as_json)
        return
    if measurements is not None:
        named = engine or ("perfmodel" if (measurements / "suite.json").is_file() else "vllm")
        kind = target_flag.removeprefix("--").replace("-", "_")
        _say_written(_fit_recorded(measurements, named, generation, kind, out, force), as_json)
        return
    from perfmodel.evidence.executed.bridge import load_executor

    with progress_bar("measuring") as progress:
        calibration, path = load_executor().calibrate_cpu(models=model, out=out, progress=progress)
    from perfmodel.report.views.validation import calibration_view

    fitted = {**calibration.model_dump(mode="json"), "path": str(path)}
    give(Answer(lambda: fitted, lambda: calibration_view(calibration)), as_json)
    say(f"Written to {path}")


def _own_server(
    name: str, measurements: Path | None, more: list[Path] | None, engine: str | None, model: list[str] | None
) -> OwnServer:
    """What --name asks for, of what its flags say as those of other fits do.

    name, measurements, more, engine, model: as of `calibrate`
    """
    if measurements is None:
        raise SpecError("--name goes with --from FILE...: the results of load tests of your server.")
    if model is not None and len(model) > 1:
        raise SpecError(f"--model: found {len(model)}, allowed the one that was served.")
    flags = {"model": model[0]} if model else {}
    files = (measurements, *(more or ()))
    return OwnServer(name, engine or "vllm", files, None, flags, (), Path(DEFAULT_FOLDER), False)


def _refuse_unread(mode: str, fitted: str, given: Iterable[str]) -> None:
    """Raises SpecError for a flag that is given and that the mode does not read.

    mode:   the flag that says what is done; empty: this machine is measured
    fitted: of --from alone: the flag that says what is fitted, or --engine
    """
    reads = _READS[mode] | ({fitted} if mode == "--from" else frozenset())
    for flag in given:
        if flag not in reads:
            others = [other for other, flags in _READS.items() if flag in flags and other not in (mode, flag)]
            where = " or ".join(other or "a measurement of this machine" for other in others) or "--from alone"
            raise SpecError(f"calibrate {mode}".rstrip() + f" does not read {flag}, which goes with {where}.")


def _fit_recorded(
    path: Path, engine: str, generation: str | None, kind: str, out: Path | None, is_forced: bool
) -> "list[tuple[Spec, Path]]":
    if not path.exists():
        raise SpecError(f"calibrate --from {path}: no such file or folder.")
    from perfmodel.evidence.fit import recorded

    with progress_bar("fitting") as progress:
        if kind in recorded.FITS_FOR_ALL:
            found = recorded.fit_recorded_for_all(kind, path, out, progress, is_forced, generation or "")
            return [found]
        return [*recorded.fit_recorded(path, engine, out, progress, is_forced)]


def _say_written(written: "list[tuple[Spec, Path]]", as_json: bool) -> None:
    if as_json:
        print_json([{**fitted.model_dump(mode="json"), "path": str(file)} for fitted, file in written])
        return
    for fitted, file in written:
        say(f"{getattr(fitted, 'source', '')}\nWritten to {file}")
