"""Published serving results on devices whose own results no fit has seen.

    python benchmarks/cross_validate_served.py FOLDER             # prints the tables
    python benchmarks/cross_validate_served.py FOLDER --report R  # and writes them to R, as JSON beside it

FOLDER has `mlperf.csv.gz` and `other_devices.csv.gz` (`perfmodel validate mlperf | served`). Kernel tables are of other
measurements; what is fitted to such results are a few numbers for architectures without tables (AMD, Gaudi, TPU,
Tenstorrent, Xeon), and here each has the mean of the others: as if none of its results were known. No number is fitted
to an engine or a model. Errors are |predicted / measured - 1|, of a device the median over its settings, then the
median over devices; widths of intervals are from devices left out.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfmodel.cost.calibrations.whole_runs import load_whole_runs
from perfmodel.evidence.fit.whole_runs import without_own
from perfmodel.evidence.kinds.pooled import report_pooled
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.predict.results import predict_served
from perfmodel.evidence.report import ValidationReport
from perfmodel.evidence.sources.results import devices_folder, read_mlperf_rows, read_served_rows

FILES = {"mlperf": "mlperf.csv.gz", "served": "other_devices.csv.gz"}
TARGETS = {
    ("mlperf", "tokens_per_s"): 0.15,
    ("mlperf", "tpot_mean"): 0.15,
    ("mlperf", "ttft_mean"): 0.30,
    ("served", "output_tokens_per_s"): 0.20,
    ("served", "tpot_mean"): 0.20,
}
SHOWN = ("device", "engine", "scenario")
WORST = 4


def _read(kind: str, folder: Path) -> tuple[list[Observation], list[tuple[str, str]]]:
    return (read_mlperf_rows if kind == "mlperf" else read_served_rows)(folder / FILES[kind])


def _held_out(kind: str, folder: Path) -> ValidationReport:
    rows, left_out = _read(kind, folder)
    pairs = predict_served(rows, devices_folder(folder), fits=without_own(load_whole_runs()))
    return report_pooled(kind, pairs, left_out)


def _table(kind: str, report: ValidationReport) -> list[str]:
    lines = ["| metric | settings | median | target | mean | p90 | bias | in 80 % interval |", "|" + "---|" * 8]
    for metric, stats in report.metrics.items():
        target = TARGETS.get((kind, metric))
        within = "" if stats.interval_coverage is None else f"{stats.interval_coverage:.0%}"
        lines.append(
            f"| {metric} | {stats.rows:,} | {stats.median_ape:.1%} | {f'{target:.0%}' if target else ''} "
            f"| {stats.mean_ape:.1%} | {stats.p90_ape:.1%} | {stats.bias:+.1%} | {within} |"
        )
    return lines


def _groups(report: ValidationReport) -> list[str]:
    metrics = list(report.metrics)
    lines = ["| group | " + " | ".join(metrics) + " |", "|" + "---|" * (1 + len(metrics))]
    for name, stats in report.by.items():
        if name.startswith(tuple(f"{item} " for item in SHOWN)) and not name.startswith("device class"):
            cells = [f"{stats[m].median_ape:.0%} ({stats[m].rows})" if m in stats else "" for m in metrics]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _worst(report: ValidationReport) -> list[str]:
    counts: dict[str, int] = {}
    lines = ["| metric | row | error | what |", "|" + "---|" * 4]
    for row in report.worst:
        counts[row["metric"]] = counts.get(row["metric"], 0) + 1
        if counts[row["metric"]] <= WORST:
            lines.append(f"| {row['metric']} | {row['row']} | {row['error']:+.0%} | {row['setting']} |")
    return lines


CAUSES = {
    "mlperf": (
        "Xeon 6787P: two CPUs are all there are to learn from, and the other reaches twice the share of what power "
        "sustains; neither says how its sockets, threads and memory were set. MI300X: FP8 products reach less than "
        "those of other makers; a result that says fp16 delivers what FP8 delivers. Llama 3.1 8B is served faster "
        "than its steps here, with TPOT far from its limits: its submitters did not raise the rate as far as they "
        "might, and results do not say so. Llama 3.1 8B and results of 2024 on an L40S depend on batches that are not "
        "stated, nor is which of several layouts ran. GPT-J counts a request's latency under a limit of its own, near "
        "which a queue multiplies small errors of capacity."
    ),
    "served": (
        "MiniMax-M2.5 and GLM-5 under a nightly of vLLM took 0.9 s for prompts of 2,048 tokens at a concurrency of 4: "
        "a start, or kernels without tuning, that no table states. Llama 3.1 405B without CUDA graphs, on H100 and "
        "MI300X: launches of these hosts took 22 us an operator, of the others that are published 23 to 76; and from "
        "64 sequences on each adds 0.4 to 0.7 ms to a step, more than its work, which nothing here explains. Meta's "
        "FP8 checkpoint of it ran on MI300X with kernels of half the rate of AMD's own. TTFT on RTX 3090s is below "
        "what it takes to multiply the prompt: prompts repeat, and their prefixes were cached, which no column says. "
        "TPU v5e: one figure of 2024, its number format not stated."
    ),
}


def _markdown(reports: dict[str, ValidationReport], command: str) -> str:
    about = str(__doc__).partition("\n\n")[2].partition("\n\n")[2].strip()
    lines = ["# Published serving results on devices left out of the fit", ""]
    lines += [f"Written by `{command}`; the figures are in the JSON beside it.", "", about, ""]
    for kind, report in reports.items():
        lines += [f"## {kind}: {report.covered} of {report.rows} rows", "", *_table(kind, report), ""]
        lines += ["Median errors by group (settings):", "", *_groups(report), ""]
        lines += ["Furthest off:", "", *_worst(report), "", CAUSES[kind], ""]
        lines += [f"- {note}" for note in report.notes if note.startswith(("noise floor", "not covered", "apart"))]
        lines.append("")
    return "\n".join(lines)


def _json(reports: dict[str, ValidationReport]) -> dict[str, Any]:
    return {kind: report.to_json() for kind, report in reports.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args(arguments)
    reports = {kind: _held_out(kind, asked.folder) for kind in FILES}
    text = _markdown(reports, "python benchmarks/cross_validate_served.py <folder> --report <this file>")
    print(text)
    if asked.report is not None:
        asked.report.write_text(text, encoding="utf-8")
        asked.report.with_suffix(".json").write_text(json.dumps(_json(reports), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
