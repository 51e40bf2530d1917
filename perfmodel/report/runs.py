"""A run as files: the folder that they are in, its records, read back, and a timeline for ui.perfetto.dev.

Records are requests.csv and steps.csv as a run streams them, one line each, named as the columns are. Floats are
written with `repr`, so reading gives back the same bits. A run that was cut short leaves whole lines and perhaps a last
broken one, which is passed over.

In a folder without an earlier run the new one's records can be read while it goes. Otherwise they come to be in
`unfinished` below it, and move up together at the end; no other file is touched.

A timeline has one process per replica with its steps and counters, one process with a track per request. Times in
microseconds since the start of the run. Format: the Trace Event Format's `traceEvents` (phases X, C and M)."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.files.sandbox import read_json
from perfmodel.report.plots.run import replicas_of
from perfmodel.sim.records.collector import REQUEST_COLUMNS, STEP_COLUMNS
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.sim.records.result import RunResult

RUN_FILES = (
    *("requests.csv", "steps.csv", "chunks.csv", "acceptance.json"),
    *("result.json", "report.html", "timeline.json"),
)
_HEADERS = {"requests.csv": REQUEST_COLUMNS, "steps.csv": STEP_COLUMNS}


class RunFolder:
    """path: where the files end up; work: where they are written. Made at once. Raises SpecError where it cannot be
    made or written, or has a file of such a name that no run has written."""

    def __init__(self, path: Path) -> None:
        self.path = self.work = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any((path / name).exists() for name in RUN_FILES):
                self._refuse_files_of_others()
                self.work = path / "unfinished"
                self.work.mkdir(exist_ok=True)
        except OSError as error:
            raise SpecError(f"--out {path}: {error.strerror or error}; give a folder that can be written.") from None

    def _refuse_files_of_others(self) -> None:
        """Raises SpecError unless a result is perfmodel's, or each file has the columns of records, or, of a run that
        was cut short, nothing yet."""
        with suppress(OSError, ValueError):
            result = read_json(self.path / "result.json")
            if isinstance(result, dict) and isinstance(result.get("provenance"), dict):
                return
        for name in RUN_FILES:
            file, header = self.path / name, ",".join(_HEADERS.get(name, ())).encode()
            if not file.exists():
                continue
            with file.open("rb") as records:
                is_own = name in _HEADERS and records.read(len(header)) in (header, b"")
            if not is_own:
                raise SpecError(
                    f"--out {self.path}: has {name}, which no run of perfmodel has written and this one would replace; "
                    f"give another folder."
                )

    def finish(self) -> None:
        """Put the new files in the place of the old ones."""
        if self.work == self.path:
            return
        for name in RUN_FILES:
            if (self.work / name).exists():
                (self.work / name).replace(self.path / name)
            else:
                (self.path / name).unlink(missing_ok=True)
        self.work.rmdir()

    def give_up(self) -> None:
        """Leave an earlier run as it was."""
        if self.work == self.path:
            return
        for name in RUN_FILES:
            (self.work / name).unlink(missing_ok=True)
        self.work.rmdir()


MAX_STEPS = 20_000  # step records drawn, in order of start; each also makes two counter events
MAX_REQUESTS = 200  # requests drawn, in order of arrival

_REQUESTS_PID = 10_000
_PREDICTED_PID = 20_000  # added to those of a simulation beside an executed run
Event = dict[str, Any]


def read_requests(path: Path) -> RequestColumns:
    """The finished requests in a file of this module or of the simulator's writer; further columns are ignored."""
    return RequestColumns(**_read(path, RequestColumns))


def read_steps(path: Path) -> StepColumns:
    """The step records in a file of this module or of the simulator's writer; further columns are ignored."""
    return StepColumns(**_read(path, StepColumns))


def _read(path: Path, kind: type[RequestColumns] | type[StepColumns]) -> dict[str, Any]:
    with path.open("rb") as file:
        header = file.readline().decode().strip().split(",")
        body = file.read()
    wanted = [column.name for column in fields(kind) if column.default is MISSING or column.name in header]
    missing = [name for name in wanted if name not in header]
    if missing:
        raise WorkloadError(f"{path}: has no column {missing[0]!r}, so it is no record file of perfmodel.")
    whole = body[: body.rfind(b"\n") + 1]  # a last line without its end was cut short
    dtype = np.dtype([(name, np.float64 if name.endswith("_s") else np.int64) for name in wanted])
    lines = whole.decode().splitlines()
    if not lines:
        return {name: np.empty(0, dtype[name]) for name in wanted}
    table = np.loadtxt(lines, delimiter=",", dtype=dtype, usecols=[header.index(name) for name in wanted], ndmin=1)
    return {name: np.ascontiguousarray(table[name]) for name in wanted}


def timeline_json(result: RunResult, predicted: RunResult | None = None) -> dict[str, Any]:
    """The trace as one JSON-ready document; what was left out is said in `otherData`. predicted: a simulation, whose
    processes stand below those of the run"""
    events: list[Event] = []
    outcome = {"scenario": result.scenario.name, "clock": result.clock}
    if result.steps is not None:
        events += _step_events(result.steps, result.num_blocks)
        outcome["steps"] = _shown(min(len(result.steps), MAX_STEPS), len(result.steps), "step records")
    if result.requests is not None:
        events += _request_events(result.requests)
        outcome["requests"] = _shown(min(len(result.requests), MAX_REQUESTS), len(result.requests), "requests")
    if predicted is not None:
        events += map(_predicted, timeline_json(predicted)["traceEvents"])
    return {"displayTimeUnit": "ms", "otherData": outcome, "traceEvents": events}


def _predicted(event: Event) -> Event:
    event["pid"] += _PREDICTED_PID
    if event["name"] == "process_name":
        event["args"] = {"name": f"{event['args']['name']}, predicted"}
    return event


def write_timeline(path: Path, result: RunResult, predicted: RunResult | None = None) -> Path:
    """Write the trace and return its path; the results as of `timeline_json`."""
    from perfmodel.files.atomic_write import atomic_write

    return atomic_write(path, json.dumps(timeline_json(result, predicted), separators=(",", ":"), allow_nan=False))


def _shown(shown: int, total: int, what: str) -> str:
    return f"the first {shown:,} of {total:,} {what}" if shown < total else f"all {total:,} {what}"


def _named(pid: int, name: str, tid: int | None = None) -> Event:
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "name": kind, "pid": pid, "args": {"name": name}} | ({} if tid is None else {"tid": tid})


def _microseconds(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)


def _step_events(steps: StepColumns, num_blocks: int) -> Iterator[Event]:
    # Where the last step of each track ends: a replica has several with pipeline stages, whose plans overlap.
    tracks: dict[int, list[float]] = {replica: [0.0] for replica in replicas_of(steps)}
    for replica in tracks:
        yield _named(replica, f"replica {replica}")
        yield _named(replica, "steps", tid=0)
    for row in np.argsort(steps.start_s, kind="stable")[:MAX_STEPS]:
        start, end = _microseconds(steps.start_s[row]), _microseconds(steps.end_s[row])
        replica = int(steps.replica[row])
        ends = tracks[replica]
        track = next((i for i, last in enumerate(ends) if last <= steps.start_s[row]), len(ends))
        ends[track : track + 1] = [steps.end_s[row]]
        counts = {
            "index": int(steps.index[row]),
            "steps": int(steps.num_steps[row]),
            "tokens": int(steps.num_tokens[row]),
            "decodes": int(steps.num_decodes[row]),
            "chunks": int(steps.num_chunks[row]),
            "decode_context": int(steps.decode_context[row]),
        }
        kind = "chunk" if not counts["decodes"] else "mixed" if counts["chunks"] else "decode"
        yield {
            "ph": "X",
            "name": f"{kind} x{counts['steps']}" if counts["steps"] > 1 else kind,
            "cat": "step",
            "pid": replica,
            "tid": track,
            "ts": start,
            "dur": round(end - start, 3),
            "args": counts,
        }
        queue = {"running": int(steps.num_running[row]), "waiting": int(steps.num_waiting[row])}
        yield {"ph": "C", "name": "requests", "pid": replica, "ts": start, "args": queue}
        used = int(steps.used_blocks[row])
        usage = {"% used": round(100 * used / num_blocks, 2)} if num_blocks else {"blocks": used}
        yield {"ph": "C", "name": "KV cache", "pid": replica, "ts": start, "args": usage}


def _request_events(requests: RequestColumns) -> Iterator[Event]:
    yield _named(_REQUESTS_PID, "requests")
    for row in np.argsort(requests.arrival_s, kind="stable")[:MAX_REQUESTS]:
        tid = int(requests.request_id[row])
        prompt, output = int(requests.num_prompt_tokens[row]), int(requests.num_output_tokens[row])
        yield _named(_REQUESTS_PID, f"request {tid} ({prompt:,} in, {output:,} out)", tid)
        moments = [
            _microseconds(column[row])
            for column in (requests.arrival_s, requests.first_scheduled_s, requests.first_token_s, requests.finished_s)
        ]
        args = {
            "replica": int(requests.replica[row]),
            "cached_tokens": int(requests.num_cached_tokens[row]),
            "preemptions": int(requests.num_preemptions[row]),
        }
        for phase, start, end in zip(("queued", "prefill", "decode"), moments, moments[1:], strict=False):
            if end > start:
                event = {"ph": "X", "name": phase, "cat": "request", "pid": _REQUESTS_PID, "tid": tid, "ts": start}
                yield event | {"dur": round(end - start, 3), "args": args}
