"""One call of the measuring programme: its processes from beginning to end, and what `suite.json` says of it."""

import datetime
import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.errors import SpecError
from perfmodel_executors.device import device_name
from perfmodel_executors.gpu_suite.ahead import Ahead
from perfmodel_executors.gpu_suite.processes import TaskError, TaskTimeoutError
from perfmodel_executors.gpu_suite.programme import CEILINGS, TASKS, Part, bench_of, tasks_of
from perfmodel_executors.gpu_suite.readings import DeviceReader, commit, versions
from perfmodel_executors.gpu_suite.results import Results
from perfmodel_executors.gpu_suite.runner import TaskOutcome, run_tasks
from perfmodel_executors.gpu_suite.task import Bench, Task
from perfmodel_executors.gpu_suite.worker import BudgetSpentError, StartError, TuningRetries, Worker

_GRACE_S = 10.0  # after the budget, for the last task
_START_S = 120.0  # of a measuring process
_AHEAD_SHARE = 0.3  # of the budget, after which whole models run beside the compilation
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP
_WRITE_S = 5.0  # between two writings of suite.json


class SuiteRequest(NamedTuple):
    """What is to be measured.

    out:      folder of the results
    budget_s: seconds, from `start` on, a time of `time.monotonic`
    parts:    all where none is named; device and kernels as the command line names them
    """

    out: Path
    budget_s: float
    start: float
    parts: Sequence[Part] = ()
    device: str = "auto"
    kernels: str = "auto"


def measure(request: SuiteRequest) -> TaskOutcome:
    """Measures the device; ends within the budget, and goes on with what an earlier call left.

    Raises SpecError for a folder with another device's results, PerfmodelError for a device that is not here.
    """
    results = Results(request.out)
    bench = bench_of(request.device, request.kernels, results.info().get("reference_s"))
    _check_same(results, bench)
    _say(f"{bench.hardware.name} with {bench.backend} kernels, {request.budget_s:g} s")
    with _ended_by_signals():
        session = _Session(request, bench, results)
        try:
            return session.run()
        finally:
            session.end()


def _check_same(results: Results, bench: Bench) -> None:
    known, ours = results.info(), {"device": bench.hardware.name, "kernels": bench.backend}
    for name, value in ours.items():
        if known.get(name, value) != value:
            raise SpecError(
                f"--out {results.folder}: has measurements with {name} {known[name]}, and this is {value}; name "
                f"another folder."
            )


class _Session:
    """The processes of a call, and what is known of it."""

    def __init__(self, request: SuiteRequest, bench: Bench, results: Results) -> None:
        self._request, self._bench, self._results, self._start = request, bench, results, request.start
        self._earlier = results.info()
        self._parts = list(request.parts) or list(Part)
        reference_s = bench.drift.reference_s if bench.drift is not None else None
        self._worker = Worker(tasks_of, request.device, request.kernels, reference_s)
        self._worker.begin()
        self._reader = DeviceReader(bench.device.type == "cuda", self._earlier.get("readings"))
        self._ceilings: Mapping[str, Any] = self._earlier.get("ceilings") or {}
        self._retries = TuningRetries(self._run, self._earlier.get("untuned"))
        self._written = 0.0
        self._ahead = Ahead(bench, self._parts, _AHEAD_SHARE * request.budget_s)

    @property
    def left_s(self) -> float:
        return self._request.budget_s - (time.monotonic() - self._start)

    def run(self) -> TaskOutcome:
        """Measure until all is there or the budget is spent."""
        if not self._ceilings:
            self._measure_ceilings()
        tasks = [task for name in self._parts for task in TASKS[name](self._bench)]
        outcome = run_tasks(
            *(tasks, self._results, self.left_s, self._progress),
            execute=self._retries.execute,
            is_open=self._ahead.is_open,
            failed=self._earlier.get("failures"),
        )
        self._write(outcome)
        return outcome

    def end(self) -> None:
        """No process is left behind."""
        self._ahead.end()
        self._worker.end()
        self._reader.close()

    def _run(self, task: Task, is_tuned: bool) -> Mapping[str, Any]:
        left_s = max(0.0, self.left_s) + _GRACE_S
        try:
            return self._worker.run(task, min(task.limit_s, left_s), min(_START_S, left_s), is_tuned)
        except (TaskTimeoutError, StartError) as error:
            if self.left_s <= 0.0:
                raise BudgetSpentError(str(error)) from None
            raise

    def _measure_ceilings(self) -> None:
        """Without, the rest is measured all the same."""
        try:
            self._ceilings = self._retries.execute(Task(*CEILINGS, dict))
        except TaskError as error:
            _say(f"failed: ceilings: {error}")

    def _progress(self, key: str, outcome: TaskOutcome, elapsed_s: float) -> None:
        spent_s = time.monotonic() - self._start
        _say(f"[{spent_s:5.0f} of {self._request.budget_s:.0f} s, {self._ahead.num_left} to compile] {key}")
        if time.monotonic() - self._written >= _WRITE_S:
            self._write(outcome)

    def _write(self, outcome: TaskOutcome) -> None:
        self._results.write("suite.json", self._info(outcome))
        self._written = time.monotonic()

    def _info(self, outcome: TaskOutcome) -> dict[str, Any]:
        """The fields of `SuiteInfo`."""
        bench, earlier = self._bench, self._earlier
        is_gpu = bench.device.type == "cuda"
        compile_s, num_compiled = self._worker.compiled
        parts = " ".join(f"--part {part}" for part in self._request.parts)
        call = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": f"python -m perfmodel_executors.gpu_suite --out {self._results.folder.name} "
            f"--budget-s {self._request.budget_s:g} {parts}".strip(),
            "commit": commit(),
            "elapsed_s": round(time.monotonic() - self._start, 1),
            "spent_s": {part: round(seconds, 1) for part, seconds in outcome.spent_s.items()},
            "num_processes": self._worker.num_begun,
            "compile_s": round(compile_s, 1),
            "num_compiled": num_compiled,
            "num_compiled_ahead": self._ahead.num_done,
        }
        calls = [*earlier.get("calls", ()), call]
        return {
            "device": bench.hardware.name,
            "device_name": device_name(bench.device) if is_gpu else f"CPU, {platform.machine()}, one thread",
            "kernels": bench.backend,
            "versions": versions(is_gpu),
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
            "command": call["command"],
            "elapsed_s": round(sum(each["elapsed_s"] for each in calls), 1),
            "reference_s": bench.drift.reference_s if bench.drift is not None else None,
            "ceilings": self._ceilings,
            "parts_done": {part: len(self._results.part(part)) for part in TASKS},
            "left_out": outcome.left_out,
            "failures": outcome.failures,
            "tiles": {**earlier.get("tiles", {}), **self._worker.tiles},
            "untuned": self._retries.untuned,
            "readings": self._reader.as_json(),
            "calls": calls,
        }


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within, what asks this process to end (`timeout`, a terminal) lets it end its own processes first."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    known = {each: signal.signal(each, stop) for each in _ENDING}
    try:
        yield
    finally:
        for each, handler in known.items():
            signal.signal(each, handler)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
