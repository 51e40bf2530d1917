"""Command line of the measuring programme."""

__all__ = ["main", "measure"]

import datetime
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from perfmodel.errors import PerfmodelError
from perfmodel_executors.device import device_name
from perfmodel_executors.gpu_suite.ahead import Ahead
from perfmodel_executors.gpu_suite.programme import CEILINGS, TASKS, Part, bench_of, tasks_of
from perfmodel_executors.gpu_suite.results import Results
from perfmodel_executors.gpu_suite.runner import TaskOutcome, run_tasks
from perfmodel_executors.gpu_suite.task import Bench, Task
from perfmodel_executors.gpu_suite.worker import TaskError, Worker

_ROOT = Path(__file__).resolve().parents[3]
_LIMIT_S = 150.0  # of one task: it hangs
_GRACE_S = 10.0  # after the budget, for the last task
_AHEAD_SHARE = 0.3  # of the budget, after which whole models run beside the compilation

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
    bench = bench_of(device, kernels, results.info().get("reference_s"))
    _say(f"{bench.hardware.name} with {bench.backend} kernels, {budget_s:g} s")
    start = time.monotonic()

    def left_s() -> float:
        return budget_s - (time.monotonic() - start)

    worker = Worker(tasks_of, device, kernels, bench.drift.reference_s if bench.drift is not None else None)
    worker.begin()
    parts = part or list(Part)
    ahead = Ahead(bench, parts, _AHEAD_SHARE * budget_s)
    try:
        ceilings = _ceilings(worker)
        tasks = [task for name in parts for task in TASKS[name](bench)]

        def execute(task: Task) -> Mapping[str, Any]:
            return worker.run(task, min(_LIMIT_S, max(0.0, left_s()) + _GRACE_S))

        def progress(key: str, elapsed_s: float, budget: float) -> None:
            _say(f"[{budget_s - left_s():5.0f} of {budget_s:.0f} s, {ahead.num_left} to compile] {key}")
            results.write("suite.json", _info(bench, worker, ceilings, TaskOutcome(), results, budget_s))

        outcome = run_tasks(tasks, results, left_s(), progress, execute=execute, is_open=ahead.is_open)
    finally:
        ahead.end()
        worker.end()
    results.write("suite.json", _info(bench, worker, ceilings, outcome, results, budget_s))
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


def _ceilings(worker: Worker) -> Mapping[str, Any]:
    """What is known of them: without, the rest is measured all the same."""
    try:
        return worker.run(Task(*CEILINGS, dict), _LIMIT_S)
    except TaskError as error:
        _say(f"failed: ceilings: {error}")
        return {}


def _info(
    bench: Bench, worker: Worker, ceilings: Mapping[str, Any], outcome: TaskOutcome, results: Results, budget_s: float
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
        "parts_done": {part: len(results.part(part)) for part in TASKS},
        "left_out": outcome.left_out,
        "failures": outcome.failures,
        "tiles": worker.tiles,
    }


@lru_cache
def _driver() -> str:
    """As the management library says; empty where it is not there."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


@lru_cache
def _commit() -> str:
    """Commit of the checkout that this runs from; empty outside one."""
    try:
        command = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
