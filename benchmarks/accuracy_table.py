"""The table of docs/how-right.md that says how right predictions are: `make validate`.

    python benchmarks/accuracy_table.py                        # predicts what is in measurements/, of slow sets each
                                                               # fourth row, and prints the table
    python benchmarks/accuracy_table.py --full                   # predicts every row
    python benchmarks/accuracy_table.py --cited ../shared/truth   # and what may be cited but not committed
    python benchmarks/accuracy_table.py --write                # every row, and writes the page, reports/ and the index
                                                               # that answers' trust is read from

    python benchmarks/accuracy_table.py --write --because TEXT   # although a line became worse by over a tenth; the
                                                                 # reason goes to reports/accuracy_losses.csv

Exit status 1 where a line differs from the page; 2, with nothing written, where one became worse by over a tenth and
no reason is given. Lines whose measurements may not be copied here need the cited source;
where it is not given they are printed so, and `--write` leaves them as they are.

`tests/unit/evidence/test_accuracy_table.py` predicts the quick sets again, and of the slow ones a sample, which must
be as `reports/accuracy_202611.csv.gz` has it, from which their lines follow.
"""

__all__ = [
    "SETS",
    "MeasuredSet",
    "Predictions",
    "cells_of",
    "lines_of",
    "losses",
    "main",
    "mixed",
    "page_lines",
    "predictions_of",
    "stored",
    "write_index",
]

import argparse
import csv
import gzip
import io
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from perfmodel.dates import today
from perfmodel.evidence.kinds.pooled import pooled_over_devices
from perfmodel.evidence.report import ErrorStats, Rows, ValidationReport
from perfmodel.files.catalog import data_dir
from perfmodel.trust.index import NAMES, SIZES, MeasuredCell, MeasuredRow, MeasuredSetup, quantile

ROOT = Path(__file__).parents[1]
PAGE, STORE = ROOT / "docs/how-right.md", ROOT / "reports/accuracy_202611.csv.gz"
INDEX = data_dir("validated")
DROPPED = ROOT / "measurements/dropped.csv"
LOSSES = ROOT / "reports/accuracy_losses.csv"
BEGIN, END = "<!-- written by: make validate -->\n", "<!-- end -->"
NEEDS_SOURCE = "needs the cited source"
_HEAD = (
    *("measured", "what", "rows", "median error", "trivial", "nine in ten below", "80 % intervals cover", "high / low"),
    "trivial",
)
_NOT_COVERED = "not covered: "  # begins the notes of `perfmodel validate` on rows without a prediction
_EVERY = 4  # of how many rows of a slow set one is predicted, unless all are asked for
_ERRORS = {1: "median error", 3: "nine in ten"}  # of a line's cells


@dataclass(frozen=True)
class MeasuredSet:
    """Measurements of one kind: where they are, and what of their comparison is a line of the table.

    path:     below the checkout, or below the folder of cited files where `is_cited`
    validate: "module:function" of (path) -> report
    shown:    metric -> what the line calls it
    read, judge: of a slow set, "module:function" of (path) -> (rows, left out), and of (rows, left out) -> report;
              a sample of its rows can then be predicted alone
    counted:  (dimension, group) of the rows that lines are of; None: all
    cells:    the dimension whose groups get a line of their own: the median and p90 of their medians
    once:     the dimension whose groups count once each in the lines, however many rows they have
    """

    name: str
    path: str
    validate: str
    shown: Mapping[str, str]
    is_cited: bool = False
    read: str = ""
    judge: str = ""
    counted: tuple[str, str] | None = None
    cells: str = ""
    once: str = ""

    @property
    def slug(self) -> str:
        """What the index of `perfmodel.trust` calls it: letters and hyphens."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def is_slow(self) -> bool:
        return bool(self.read)


_LATENCIES = {"e2el_mean": "mean E2E", "ttft_mean": "mean TTFT", "itl_mean": "mean ITL"}
_STEADY = {"tpot_mean": "mean TPOT", "ttft_mean": "mean TTFT"}
_STEADY_STATE = "perfmodel.evidence.kinds.runs:validate_steady_state"
_STEADY_ROWS = "perfmodel.evidence.sources.steady:read_steady_states"
_REQUESTS = {"e2el": "E2E", "ttft": "TTFT", "tpot": "TPOT"}
_PER_REQUEST = "perfmodel.evidence.kinds.runs:validate_per_request"
SETS = (
    MeasuredSet(
        "kernels of A100 and H100",
        "measurements/operators",
        "perfmodel.evidence.kinds.operators:validate_operators",
        {"latency": "time"},
    ),
    MeasuredSet(
        "kernels of eight devices",
        "ops",
        "perfmodel.evidence.kinds.operators:validate_operators",
        {"latency": "time"},
        is_cited=True,
    ),
    MeasuredSet(
        "energy of servers",
        "serving/energy.csv.gz",
        "perfmodel.evidence.kinds.runs:validate_energy",
        {"power": "power", "energy_per_token": "energy per output token"},
        is_cited=True,
    ),
    MeasuredSet(
        "accepted lengths of drafts",
        "measurements/acceptance",
        "perfmodel.evidence.kinds.runs:validate_acceptance",
        {"acceptance_length": "tokens a step"},
    ),
    MeasuredSet(
        "static batches, by device",
        "serving/static_batches.csv.gz",
        "perfmodel.evidence.kinds.pooled:validate_served",
        {"batch_latency": "latency"},
        is_cited=True,
        once="device",
    ),
    MeasuredSet(
        "vLLM under open-loop load",
        "serving/vllm_runs.json",
        "perfmodel.evidence.kinds.runs:validate_serving",
        _LATENCIES,
        is_cited=True,
    ),
    MeasuredSet(
        "servers at a fixed concurrency",
        "measurements/steady-state/unified.csv.gz",
        _STEADY_STATE,
        _STEADY,
        read=_STEADY_ROWS,
        judge="steady",
        counted=("face value", "yes"),
        cells="cell",
    ),
    MeasuredSet(
        "separate prefill and decode workers",
        "measurements/steady-state/disaggregated.csv.gz",
        _STEADY_STATE,
        _STEADY,
        read=_STEADY_ROWS,
        judge="steady",
    ),
    MeasuredSet("each request, RTX 4090", "measurements/per-request/rtx4090-llama-3.1-8b", _PER_REQUEST, _REQUESTS),
    MeasuredSet(
        "each request, RTX PRO 6000", "measurements/per-request/rtxpro6000-llama-3.1-8b", _PER_REQUEST, _REQUESTS
    ),
    MeasuredSet(
        "TensorRT-LLM offline",
        "measurements/throughput",
        "perfmodel.evidence.kinds.runs:validate_throughput",
        {"throughput": "output tokens/s", "static_throughput": "the same, static batches"},
        read="perfmodel.evidence.sources.recorded:read_offline_runs",
        judge="offline",
    ),
    MeasuredSet(
        "llama.cpp on single machines, by device",
        "measurements/local/llama_bench.csv.gz",
        "perfmodel.evidence.kinds.pooled:validate_local",
        {"decode_tokens_per_s": "decode tokens/s", "prompt_tokens_per_s": "prompt tokens/s"},
    ),
    MeasuredSet(
        "MLPerf Inference, by device",
        "measurements/mlperf/results.csv.gz",
        "perfmodel.evidence.kinds.pooled:validate_mlperf",
        {"tokens_per_s": "tokens/s", "tpot_mean": "mean TPOT", "ttft_mean": "mean TTFT"},
        read="perfmodel.evidence.sources.results:read_mlperf_rows",
        judge="served",
        once="device",
    ),
    MeasuredSet(
        "servers on other devices, by device",
        "measurements/served/other_devices.csv.gz",
        "perfmodel.evidence.kinds.pooled:validate_served",
        {"output_tokens_per_s": "output tokens/s", "tpot_mean": "mean TPOT", "ttft_mean": "mean TTFT"},
        read="perfmodel.evidence.sources.results:read_served_rows",
        judge="served",
        once="device",
    ),
    MeasuredSet(
        "published figures",
        "workloads/scenarios/published",
        "perfmodel.evidence.kinds.published:validate_published",
        {"kernels": "kernels", "steps": "steps", "systems": "systems", "system ratios": "ratios of systems"},
    ),
)


@dataclass(frozen=True)
class Predictions:
    """Rows of one metric of a set, those that count; `cells`: the group that each is of, or ()."""

    rows: Rows
    cells: tuple[str, ...] = ()


Lines = dict[str, tuple[str, ...]]  # "set, what" -> cells of the table behind it
Progress = Callable[[int, int | None], None]


def _named(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(module), name)


def report_of(measured: MeasuredSet, path: Path, every: int = 1) -> ValidationReport:
    """The comparison of a set, of every so many-th row of a slow one (group of rows that are one figure)."""
    if every == 1:
        report: ValidationReport = _named(measured.validate)(path)
        return report
    rows, left_out = _named(measured.read)(path)
    if measured.judge == "served":
        return _served(rows, left_out, path, every)
    return _judged(measured.judge, rows[every // 2 :: every], left_out)


def _served(rows: Sequence[Any], left_out: Sequence[Any], path: Path, every: int) -> ValidationReport:
    from perfmodel.evidence.kinds.pooled import report_pooled
    from perfmodel.evidence.predict.results import predict_served
    from perfmodel.evidence.sources.results import devices_folder

    chosen = set(list(dict.fromkeys(row.group for row in rows))[every // 2 :: every])
    sample = [row for row in rows if row.group in chosen]
    return report_pooled("served", predict_served(sample, devices_folder(path)), left_out)


def _judged(how: str, rows: Sequence[Any], left_out: Sequence[Any]) -> ValidationReport:
    from perfmodel.evidence.kinds.runs import report_steady_state, report_throughput
    from perfmodel.evidence.predict.recorded import simulate_offline_runs, simulate_steady_states

    if how == "steady":
        return report_steady_state(simulate_steady_states(rows, intervals=True), left_out)
    return report_throughput(simulate_offline_runs(rows), left_out)


def predictions_of(measured: MeasuredSet, report: ValidationReport) -> dict[str, Predictions]:
    """The rows of each metric that the set shows."""
    predictions = {}
    for comparison in report.comparisons:
        if comparison.metric not in measured.shown or not len(comparison.rows):
            continue
        rows, mask = comparison.rows, np.ones(len(comparison.rows), dtype=bool)
        if measured.counted is not None:
            dimension = comparison.dimensions[measured.counted[0]]
            mask = np.array([dimension.names[code] == measured.counted[1] for code in dimension.codes])
        cells: tuple[str, ...] = ()
        if measured.cells or measured.once:
            dimension = comparison.dimensions[measured.cells or measured.once]
            cells = tuple(dimension.names[code] for code in dimension.codes[mask])
        predictions[comparison.metric] = Predictions(rows.where(mask), cells)
    return predictions


def lines_of(measured: MeasuredSet, report: ValidationReport) -> Lines:
    """The set's lines from its comparison; errors are pooled as the command pools them."""
    if measured.is_slow:
        return lines_of_rows(measured, predictions_of(measured, report))
    return {
        _key(measured.name, what): _cells(stats)
        for metric, what in measured.shown.items()
        if (stats := report.metrics.get(metric)) is not None
    }


def lines_of_rows(measured: MeasuredSet, found: Mapping[str, Predictions]) -> Lines:
    """The set's lines from its rows."""
    lines: Lines = {}
    for metric, what in measured.shown.items():
        if metric in found:
            stats = _once_each(found[metric]) if measured.once else found[metric].rows.stats()
            lines[_key(measured.name, what)] = _cells(stats)
    for metric, what in measured.shown.items() if measured.cells else ():
        if metric in found:
            of_cells = replace(_once_each(found[metric]), rows=len(set(found[metric].cells)), interval_coverage=None)
            lines[_key(measured.name, f"{what}, by cell")] = _cells(of_cells)
    return lines


def _once_each(found: Predictions) -> ErrorStats:
    return pooled_over_devices(found.rows, found.cells)


def _key(name: str, what: str) -> str:
    return f"| {name} | {what} |"


def _cells(stats: ErrorStats) -> tuple[str, ...]:
    errors = (stats.median_ape, stats.trivial_ape, stats.p90_ape)
    shares = ("" if value is None else f"{value:.1%}" for value in errors)
    if stats.interval_coverage is None:
        return f"{stats.rows:,}", *shares, "", "", ""
    widths = ("" if value is None else f"{value:.2f}" for value in (stats.interval_width, stats.trivial_width))
    return f"{stats.rows:,}", *shares, f"{stats.interval_coverage:.0%}", *widths


def expected_keys(measured: MeasuredSet) -> list[str]:
    """The keys of all lines that a set has."""
    whats = list(measured.shown.values())
    return [_key(measured.name, what) for what in whats + [f"{what}, by cell" for what in whats if measured.cells]]


def page_lines(text: str) -> Lines:
    """The table's lines as docs/how-right.md has them."""
    inside = text.partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in inside.splitlines() if line[:1] == "|"]
    return {_key(cells[0].removesuffix(" ¹"), cells[1]): tuple(cells[2 : len(_HEAD)]) for cells in rows[2:]}


def table_of(lines: Mapping[str, tuple[str, ...]]) -> str:
    """The table as Markdown; lines that are missing need the cited source."""
    rows = [f"| {' | '.join(_HEAD)} |", "|" + "---|" * len(_HEAD)]
    for measured in SETS:
        for key in expected_keys(measured):
            cells = lines.get(key, ("", NEEDS_SOURCE, *[""] * (len(_HEAD) - 4)))
            marked = key.replace(measured.name, f"{measured.name} ¹", 1) if measured.is_cited else key
            rows.append(f"{marked} {' | '.join(cells)} |")
    return "\n".join(rows)


# ---------------------------------------------------------------- rows of slow sets, kept


_COLUMNS = ("set", "metric", "row", "cell", "predicted", "measured", "low", "high", "trivial")


@dataclass
class _Kept:
    """Columns of one metric as they are read."""

    labels: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    numbers: list[tuple[float, ...]] = field(default_factory=list)


def store(found: Mapping[str, Mapping[str, Predictions]]) -> bytes:
    """The rows of all slow sets as one table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for name, metrics in found.items():
        for metric, item in metrics.items():
            low, high = item.rows.interval or (np.full(len(item.rows), np.nan),) * 2
            cells = item.cells or ("",) * len(item.rows)
            columns = (item.rows.labels, cells, item.rows.predicted, item.rows.measured, low, high, item.rows.trivial)
            for label, cell, *numbers in zip(*columns, strict=True):
                writer.writerow((name, metric, label, cell, *(f"{number:.6g}" for number in numbers)))
    return gzip.compress(text.getvalue().encode(), 9, mtime=0)


def stored(file: Path = STORE) -> dict[str, dict[str, Predictions]]:
    """Set -> metric -> rows, as they were written last."""
    kept: dict[str, dict[str, _Kept]] = {}
    for row in csv.DictReader(io.StringIO(gzip.decompress(file.read_bytes()).decode())):
        result = kept.setdefault(row["set"], {}).setdefault(row["metric"], _Kept())
        result.labels.append(row["row"])
        result.cells.append(row["cell"])
        result.numbers.append(tuple(float(row.get(name) or "nan") for name in _COLUMNS[4:]))
    return {name: {metric: _restored(columns) for metric, columns in metrics.items()} for name, metrics in kept.items()}


def _restored(kept: _Kept) -> Predictions:
    predicted, measured, low, high, trivial = np.array(kept.numbers).T
    rows = Rows(predicted, measured, kept.labels, (low, high), trivial)
    return Predictions(rows, tuple(kept.cells) if kept.cells[0] else ())


# ---------------------------------------------------------------- the index that trust is read from


_CELL = (*NAMES, *(f"{size}_{end}" for size in SIZES for end in ("low", "high")))
_CELL_COLUMNS = ("kind", *_CELL, "metric", "errors")
_ROW_COLUMNS = ("kind", *NAMES, *SIZES, "metric", "predicted", "measured", "label")
_DIGITS, _ERROR_DIGITS = 4, 3


def cells_of(rows: Sequence[MeasuredRow]) -> list[MeasuredCell]:
    """Rows by cell and metric."""
    groups: dict[tuple[str, ...], list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        groups[row.kind, row.metric, *(str(getattr(row.setup, name)) for name in NAMES)].append(row)
    cells = []
    for _, members in sorted(groups.items()):
        first = members[0]
        low, high = (
            first.setup._replace(**{size: end(getattr(row.setup, size) for row in members) for size in SIZES})
            for end in (min, max)
        )
        cells.append(MeasuredCell(first.kind, low, high, first.metric, tuple(sorted(row.error for row in members))))
    return cells


def write_index(name: str, rows: Sequence[MeasuredRow], folder: Path, lists_rows: bool) -> None:
    """Write one validation's part of the index; nothing if `rows` are not of deployments. name: of its files; folder:
    of the index; lists_rows: single rows may be copied"""
    if not rows:
        return
    folder.mkdir(parents=True, exist_ok=True)
    cells = []
    for cell in cells_of(rows):
        ends = [_size_text(getattr(setup, size)) for size in SIZES for setup in (cell.low, cell.high)]
        errors = " ".join(f"{error:.{_ERROR_DIGITS}g}" for error in cell.errors)
        cells.append([cell.kind, *_setup_names(cell.low), *ends, cell.metric, errors])
    (folder / f"{name}.csv").write_text(_csv_text(_CELL_COLUMNS, cells), encoding="utf-8", newline="\n")
    if lists_rows:
        lines = []
        for row in _by_setup(rows):
            figures = [row.metric, f"{row.predicted:.6g}", f"{row.measured:.6g}", row.label]
            lines.append(
                [row.kind, *_setup_names(row.setup), *(_size_text(getattr(row.setup, n)) for n in SIZES), *figures]
            )
        text = _csv_text(_ROW_COLUMNS, lines)
        (folder / f"{name}.rows.csv.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _setup_names(setup: MeasuredSetup) -> list[str]:
    return [str(getattr(setup, name)) for name in NAMES]


def _by_setup(rows: Iterable[MeasuredRow]) -> list[MeasuredRow]:
    """Merge rows of one setup (requests of a run, repeated runs) by their medians."""
    by_setup: dict[tuple[MeasuredSetup, str], list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        by_setup[row.setup, row.metric].append(row)
    result = []
    for first, *rest in by_setup.values():
        repeated = [first, *rest]
        predicted, measured = (
            quantile([getattr(row, name) for row in repeated], 0.5) for name in ("predicted", "measured")
        )
        label = f"median of {len(repeated):,}: {first.label} and so on" if rest else first.label
        result.append(replace(first, predicted=predicted, measured=measured, label=label))
    return result


def _size_text(value: float) -> str:
    return f"{value:.{_DIGITS}g}" if abs(value) < 10**_DIGITS else f"{value:.0f}"


def _csv_text(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *lines])
    return text.getvalue()


# ---------------------------------------------------------------- the command


def mixed(before: Predictions, sample: Predictions) -> Predictions:
    """`before` with the predictions and intervals of the rows in `sample` in place of its own."""
    place = {label: number for number, label in enumerate(sample.rows.labels)}
    old, new = before.rows, sample.rows
    columns = [column.copy() for column in (old.predicted, *(old.interval or ()))]
    for row, label in enumerate(old.labels):
        if label in place:
            for column, source in zip(columns, (new.predicted, *(new.interval or ())), strict=True):
                column[row] = source[place[label]]
    interval = (columns[1], columns[2]) if len(columns) > 1 else None
    return replace(before, rows=Rows(columns[0], old.measured, old.labels, interval, old.trivial))


def _predict_all(
    sets: Iterable[tuple[MeasuredSet, Path]], index: Path | None, every: int = 1
) -> tuple[Lines, dict[str, dict[str, Predictions]], list[tuple[str, str]]]:
    """Lines, rows of slow sets, and (set, note) of rows that are in no line; index: the folder to write what trust is
    read from (`perfmodel.trust`), or None; every: of slow sets so many-th row, the others are as stored."""
    lines: Lines = {}
    kept: dict[str, dict[str, Predictions]] = {}
    dropped: list[tuple[str, str]] = []
    before = stored() if every > 1 else {}
    for measured, path in sets:
        print(f"{measured.name} ({path})", file=sys.stderr, flush=True)
        if measured.is_slow and measured.name in before:
            sample = predictions_of(measured, report_of(measured, path, every))
            both = {name: mixed(rows, sample.get(name, rows)) for name, rows in before[measured.name].items()}
            lines |= lines_of_rows(measured, both)
            continue
        report = report_of(measured, path)
        lines |= lines_of(measured, report)
        notes = [note.replace(str(path), measured.path) for note in report.notes if note.startswith(_NOT_COVERED)]
        dropped += [(measured.name, note) for note in notes]
        if measured.is_slow:
            kept[measured.name] = predictions_of(measured, report)
        if index is not None:
            write_index(measured.slug, report.measured_rows, index, lists_rows=not measured.is_cited)
    return lines, kept, dropped


def losses(before: Lines, now: Lines) -> list[tuple[str, str, str]]:
    """(line, error before, error now) of lines with a median or a 90th percentile that grew by over a tenth, and by
    more than half a point, which is what repeated measurements differ by."""
    result = []
    for key, cells in now.items():
        for column, name in _ERRORS.items():
            was, become = (_share(of[column]) if len(of) > column else None for of in (before.get(key, ()), cells))
            if was is not None and become is not None and become > max(1.1 * was, was + 0.5):
                result.append((f"{key.strip('| ')}, {name}".replace(" | ", ", "), f"{was:g} %", f"{become:g} %"))
    return result


def _share(cell: str) -> float | None:
    return float(cell.removesuffix("%").replace(",", "")) if cell.endswith("%") else None


def _recorded(lost: Sequence[tuple[str, str, str]], because: str) -> None:
    """Add `lost` to the list of losses with its reason."""
    is_new = not LOSSES.is_file()
    with LOSSES.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([["date", "line", "before", "now", "because"]] if is_new else [])
        writer.writerows([today().isoformat(), *loss, because] for loss in lost)


def _list_dropped(sets: Sequence[str], dropped: Sequence[tuple[str, str]]) -> None:
    """Write which rows of `sets` are in no line and why; what is there of other sets stays."""
    before = list(csv.reader(DROPPED.read_text(encoding="utf-8").splitlines()))[1:] if DROPPED.is_file() else []
    others = [tuple(line) for line in before if line[0] not in sets]
    lines = sorted([*others, *((name, note.removeprefix(_NOT_COVERED)) for name, note in dropped)])
    DROPPED.write_text(_csv_text(("set", "rows and reason"), lines), encoding="utf-8", newline="\n")


def _written(lines: Lines, kept: Mapping[str, Mapping[str, Predictions]], text: str) -> None:
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:begin]}{table_of(page_lines(text) | lines)}\n{text[end:]}", encoding="utf-8")
    STORE.write_bytes(store((stored() if STORE.is_file() else {}) | kept))


def main() -> int:
    """Predict, print, compare with docs/how-right.md. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cited", type=Path, help="Folder of the files that are cited and not committed.")
    parser.add_argument("--full", action="store_true", help="Predict every row of slow sets, too.")
    parser.add_argument("--write", action="store_true", help="Predict every row; write docs/how-right.md and reports/.")
    parser.add_argument("--because", default="", help="Why lines may become worse by over a tenth.")
    parser.add_argument("--only", metavar="TEXT", default="", help="Sets whose name has this text.")
    given = parser.parse_args()
    chosen = [item for item in SETS if given.only in item.name and (given.cited is not None or not item.is_cited)]
    roots = [given.cited if item.is_cited else ROOT for item in chosen]
    places = zip(chosen, (root / item.path for item, root in zip(chosen, roots, strict=True)), strict=True)
    text = PAGE.read_text(encoding="utf-8")
    with TemporaryDirectory() as folder:
        every = 1 if given.write or given.full else _EVERY
        lines, kept, dropped = _predict_all(places, Path(folder) if given.write else None, every)
        print(table_of(lines))
        lost = losses(page_lines(text), lines)
        for loss in lost:
            print("{}: {} became {}".format(*loss), file=sys.stderr)
        if given.write and lost and not given.because:
            print("Nothing is written: say --because REASON, or mend them.", file=sys.stderr)
            return 2
        if given.write:
            shutil.copytree(folder, INDEX, dirs_exist_ok=True)
            _recorded(lost, given.because)
            _list_dropped([item.name for item in chosen], dropped)
            _written(lines, kept, text)
            import_module("accuracy_by_setup").write_by_setup()
            return 0
    result = page_lines(text)
    differing = [key for key, cells in lines.items() if result.get(key) != cells]
    for key in differing:
        print(f"docs/how-right.md has {key} {' | '.join(result.get(key, ('no such line',)))} |", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
