"""Which tool wrote a file, by what is in it, and its runs. Names of files say nothing: people rename them.

JSON (an object, or a list of them), JSON lines, CSV of llama-bench, the text of an MLPerf summary. Files of AIPerf that
are of one run, its summary and its requests, are read together when they lie in one folder.
"""

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.sources.bench_formats import (
    LARGEST_RESULT_BYTES,
    BenchRun,
    guidellm_benchmarks,
    is_aiperf_record,
    is_aiperf_summary,
    is_guidellm_report,
    is_inferencex_result,
    is_llama_bench_row,
    is_mlperf_log,
    is_trtllm_report,
    is_vllm_result,
    read_aiperf,
    read_guidellm_benchmark,
    read_inferencex_result,
    read_llama_bench_row,
    read_mlperf_log,
    read_trtllm_report,
    read_vllm_result,
)
from perfmodel.files.bounded import parse_json, read_bounded_text

FORMATS = (
    "vllm bench serve",
    "SGLang bench_serving",
    "GuideLLM",
    "AIPerf and GenAI-Perf",
    "InferenceX",
    "MLPerf LoadGen's summary",
    "llama-bench",
    "trtllm-bench",
)
Object = Mapping[str, Any]
# One run from one object: whether it is such a one, and what reads it.
_SINGLE: tuple[tuple[Callable[[Object], bool], Callable[[str, Object], BenchRun]], ...] = (
    (is_inferencex_result, read_inferencex_result),
    (is_llama_bench_row, read_llama_bench_row),
    (is_trtllm_report, read_trtllm_report),
    (is_vllm_result, read_vllm_result),
)


@dataclass
class _Aiperf:
    """Files of one folder."""

    summary: tuple[str, Object] | None = None
    records: tuple[str, list[Object]] | None = None

    def read(self) -> BenchRun:
        names = [each[0] for each in (self.summary, self.records) if each is not None]
        summary = self.summary[1] if self.summary is not None else None
        return read_aiperf(" with ".join(names), summary, self.records[1] if self.records is not None else ())


@dataclass
class _Found:
    runs: list[BenchRun] = field(default_factory=list)
    reasons: list[tuple[str, str]] = field(default_factory=list)
    aiperf: dict[Path, list[_Aiperf]] = field(default_factory=dict)


def read_bench_files(paths: Sequence[str | Path]) -> tuple[list[BenchRun], list[tuple[str, str]]]:
    """(runs of all files, (run, reason) of those that cannot be compared).

    Raises SpecError where there is nothing else: the first reason.
    """
    found = _Found()
    files = list(dict.fromkeys(map(Path, paths)))
    names = Counter(path.name for path in files)
    for path in files:
        # Tools call their files alike: runs of several are then told apart by the folder.
        name = path.name if names[path.name] == 1 else f"{path.resolve().parent.name}/{path.name}"
        try:
            _read(path, name, found)
        except PerfmodelError as error:
            found.reasons.append((name, str(error)))
    for each in (one for folder in found.aiperf.values() for one in folder):
        _keep(found, lambda each=each: [each.read()])  # type: ignore[misc]
    if not found.runs:
        raise SpecError(found.reasons[0][1])
    return found.runs, found.reasons


def _keep(found: _Found, read: Callable[[], list[BenchRun]]) -> None:
    """A run of a sweep that cannot be compared is listed, and takes no other with it."""
    try:
        found.runs += read()
    except PerfmodelError as error:
        found.reasons.append((str(error).partition(": ")[0], str(error)))


def _read(path: Path, name: str, found: _Found) -> None:
    try:
        text = read_bounded_text(path, LARGEST_RESULT_BYTES)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path}: is no text; {_expected()}") from None
    if is_mlperf_log(text):
        found.runs.append(read_mlperf_log(name, text))
        return
    objects = _objects(path, text)
    if isinstance(objects, dict):
        _one(path, name, objects, found)
        return
    if objects and all(is_aiperf_record(each) for each in objects):
        _beside(path, name, found, "records", objects)
        return
    several = len(objects) > 1
    for number, each in enumerate(objects, 1):
        run = f"{name}, run {number}" if several else name
        _keep(found, lambda each=each, run=run: [_single(run, each)])  # type: ignore[misc]


def _one(path: Path, name: str, data: Object, found: _Found) -> None:
    if is_guidellm_report(data):
        for run in guidellm_benchmarks(name, data):
            _keep(found, lambda run=run: [read_guidellm_benchmark(*run)])  # type: ignore[misc]
    elif is_aiperf_summary(data):
        _beside(path, name, found, "summary", data)
    elif is_aiperf_record(data):
        _beside(path, name, found, "records", [data])
    else:
        found.runs.append(_single(name, data))


def _beside(path: Path, name: str, found: _Found, part: str, data: Any) -> None:
    """Put `data` with the other file of its run, if that lies in the same folder and has none yet."""
    folder = found.aiperf.setdefault(path.resolve().parent, [])
    free = next((each for each in folder if getattr(each, part) is None), None)
    if free is None:
        free = _Aiperf()
        folder.append(free)
    setattr(free, part, (name, data))


def _single(name: str, data: Object) -> BenchRun:
    for is_it, read in _SINGLE:
        if is_it(data):
            return read(name, data)
    keys = ", ".join(map(str, list(data)[:6]))
    raise SpecError(f"{name}: has the keys {keys[:120] or '(none)'}, which no tool writes that is known; {_expected()}")


def _expected() -> str:
    return f"expected a result of {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."


def _objects(path: Path, text: str) -> dict[str, Any] | list[Object]:
    """The one object of a JSON file, or all of a list, of lines or of a table."""
    if not text.strip():
        raise SpecError(f"{path}: is empty; {_expected()}")
    start = text.lstrip()[:1]
    if start not in "[{":
        return _table(path, text)
    try:
        data = parse_json(text)
    except ValueError as error:
        lines = text.strip().splitlines()
        if start == "{" and len(lines) > 1 and lines[0].rstrip().endswith("}"):
            return _lines(path, text)
        raise SpecError(f"{path}: is not JSON, or was cut off ({error}).") from None
    if isinstance(data, dict):
        return data
    if not data or not all(isinstance(each, dict) for each in data):
        raise SpecError(f"{path}: holds a list of {len(data):,} entries that are not all objects; {_expected()}")
    return list(data)


def _lines(path: Path, text: str) -> list[Object]:
    found: list[Object] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = parse_json(line)
        except ValueError as error:
            raise SpecError(
                f"{path}:{number}: the line is not JSON, or was cut off ({error}); remove it to compare the others."
            ) from None
        if not isinstance(data, dict):
            raise SpecError(f"{path}:{number}: found {line[:40]!r}, expected an object.")
        found.append(data)
    return found


def _table(path: Path, text: str) -> list[Object]:
    """A CSV of llama-bench; a table of another kind has none of its columns."""
    try:
        reader = csv.DictReader(text.splitlines())
        rows = [row for row in reader if row]
    except csv.Error as error:
        raise SpecError(f"{path}: is neither JSON nor a table ({error}); {_expected()}") from None
    if not rows or not is_llama_bench_row(rows[0]):
        raise SpecError(f"{path}: is neither JSON nor a table of llama-bench; {_expected()}")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise SpecError(f"{path}:{number}: has not the cells of the first line; the file was cut off.")
    return list(rows)
