"""`perfmodel calibrate`: measure this machine and write its calibration."""

__all__ = ["Device", "calibrate"]

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import answer, print_json, progress_bar, say

if TYPE_CHECKING:
    from perfmodel.files.base import Spec


class Device(StrEnum):
    """What can be measured in place."""

    cpu = "cpu"


DeviceName = Annotated[Device, typer.Option("--device", help="The device to measure.")]
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
        "device measured by the executor (reports/measured/<device>).",
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
CalibrationPath = Annotated[
    Path | None, typer.Option("--out", metavar="PATH", help="File to write the calibration to.", show_default=False)
]


def calibrate(
    device: DeviceName = Device.cpu,
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
    out: CalibrationPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure whole steps on this machine and fit achieved fractions and overheads to them.

    Needs the executor extra (torch). Takes a minute or two. With --from, fits recorded measurements: kernel tables
    (`<system>/<op>.parquet`) or a layer profile give a calibration per device, serving runs (.json) and steady states
    (.csv) the engine's profile.
    """
    if measurements is not None:
        named = engine or ("perfmodel" if (measurements / "suite.json").is_file() else "vllm")
        asked = {
            "routing": routing,
            "whole_runs": whole_runs,
            "exchange": exchange,
            "overheads": overheads,
            "kernel_errors": kernel_errors,
            "softmax": softmax,
        }
        kind = next((name for name, is_asked in asked.items() if is_asked), "")
        written = _fit_recorded(measurements, named, generation, kind, out)
        _say_written(written, as_json)
        return
    from perfmodel.validate.executed.bridge import load_executor

    with progress_bar("measuring") as progress:
        calibration, path = load_executor().calibrate_cpu(models=model, out=out, progress=progress)
    from perfmodel.report.views.validation import calibration_view

    answer(calibration_view(calibration), {**calibration.model_dump(mode="json"), "path": str(path)}, as_json)
    say(f"Written to {path}")


def _fit_recorded(
    path: Path, engine: str, generation: str | None, kind: str, out: Path | None
) -> "list[tuple[Spec, Path]]":
    from perfmodel.errors import SpecError

    if not path.exists():
        raise SpecError(f"calibrate --from {path}: no such file or folder.")
    from perfmodel.calibrate import recorded

    with progress_bar("fitting") as progress:
        if generation is not None:
            return [recorded.fit_recorded_generation(path, generation, out, progress)]
        if kind in recorded.SLOW_FITS:
            return [recorded.SLOW_FITS[kind](path, out, progress)]
        if kind in recorded.QUICK_FITS:
            return [recorded.QUICK_FITS[kind](path, out)]
        return [*recorded.fit_recorded(path, engine, out, progress)]


def _say_written(written: "list[tuple[Spec, Path]]", as_json: bool) -> None:
    if as_json:
        print_json([{**fitted.model_dump(mode="json"), "path": str(file)} for fitted, file in written])
        return
    for fitted, file in written:
        say(f"{getattr(fitted, 'source', '')}\nWritten to {file}")
