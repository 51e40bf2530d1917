"""Command line of the measuring programme."""

__all__ = ["Part", "main", "measure"]

import datetime
import platform
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from perfmodel.errors import PerfmodelError
from perfmodel_executors.device import default_kernels, device_name, present_device
from perfmodel_executors.gpu_suite.ceilings import measure_device
from perfmodel_executors.gpu_suite.kernels import kernel_tasks
from perfmodel_executors.gpu_suite.results import Results
from perfmodel_executors.gpu_suite.runner import Outcome, run_tasks
from perfmodel_executors.gpu_suite.serving import serving_tasks
from perfmodel_executors.gpu_suite.steps import reference_meter, step_tasks
from perfmodel_executors.gpu_suite.task import Bench
from perfmodel_executors.kernels.tiles import choices

_ROOT = Path(__file__).resolve().parents[3]


class Part(StrEnum):
    """What can be asked for alone."""

    kernels = "kernels"
    steps = "steps"
    serving = "serving"


_TASKS = {Part.kernels: kernel_tasks, Part.steps: step_tasks, Part.serving: serving_tasks}

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the results; a second run goes on there.")]
Budget = Annotated[float, typer.Option("--budget-s", min=1.0, help="Seconds after which nothing new is begun.")]
DeviceName = Annotated[str, typer.Option("--device", help="cuda, cpu, or auto: a GPU where there is one.")]
Parts = Annotated[list[Part] | None, typer.Option("--part", help="Only this part; may be given several times.")]
KernelsName = Annotated[str, typer.Option("--kernels", help="triton, torch, or auto: triton on a GPU.")]


def measure(
    out: Out, budget_s: Budget = 480.0, device: DeviceName = "auto", part: Parts = None, kernels: KernelsName = "auto"
) -> None:
    """Measure this device: ceilings, kernels, steps, served scenarios. Ends within the budget, and can be gone on."""
    results = Results(out)
    bench = _bench(device, kernels, results.info().get("reference_s"))
    _say(f"{bench.hardware.name} with {bench.backend} kernels, {budget_s:g} s")
    start = datetime.datetime.now()
    ceilings = measure_device(bench)
    spent = (datetime.datetime.now() - start).total_seconds()
    tasks = [task for name in part or list(Part) for task in _TASKS[name](bench)]
    outcome = run_tasks(tasks, results, budget_s - spent, _progress)
    results.write("suite.json", _info(bench, ceilings, outcome, results, budget_s))
    _say(f"{sum(outcome.done.values())} measured in {outcome.elapsed_s:.0f} s, {len(outcome.left_out)} left out")
    for key, failure in outcome.failures.items():
        _say(f"failed: {key}: {failure}")


def main() -> None:
    """Entry point: one sentence and status 2 for what is wrong with the arguments."""
    try:
        typer.run(measure)
    except PerfmodelError as error:
        _say(f"error: {error}")
        sys.exit(2)


def _bench(device: str, kernels: str, reference_s: float | None) -> Bench:
    """reference_s: of an earlier run whose measurements are gone on with."""
    place, hardware = present_device(device)
    backend = default_kernels(place) if kernels == "auto" else kernels
    if place.type != "cpu":
        return Bench(place, hardware, backend)
    torch.set_num_threads(1)
    return Bench(place, hardware, backend, reference_meter(reference_s))


def _info(
    bench: Bench, ceilings: dict[str, Any], outcome: Outcome, results: Results, budget_s: float
) -> dict[str, Any]:
    """The fields of `SuiteInfo`."""
    is_gpu = bench.device.type == "cuda"
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if is_gpu:
        import triton

        versions |= {"triton": triton.__version__, "cuda": str(torch.version.cuda), "driver": _driver()}
    return {
        "device": bench.hardware.name,
        "device_name": device_name(bench.device) if is_gpu else f"CPU, {platform.machine()}, one thread",
        "kernels": bench.backend,
        "versions": versions,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "command": f"python -m perfmodel_executors.gpu_suite --out {results.folder.name} --budget-s {budget_s:g}",
        "elapsed_s": round(outcome.elapsed_s, 1),
        "reference_s": bench.drift.reference_s if bench.drift is not None else None,
        "ceilings": ceilings,
        "parts_done": {part: len(results.part(part)) for part in _TASKS},
        "left_out": outcome.left_out,
        "failures": outcome.failures,
        "tiles": choices(),
    }


def _driver() -> str:
    """As the management library says; empty where it is not there."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def _commit() -> str:
    """Of the checkout this runs from; empty outside one."""
    try:
        command = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _progress(key: str, elapsed_s: float, budget_s: float) -> None:
    _say(f"[{elapsed_s:5.0f} of {budget_s:.0f} s] {key}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
