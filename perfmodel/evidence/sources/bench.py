"""Which tool wrote a file, by what is in it, and its runs. Names of files say nothing: people rename them.

JSON (an object, or a list of them), JSON lines, CSV of llama-bench, the text of an MLPerf summary. Files of AIPerf that
are of one run, its summary and its requests, are read together when they lie in one folder.
"""

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.observation import Reasons
from perfmodel.evidence.sources.bench_formats import (
    guidellm_benchmarks,
    is_aiperf_record,
    is_aiperf_summary,
    is_guidellm_report,
    read_aiperf,
    read_guidellm_benchmark,
    read_inferencex_result,
    read_vllm_result,
)
from perfmodel.evidence.sources.bench_formats_offline import (
    is_mlperf_log,
    read_llama_bench_row,
    read_mlperf_log,
    read_trtllm_report,
)
from perfmodel.evidence.sources.bench_run import BenchRun
from perfmodel.files.reach import parse_json, read_bounded_text

Object = Mapping[str, Any]
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
LARGEST_RESULT_BYTES = 128_000_000  # with each token's time of 30,000 answers, and their texts
_LLAMA_BENCH = {"n_prompt", "n_gen", "avg_ts", "model_type"}
# One run from one object: the keys that tell it, those that it must not have, and what reads it.
_SINGLE: tuple[tuple[set[str], set[str], Callable[[str, Object], BenchRun]], ...] = (
    ({"hw", "conc", "tput_per_gpu"}, set(), read_inferencex_result),
    (_LLAMA_BENCH, set(), read_llama_bench_row),
    ({"engine", "world_info", "request_info", "performance"}, set(), read_trtllm_report),
    ({"request_rate", "completed", "total_input_tokens"}, {"hw"}, read_vllm_result),
)


def read_bench_files(paths: Sequence[str | Path]) -> tuple[list[BenchRun], Reasons]:
    """(runs of all files, (run, reason) of those that cannot be compared).

    Raises SpecError where there is nothing else: the first reason.
    """
    reader = _Reader()
    files = list(dict.fromkeys(map(Path, paths)))
    names = Counter(path.name for path in files)
    for path in files:
        # Tools call their files alike: runs of several are then told apart by the folder.
        name = path.name if names[path.name] == 1 else f"{path.resolve().parent.name}/{path.name}"
        try:
            reader.read(path, name)
        except PerfmodelError as error:
            reader.reasons.append((name, str(error)))
    reader.read_aiperf()
    if not reader.runs:
        raise SpecError(reader.reasons[0][1])
    return reader.runs, reader.reasons


class _Reader:
    """The runs of files; a run of a sweep that cannot be compared is listed, and takes no other with it."""

    def __init__(self) -> None:
        self.runs: list[BenchRun] = []
        self.reasons: Reasons = []
        # By folder: the parts of each of AIPerf's runs, summary or records, with the name of its file.
        self._aiperf: defaultdict[Path, list[dict[str, tuple[str, Any]]]] = defaultdict(list)

    def read(self, path: Path, name: str) -> None:
        try:
            text = read_bounded_text(path, LARGEST_RESULT_BYTES)
        except OSError as error:
            raise SpecError(f"{path}: cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise SpecError(f"{path}: is no text; {_expected()}") from None
        if is_mlperf_log(text):
            self.runs.append(read_mlperf_log(name, text))
            return
        objects = _objects(path, text)
        if isinstance(objects, dict):
            if is_guidellm_report(objects):
                for run in guidellm_benchmarks(name, objects):
                    self._keep(read_guidellm_benchmark, *run)
            elif is_aiperf_summary(objects):
                self._part(path, name, "summary", objects)
            elif is_aiperf_record(objects):
                self._part(path, name, "records", [objects])
            else:
                self.runs.append(_single(name, objects))
        elif objects and all(map(is_aiperf_record, objects)):
            self._part(path, name, "records", objects)
        else:
            for number, data in enumerate(objects, 1):
                self._keep(_single, f"{name}, run {number}" if len(objects) > 1 else name, data)

    def read_aiperf(self) -> None:
        """The runs whose parts were found."""
        for run in (run for folder in self._aiperf.values() for run in folder):
            parts = [run.get(part, ("", None)) for part in ("summary", "records")]
            names = " with ".join(name for name, _ in parts if name)
            self._keep(read_aiperf, names, parts[0][1], parts[1][1] or ())

    def _keep(self, read: Callable[..., BenchRun], *arguments: Any) -> None:
        try:
            self.runs.append(read(*arguments))
        except PerfmodelError as error:
            self.reasons.append((str(error).partition(": ")[0], str(error)))

    def _part(self, path: Path, name: str, part: str, data: Any) -> None:
        """Put `data` with the other file of its run, if that lies in the same folder and has none yet."""
        folder = self._aiperf[path.resolve().parent]
        run = next((run for run in folder if part not in run), None)
        if run is None:
            folder.append(run := {})
        run[part] = name, data


def _single(name: str, data: Object) -> BenchRun:
    for keys, others, read in _SINGLE:
        if keys <= set(data) and others.isdisjoint(data):
            return read(name, data)
    keys_shown = ", ".join(map(str, list(data)[:6]))[:120] or "(none)"
    raise SpecError(f"{name}: has the keys {keys_shown}, which no tool writes that is known; {_expected()}")


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
    if not data or not all(isinstance(entry, dict) for entry in data):
        raise SpecError(f"{path}: holds a list of {len(data):,} entries that are not all objects; {_expected()}")
    return list(data)


def _lines(path: Path, text: str) -> list[Object]:
    result: list[Object] = []
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
        result.append(data)
    return result


def _table(path: Path, text: str) -> list[Object]:
    """A CSV of llama-bench; a table of another kind has none of its columns."""
    try:
        rows = [row for row in csv.DictReader(text.splitlines()) if row]
    except csv.Error as error:
        raise SpecError(f"{path}: is neither JSON nor a table ({error}); {_expected()}") from None
    if not rows or not set(rows[0]) >= _LLAMA_BENCH:
        raise SpecError(f"{path}: is neither JSON nor a table of llama-bench; {_expected()}")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise SpecError(f"{path}:{number}: has not the cells of the first line; the file was cut off.")
    return list(rows)
