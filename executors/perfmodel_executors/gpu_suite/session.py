"""One call of the measuring programme: its tasks, its processes from beginning to end, and what `suite.json` says."""

import datetime
import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from perfmodel.errors import SpecError
from perfmodel_executors.device import default_kernels, device_name, present_device
from perfmodel_executors.gpu_suite import processes
from perfmodel_executors.gpu_suite.ahead import Ahead
from perfmodel_executors.gpu_suite.kernels import kernel_tasks, measure_device
from perfmodel_executors.gpu_suite.readings import DeviceReader, commit, versions
from perfmodel_executors.gpu_suite.runner import Results, TaskOutcome, run_tasks
from perfmodel_executors.gpu_suite.serving import pair_tasks, serving_tasks, vllm_tasks
from perfmodel_executors.gpu_suite.smoke import smoke_tasks
from perfmodel_executors.gpu_suite.steps import reference_meter, step_tasks
from perfmodel_executors.gpu_suite.task import Bench, Task
from perfmodel_executors.measure.energy import energy_counter

_GRACE_S = 10.0  # after the budget, for the last task
_AHEAD_SHARE = 0.3  # of the budget, after which whole models run beside the compilation
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP
_WRITE_S = 5.0  # between two writings of suite.json
_CEILINGS = ("ceilings", "device")  # part and key
TASKS = {
    **{"smoke": smoke_tasks, "kernels": kernel_tasks, "steps": step_tasks},
    **{"serving": serving_tasks, "pairs": pair_tasks, "vllm": vllm_tasks},
}


class SuiteRequest(NamedTuple):
    """What is to be measured, in the folder `out`; budget_s: seconds from `start` on, a time of `time.monotonic`."""

    out: Path
    budget_s: float
    start: float
    parts: Sequence[str] = ()
    device: str = "auto"
    kernels: str = "auto"


def bench_of(device: str, kernels: str, reference_s: float | None = None) -> Bench:
    """The device and kernels that the command line names; reference_s: of an earlier run that is gone on with."""
    place, hardware = present_device(device)
    backend = default_kernels(place) if kernels == "auto" else kernels
    if place.type != "cpu":
        return Bench(place, hardware, backend, energy=energy_counter(place))
    torch.set_num_threads(1)
    return Bench(place, hardware, backend, reference_meter(reference_s))


def tasks_of(device: str, kernels: str, reference_s: float | None = None) -> Iterator[Task]:
    bench = bench_of(device, kernels, reference_s)
    yield Task(*_CEILINGS, partial(measure_device, bench))
    for tasks in TASKS.values():
        yield from tasks(bench)


def measure(request: SuiteRequest) -> TaskOutcome:
    """Measures the device; ends within the budget, and goes on with what an earlier call left. Raises SpecError for a
    folder with another device's results, PerfmodelError for a device that is not here."""
    results = Results(request.out)
    known = results.part("suite")
    bench = bench_of(request.device, request.kernels, known.get("reference_s"))
    for name, value in {"device": bench.hardware.name, "kernels": bench.backend}.items():
        if known.get(name, value) != value:
            raise SpecError(
                f"--out {results.folder}: has measurements with {name} {known[name]}, and this is {value}; name "
                f"another folder."
            )
    _say(f"{bench.hardware.name} with {bench.backend} kernels, {request.budget_s:g} s")
    with _ended_by_signals():
        session = _Session(request, bench, results)
        try:
            return session.run()
        finally:
            session.end()


def summary_of(request: SuiteRequest, outcome: TaskOutcome) -> tuple[list[str], bool]:
    results = Results(request.out)
    wrong = {
        part: [
            f"WRONG RESULT: {key}: differs by {record['error']:.2g}; expected at most {record['tolerance']:.2g}"
            for key, record in results.part(part).items()
            if record["error"] is not None and not record["error"] <= record["tolerance"]
        ]
        for part in ("smoke", "kernels")
    }
    failures = [f"failed: {key}: {failure}" for key, failure in outcome.failures.items()]
    counts = ", ".join(f"{len(results.part(part))} of {part}" for part in TASKS)
    done = f"{sum(outcome.done.values())} measured in {outcome.elapsed_s:.0f} s, {len(outcome.left_out)} left out"
    is_right = not wrong["smoke"] and not outcome.num_failed.get("smoke")
    return [*failures, *wrong["smoke"], *wrong["kernels"], f"{done}; in all {counts}."], is_right


class _Session:
    def __init__(self, request: SuiteRequest, bench: Bench, results: Results) -> None:
        self._request, self._bench, self._results = request, bench, results
        self._earlier = dict(results.part("suite"))
        self._parts = list(request.parts) or list(TASKS)
        self._reference_s = bench.drift.reference_s if bench.drift is not None else None
        self._worker = processes.Worker(tasks_of, request.device, request.kernels, self._reference_s)
        self._worker.begin()
        self._reader = DeviceReader(bench.device.type == "cuda", self._earlier.get("readings"))
        self._ceilings: Mapping[str, Any] = self._earlier.get("ceilings") or {}
        self._retries = processes.TuningRetries(self._run, self._earlier.get("untuned"))
        self._written = 0.0
        self._ahead = Ahead(bench, self._parts, _AHEAD_SHARE * request.budget_s)

    @property
    def _spent_s(self) -> float:
        return time.monotonic() - self._request.start

    def run(self) -> TaskOutcome:
        if not self._ceilings:
            try:
                self._ceilings = self._retries.execute(Task(*_CEILINGS, dict))
            except processes.TaskError as error:  # the rest is measured all the same
                _say(f"failed: ceilings: {error}")
        tasks = [task for name in self._parts for task in TASKS[name](self._bench)]
        outcome = run_tasks(
            *(tasks, self._results, self._request.budget_s - self._spent_s, self._progress),
            execute=self._retries.execute,
            is_open=self._ahead.is_open,
            failed=self._earlier.get("failures"),
        )
        self._write(outcome)
        return outcome

    def end(self) -> None:
        self._ahead.pool.end()
        self._worker.end()
        self._reader.close()

    def _run(self, task: Task, is_tuned: bool) -> Mapping[str, Any]:
        left_s = max(0.0, self._request.budget_s - self._spent_s) + _GRACE_S
        try:
            return self._worker.run(task, min(task.limit_s, left_s), min(processes.START_LIMIT_S, left_s), is_tuned)
        except (processes.TaskTimeoutError, processes.StartError) as error:
            if self._spent_s >= self._request.budget_s:
                raise processes.BudgetSpentError(str(error)) from None
            raise

    def _progress(self, key: str, outcome: TaskOutcome, elapsed_s: float) -> None:
        left = self._ahead.pool.num_left
        _say(f"[{self._spent_s:5.0f} of {self._request.budget_s:.0f} s, {left} to compile] {key}")
        if time.monotonic() - self._written >= _WRITE_S:
            self._write(outcome)

    def _write(self, outcome: TaskOutcome) -> None:
        bench, earlier, worker = self._bench, self._earlier, self._worker
        is_gpu = bench.device.type == "cuda"
        parts = " ".join(f"--part {part}" for part in self._request.parts)
        command = f"python -m perfmodel_executors.gpu_suite --out {self._results.folder.name}"
        call = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": f"{command} --budget-s {self._request.budget_s:g} {parts}".strip(),
            "commit": commit(),
            "elapsed_s": round(self._spent_s, 1),
            "spent_s": {part: round(seconds, 1) for part, seconds in outcome.spent_s.items()},
            "num_processes": worker.num_begun,
            "compile_s": round(worker.compiled[0], 1),
            "num_compiled": worker.compiled[1],
            "num_compiled_ahead": self._ahead.pool.num_done,
        }
        calls = [*earlier.get("calls", ()), call]
        info = {
            "device": bench.hardware.name,
            "device_name": device_name(bench.device) if is_gpu else f"CPU, {platform.machine()}, one thread",
            "kernels": bench.backend,
            "versions": versions(is_gpu),
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
            "command": call["command"],
            "elapsed_s": round(sum(item["elapsed_s"] for item in calls), 1),
            "reference_s": self._reference_s,
            "ceilings": self._ceilings,
            "parts_done": {part: len(self._results.part(part)) for part in TASKS},
            "left_out": outcome.left_out,
            "failures": outcome.failures,
            "tiles": {**earlier.get("tiles", {}), **worker.tiles},
            "untuned": self._retries.untuned,
            "readings": self._reader.as_json(),
            "calls": calls,
        }
        self._results.write("suite.json", info)
        self._written = time.monotonic()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within, what asks this process to end (`timeout`, a terminal) lets it end its own processes first."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    known = {number: signal.signal(number, stop) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in known.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
