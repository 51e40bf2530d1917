"""The page that says how right predictions are: README's table, then each report by device, with its worst rows."""

__all__ = ["REPORTS", "accuracy_page", "setups_page"]

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from docs_site.places import ROOT
from docs_site.tables import in_cell, table
from perfmodel.planning.metrics import metric_of

_MAX_ROWS = 5  # of each metric


class Report(NamedTuple):
    """A committed report: its file without `.json`, and what was compared."""

    file: str
    title: str


REPORTS = (
    Report("serving_h100-a100-l40s_202611", "vLLM under open-loop load"),
    Report("steady-state_hopper-blackwell_202611", "Servers at a fixed concurrency"),
    Report("disaggregated_hopper-blackwell_202611", "Separate prefill and decode workers"),
    Report("throughput_a100-h200-l40s_202611", "TensorRT-LLM offline"),
    Report("per-request_rtx-4090_202611", "Each request, RTX 4090"),
    Report("per-request_rtx-pro-6000_202611", "Each request, RTX PRO 6000"),
    Report("held-out_mlperf_architecture_202611", "MLPerf Inference"),
    Report("held-out_served_architecture_202611", "Servers on other devices"),
    Report("operators_a100-h100_202611", "Kernels of A100 and H100"),
    Report("published_figures_202611", "Figures of papers and blogs"),
)


def accuracy_page() -> str:
    """What the page has below its introduction."""
    text = "## In short\n\n" + _of_readme() + "\n"
    text += "## By device, and where it is worst\n\n"
    return text + "".join(_section(report) for report in REPORTS) + _of_single_machines()


def setups_page() -> str:
    """A table of setups for each metric."""
    by_metric = dict[str, list[tuple[str, ...]]]()
    for line in _content("accuracy_by_setup_202611")["rows"]:
        names = (line[key] for key in ("device", "engine", "version", "weights"))
        shares = (line.get(key) for key in ("median", "nine_in_ten", "trivial", "covered"))
        cells = ("" if share is None else f"{100 * share:.0f} %" for share in shares)
        by_metric.setdefault(line["metric"], []).append((*map(in_cell, names), f"{line['rows']:,}", *cells))
    header = ("device", "engine", "version", "format", "rows", "median", "nine in ten", "trivial", "within 80 %")
    return "\n".join(f"## {metric_of(key).name}\n\n{table(header, rows)}" for key, rows in by_metric.items())


def _of_readme() -> str:
    """README's section on accuracy, its links as seen from docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", readme.split("## How right is it?\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    section = re.sub(r"\]\(docs/", "](", section)
    return re.sub(r"\]\((?=measurements/|reports/)", "](../", section).strip() + "\n"


def _content(file: str) -> Any:
    return json.loads((ROOT / "reports" / f"{file}.json").read_text(encoding="utf-8"))


def _section(report: Report) -> str:
    result = _content(report.file)
    text = f"### {report.title}\n\n{result['covered']:,} rows ([the report](../reports/{report.file}.md)).\n\n"
    text += table(_HEADER[1:], (row[1:] for row in _summary_rows({"": result["metrics"]}))) + "\n"
    if (ROOT / "reports" / f"{report.file}.errors.svg").is_file():
        text += f"![Errors, {report.title}](../reports/{report.file}.errors.svg)\n\n"
    devices = {name.removeprefix("device "): of for name, of in result["by"].items() if _is_device(name)}
    if len(devices) > 1:
        text += "By device:\n\n" + table(_HEADER, _summary_rows(devices)) + "\n"
    text += "The worst rows:\n\n" + table(_WORST_HEADER, _worst_rows(result["worst"])) + "\n"
    return text


_HEADER = ("device", "metric", "rows", "median error", "trivial", "nine in ten below", "80 % intervals cover")
_WORST_HEADER = ("metric", "row", "predicted", "measured", "predicted / measured", "why")


def _is_device(name: str) -> bool:
    return name.startswith("device ") and not name.startswith("device class ")


def _summary_rows(by: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, metrics in by.items():
        for key, errors in metrics.items():
            trivial, covered = errors.get("trivial_ape"), errors.get("interval_coverage")
            yield (
                in_cell(name),
                in_cell(metric_of(key).name),
                f"{errors['rows']:,}",
                f"{100 * errors['median_ape']:.1f} %",
                "" if trivial is None else f"{100 * trivial:.1f} %",
                f"{100 * errors['p90_ape']:.1f} %",
                "" if covered is None else f"{100 * covered:.0f} %",
            )


def _worst_rows(worst: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    shown = dict[str, int]()
    for row in sorted(worst, key=lambda row: -abs(row["error"])):
        key = row["metric"]
        shown[key] = shown.get(key, 0) + 1
        if shown[key] <= _MAX_ROWS:
            metric, why = metric_of(key), row.get("breakdown", {}).get("why", "")
            times = f"{1 + row['error']:.2f}"
            setting = row.get("setting") or row["row"]
            values = (_value(row[item], metric.unit) for item in ("predicted", "measured"))
            yield in_cell(metric.name), in_cell(setting), *values, times, in_cell(why)


def _value(value: float, unit: str) -> str:
    """To three digits, without powers of ten; seconds of kernels in microseconds."""
    if unit == "s" and value < 0.1:
        value, unit = 1e6 * value, "µs"
    return f"{value:,.0f} {unit}".strip() if value >= 100 else f"{value:.3g} {unit}".strip()


def _of_single_machines() -> str:
    content = _content("local_202611")
    text = "### llama.cpp and MLX on single machines\n\n"
    text += "Whole devices left out of the fit ([the report](../reports/local_202611.md), [how](local.md)).\n\n"
    rows = [
        (in_cell(name), f"{of['devices']}", f"{of['rows']:,}", f"{100 * of['median_ape']:.1f} %", _percent(of))
        for name, of in content["held_out"]["device"].items()
    ]
    header = ("what, on which", "devices", "rows", "median error over devices", "nine in ten below")
    text += table(header, rows) + "\nThe worst devices:\n\n"
    worst = [
        (in_cell(item["device"]), in_cell(item["test"]), in_cell(item["backend"]), f"{1 + item['error']:.2f}")
        for item in content["worst"]
    ]
    text += table(("device", "test", "backend", "predicted / measured"), worst)
    return f"{text}\n{content['about']}\n"


def _percent(errors: Mapping[str, Any]) -> str:
    return f"{100 * errors['p90_ape']:.1f} %"
