"""Detects a file's load tool by its content (people rename files) and reads its runs. JSON (an object, a list), JSON
lines, CSV of llama-bench, MLPerf summaries. AIPerf's summary and requests in one folder are read together."""

import csv
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.observation import Observation, Reasons
from perfmodel.evidence.sources.bench_formats import AIPERF, GUIDELLM, INFERENCEX, VLLM, is_aiperf_record
from perfmodel.evidence.sources.bench_formats_offline import LLAMA_BENCH, MLPERF, TRTLLM, mlperf_log
from perfmodel.evidence.sources.bench_run import Format, Object, known_format
from perfmodel.files.sandbox import parse_json, read_limited_text
from perfmodel.files.tables import load_table

_Named = tuple[str, Object]  # by the name of its file

_OWN = {
    **{"vllm": VLLM, "guidellm": GUIDELLM, "aiperf": AIPERF, "inferencex": INFERENCEX},
    **{"mlperf": MLPERF, "llama_bench": LLAMA_BENCH, "trtllm": TRTLLM},
}
# The first whose keys an object has reads it.
FORMATS = tuple(_OWN.get(name) or known_format(name) for name in load_table("load_tools"))
LARGEST_RESULT_BYTES = 128_000_000  # with each token's time of 30,000 answers, and their texts


def read_bench_files(paths: Sequence[str | Path]) -> tuple[list[Observation], Reasons]:
    """(runs of all files, (run, reason) of unusable ones). Raises SpecError with the first reason if none is usable."""
    runs: list[Observation] = []
    reasons: Reasons = []

    def read(name: str, data: Object, form: Format | None) -> None:
        if form is None:
            keys = ", ".join(map(str, list(data)[:6]))[:120] or "(none)"
            reasons.append((name, f"{name}: has the keys {keys}, which no tool writes that is known; {_expected()}"))
            return
        for run_name, item in form.runs(name, data):
            try:
                runs.append(form.read(run_name, item))
            except PerfmodelError as error:
                reasons.append((run_name, str(error)))

    files = list(dict.fromkeys(map(Path, paths)))
    names = Counter(path.name for path in files)
    # Of AIPerf by folder: its summaries, and its files of records, each with its name.
    folders: defaultdict[Path, tuple[list[_Named], list[_Named]]] = defaultdict(lambda: ([], []))
    for path in files:
        # Tools call their files alike: runs of several are then told apart by the folder.
        name = path.name if names[path.name] == 1 else f"{path.resolve().parent.name}/{path.name}"
        try:
            entries = _objects(path)
        except PerfmodelError as error:
            reasons.append((name, str(error)))
            continue
        summaries, records = folders[path.resolve().parent]
        if all(map(is_aiperf_record, entries)):
            records.append((name, {"records": entries}))
        elif len(entries) == 1 and AIPERF.is_of(entries[0]):
            summaries.append((name, entries[0]))
        else:
            for number, item in enumerate(entries, 1):
                form = next((form for form in FORMATS if form.is_of(item)), None)
                read(f"{name}, run {number}" if len(entries) > 1 else name, item, form)
    for pair in (pair for folder in folders.values() for pair in zip_longest(*folder)):
        parts = [part for part in pair if part is not None]
        data = {key: value for _, item in parts for key, value in item.items()}
        read(" with ".join(name for name, _ in parts), data, AIPERF)
    if not runs:
        raise SpecError(reasons[0][1])
    return runs, reasons


def _expected() -> str:
    names = [name for form in FORMATS for name in form.names]
    return f"expected a result of {', '.join(names[:-1])} or {names[-1]}."


def _objects(path: Path) -> list[Object]:
    """The objects of a file: one, or those of a list, lines or table."""
    try:
        text = read_limited_text(path, LARGEST_RESULT_BYTES)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path}: is no text; {_expected()}") from None
    log, start = mlperf_log(text), text.lstrip()[:1]
    if log is not None:
        return [log]
    if not start:
        raise SpecError(f"{path}: is empty; {_expected()}")
    if start not in "[{":
        return _table(path, text)
    try:
        data = parse_json(text)
    except ValueError as error:
        lines = text.strip().splitlines()
        if start == "{" and len(lines) > 1 and lines[0].rstrip().endswith("}"):
            return _lines(path, text)
        raise SpecError(f"{path}: is not JSON, or was cut off ({error}).") from None
    entries = [data] if isinstance(data, dict) else list(data)
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise SpecError(f"{path}: holds a list of {len(entries):,} entries that are not all objects; {_expected()}")
    return entries


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
            raise SpecError(f"{path}:{number}: got {line[:40]!r}; expected an object.")
        result.append(data)
    return result


def _table(path: Path, text: str) -> list[Object]:
    """A CSV of llama-bench; other tables lack its columns."""
    try:
        rows = [row for row in csv.DictReader(text.splitlines()) if row]
    except csv.Error as error:
        raise SpecError(f"{path}: is neither JSON nor a table ({error}); {_expected()}") from None
    if not rows or not set(rows[0]) >= LLAMA_BENCH.keys:
        raise SpecError(f"{path}: is neither JSON nor a table of llama-bench; {_expected()}")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise SpecError(f"{path}:{number}: has not the cells of the first line; the file was cut off.")
    return list(rows)
