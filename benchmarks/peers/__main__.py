"""Predictions of other simulators and ours, of the same measured rows.

    python benchmarks/peers [--each 4] [--cited FOLDER] [--only steady replay open-loop] [--report FOLDER]

steady: servers at a fixed concurrency whose lengths are known and which draft nothing (measurements/steady-state; its
rows come from AIConfigurator's repository), asked of AIConfigurator 0.12, whose engine AISimulate is, in its default
mode: kernel tables of the newest engine version. It is asked for mean lengths, and in the format of the checkpoint
where that is the row's, else in the row's formats; where it refuses, in the other.

replay: those of these servers that can be stated to the offline replay of Dynamo 1.2, a discrete-event simulation
whose steps AIConfigurator 0.10 prices, beside the closed form of that release. Dynamo's simulation became AISimulate
(migration-history.md of ai-dynamo/aisimulate @8ec38fe), whose own wheels are on its maker's index alone.

open-loop: runs of vLLM under open-loop load (FOLDER/serving/vllm_runs.json; they may not be copied here), priced by
BLIS's law of a step.

Peers run in environments of their own under build/peers, made on first use (two of 0.9 GB), which keep their answers.
Ours are as shipped, which is partly fitted to these rows, and by a fit without the row's cell (model, version, device,
format) or, under open-loop load, without its model; beside the replay, as shipped alone."""

__all__ = ["main"]

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import blis  # noqa: E402
import steady  # noqa: E402

from perfmodel.evidence.kinds.runs import validate_serving  # noqa: E402
from perfmodel.evidence.leave_out import validate_left_out  # noqa: E402
from perfmodel.evidence.observation import Observation  # noqa: E402
from perfmodel.evidence.report import ValidationReport  # noqa: E402
from perfmodel.evidence.sources.recorded import read_serving_runs  # noqa: E402

_MEASURED = ROOT / "measurements" / "steady-state" / "unified.csv.gz"
_STORE = ROOT / "reports" / "accuracy_202611.csv.gz"
_STEADY_METRICS = {"ttft_mean": "TTFT", "tpot_mean": "TPOT"}
_OPEN_LOOP_METRICS = {
    "e2el_mean": "End-to-end latency",
    "ttft_mean": "TTFT",
    "ttft_p99": "99th percentile of TTFT",
    "itl_mean": "ITL",
}
_CELL_LEFT_OUT, _MODEL_LEFT_OUT = "ours, cell left out", "ours, model left out"
_SHIPPED, _TRIVIAL = "ours, as shipped", "trivial"

Figures = Mapping[tuple[str, str], float]  # by metric and row


class Compared(NamedTuple):
    """A row's figure as measured, and as predicted by each column of a table."""

    metric: str
    groups: tuple[str, ...]
    measured: float
    predicted: Mapping[str, float]


def _figures(report: ValidationReport, field: str) -> dict[tuple[str, str], float]:
    """`predicted`, `measured` or `trivial` of all rows of `report`."""
    return {
        (comparison.metric, label): float(value)
        for comparison in report.comparisons
        for label, value in zip(comparison.rows.labels, getattr(comparison.rows, field), strict=True)
    }


def _compared(
    metrics: Mapping[str, str],
    groups: Mapping[str, tuple[str, ...]],
    measured: Figures,
    columns: Mapping[str, Figures],
) -> Iterator[Compared]:
    """Rows of `groups` that all columns have."""
    for metric in metrics:
        for row, own in groups.items():
            key = metric, row
            if key in measured and all(key in figures for figures in columns.values()):
                yield Compared(metric, own, measured[key], {name: figures[key] for name, figures in columns.items()})


def _line(name: str, rows: Sequence[Compared]) -> str:
    """The last cell: how often the first of our columns is nearer than the first column, the peer's."""
    columns = list(rows[0].predicted)
    measured = np.array([row.measured for row in rows])
    errors = {column: np.abs([row.predicted[column] for row in rows] / measured - 1) for column in columns}
    ours = next(column for column in columns if column.startswith("ours"))
    cells = [name, f"{len(rows)}"]
    for column in columns:
        median, most = np.median(errors[column]), np.quantile(errors[column], 0.9)
        cells.append(f"{median:.0%}" if column == _TRIVIAL else f"{median:.1%} / {most:.0%}")
    return f"| {' | '.join([*cells, f'{np.mean(errors[ours] < errors[columns[0]]):.0%}'])} |"


def _tables(metrics: Mapping[str, str], compared: Sequence[Compared]) -> Iterator[str]:
    """A table for each metric: all rows, then each group."""
    for metric, title in metrics.items():
        everyone = [row for row in compared if row.metric == metric]
        if not everyone:
            continue
        groups = defaultdict[str, list[Compared]](list)
        for row in everyone:
            for group in row.groups:
                groups[group].append(row)
        columns = list(everyone[0].predicted)
        nearer = f"{'left-out' if columns[-3].startswith('ours') else 'shipped'} ours nearer"
        yield f"\n## {title}\n\n| servers | rows | {' | '.join(columns)} | {nearer} |"
        yield "|---|" + (len(columns) + 2) * "---:|"
        yield _line("all", everyone)
        yield from (_line(name, members) for name, members in sorted(groups.items()))


class _Steady:
    """Servers at a fixed concurrency, every `each`-th, and what we predict of them."""

    def __init__(self, each: int) -> None:
        rows = [r for r in steady.read_table(_MEASURED) if r["mtp_unlabelled"] == "False" and r["lengths"] != "unknown"]
        self.rows = sorted(rows, key=lambda row: (row["backend"], row["system"], row["id"]))[::each]
        stored = [row for row in steady.read_table(_STORE) if row["set"] == "servers at a fixed concurrency"]
        self._columns: dict[str, Figures] = {
            name: {(row["metric"], row["row"]): float(row[field]) for row in stored}
            for name, field in ((_SHIPPED, "predicted"), (_TRIVIAL, "trivial"))
        }

    def compared(
        self,
        rows: Sequence[steady.Row],
        answers: Sequence[list[float] | str],
        columns: Sequence[str],
        left_out: Figures | None = None,
    ) -> list[Compared]:
        """`answers` have TTFT and TPOT of each of `columns`, one after another; left_out: ours, without the cell."""
        groups = dict[str, tuple[str, ...]]()
        measured = dict[tuple[str, str], float]()
        figures: dict[str, dict[tuple[str, str], float]] = {column: {} for column in columns}
        for row, answer in zip(rows, answers, strict=True):
            if isinstance(answer, str):
                continue
            groups[row["id"]] = (f"{row['backend']}, {row['system'].removesuffix('_sxm').upper()}",)
            for place, metric in enumerate(_STEADY_METRICS):
                key = metric, row["id"]
                measured[key] = float(row[metric.replace("mean", "ms")])
                for column, value in zip(columns, answer[place::2], strict=True):
                    figures[column][key] = value
        ours = {**({} if left_out is None else {_CELL_LEFT_OUT: left_out}), **self._columns}
        return list(_compared(_STEADY_METRICS, groups, measured, {**figures, **ours}))


def _refused(answers: Sequence[list[float] | str]) -> str:
    why = Counter(answer.partition(":")[0] for answer in answers if isinstance(answer, str))
    counts = ", ".join(f"{count} by {name}" for name, count in why.most_common())
    return f"answers {len(answers) - why.total()} of {len(answers)} servers" + (f" (refused: {counts})" if why else "")


def _steady_report(servers: _Steady, each: int) -> str:
    answers = steady.estimates(servers.rows)
    left_out = _figures(validate_left_out("steady-state", _MEASURED, "cell"), "predicted")
    compared = servers.compared(servers.rows, answers, ["AIConfigurator"], left_out)
    lines = [
        "# AIConfigurator and we, on the same measured servers\n",
        f"`python benchmarks/peers --each {each}`: AIConfigurator {steady.AICONFIGURATOR.version} {_refused(answers)}; "
        f"of these, those in our table of accuracy. Errors: median / nine in ten below.",
    ]
    return "\n".join([*lines, *_tables(_STEADY_METRICS, compared)]) + "\n"


def _replay_report(servers: _Steady, each: int) -> str:
    rows = [row for row in servers.rows if steady.is_replayed(row)]
    answers = steady.replays(rows)
    both = [
        later if isinstance(later, str) else answer if isinstance(answer, str) else answer + later
        for answer, later in zip(answers, steady.estimates(rows), strict=True)
    ]
    compared = servers.compared(rows, both, ["replay", "its closed form", "AIConfigurator"])
    lines = [
        "# A simulation with AIConfigurator's kernels, and we, on the same measured servers\n",
        f"`python benchmarks/peers --each {each} --only replay`: the offline replay of Dynamo {steady.REPLAY.version} "
        f"{_refused(answers)} that can be stated to it: under vLLM, in the checkpoint's format, with answers of up to "
        f"{steady.MAX_REPLAYED_ANSWER} tokens. AIConfigurator 0.10 prices its steps, whose closed form has a column of "
        f"its own, as has that of {steady.AICONFIGURATOR.version}. Ours, as shipped, is partly fitted to these rows. "
        f"Errors: median / nine in ten below.",
    ]
    return "\n".join([*lines, *_tables(_STEADY_METRICS, compared)]) + "\n"


def _open_loop_report(path: Path) -> str:
    rows, _ = read_serving_runs(path)
    runs = defaultdict[str, list[Observation]](list)
    for row in rows:
        if not row.is_overloaded:
            runs[row.name].append(row)
    theirs = {
        (metric, row.label): value
        for stages in runs.values()
        for row, figures in zip(stages, blis.stages_by_law(stages), strict=True)
        for metric, value in figures.items()
    }
    groups = {row.label: _groups_of(row) for stages in runs.values() for row in stages}
    left_out, shipped = validate_left_out("serving", path, "model"), validate_serving(path)
    columns = {
        "BLIS": theirs,
        _MODEL_LEFT_OUT: _figures(left_out, "predicted"),
        _SHIPPED: _figures(shipped, "predicted"),
        _TRIVIAL: _figures(left_out, "trivial"),
    }
    compared = list(_compared(_OPEN_LOOP_METRICS, groups, _figures(left_out, "measured"), columns))
    lines = [
        "# BLIS's law of a step and ours, on the same runs of vLLM\n",
        "`python benchmarks/peers --only open-loop --cited FOLDER`: stages of vLLM 0.15 under open-loop load, "
        "published by the authors of BLIS. BLIS is its default law of a step with the coefficients that it ships, "
        "under our scheduler; they were fitted to 15 runs on H100, some of which are among these. "
        "Errors: median / nine in ten below.",
    ]
    return "\n".join([*lines, *_tables(_OPEN_LOOP_METRICS, compared)]) + "\n"


def _groups_of(row: Observation) -> tuple[str, ...]:
    scenario = row.scenario
    is_fitted = scenario.model.name in blis.FITTED_MODELS and scenario.hardware.name.startswith("h100")
    return scenario.hardware.name, f"models that BLIS {'was' if is_fitted else 'was not'} fitted to"


def main() -> None:
    """Ask peers, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=4, help="of so many servers one is asked for")
    parser.add_argument("--cited", type=Path, help="folder with serving/vllm_runs.json")
    parser.add_argument("--only", nargs="+", choices=("steady", "replay", "open-loop"))
    parser.add_argument("--report", type=Path, help="folder to write the reports to")
    asked = parser.parse_args()
    servers = _Steady(asked.each)
    parts: dict[str, tuple[str, Callable[[], str]]] = {
        "steady": ("peers_202611.md", lambda: _steady_report(servers, asked.each)),
        "replay": ("peers_replay_202611.md", lambda: _replay_report(servers, asked.each)),
    }
    if asked.cited is not None:
        runs = asked.cited / "serving" / "vllm_runs.json"
        parts["open-loop"] = "peers_open-loop_202611.md", lambda: _open_loop_report(runs)
    elif asked.only and "open-loop" in asked.only:
        parser.error("open-loop runs may not be copied here; give their folder by --cited.")
    for name in asked.only or parts:
        file, report = parts[name]
        text = report()
        print(text)
        if asked.report is not None:
            (asked.report / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
