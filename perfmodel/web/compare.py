"""Deployments side by side: rows of figures relative to the first, as in `perfmodel compare`; curves of throughput
against interactivity read at a speed, and what was measured beside them: published rows, a user's own results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.observation import PUBLISHED_RESULTS, STEADY_STATES
from perfmodel.planning.metrics import study_metric
from perfmodel.report.numbers import MISSING
from perfmodel.specs.traffic import Lengths
from perfmodel.trust import MeasuredSetup, measured_rows
from perfmodel.web.figures import value_at
from perfmodel.web.results import QueryResult, upload, without_marks
from perfmodel.web.service import QueryState, only_dropped
from perfmodel.web.state import PageState


@dataclass(frozen=True, slots=True)
class CellRow:
    """One row. of: index of each column's request; path, form: see `figure`; aside: remark."""

    label: str
    of: int
    path: str
    form: str = ""
    aside: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure. share: of the row's largest, for its bar; words: change from the first column; tone: good or bad,
    where one direction is better; refusal: why there is none"""

    shown: QueryResult | None
    share: float = 0.0
    words: str = ""
    tone: str = ""
    refusal: str = ""


class Compared(NamedTuple):
    """A row with its cells in column order."""

    row: CellRow
    cells: tuple[Cell, ...]


OF_DEPLOYMENTS = (
    CellRow("weights, per device", 0, "weight_bytes", "bytes"),
    CellRow("KV cache, per device", 0, "kv_bytes", "bytes"),
    CellRow("tokens in the KV cache", 0, "max_tokens", "count"),
    CellRow("largest batch at 2,048 tokens", 0, "max_batch_at_2048_tokens", "count"),
    CellRow("step time", 1, "duration_s", "seconds", "of the same step"),
)
OF_TRAFFIC = (
    CellRow("mean TTFT", 0, "mean_ttft_ms"),
    CellRow("p99 TTFT", 0, "p99_ttft_ms", "latency_ms"),
    CellRow("mean TPOT", 0, "mean_tpot_ms"),
    CellRow("p99 TPOT", 0, "p99_tpot_ms", "latency_ms"),
    CellRow("mean E2E", 0, "mean_e2el_ms"),
    CellRow("output", 0, "output_throughput", "tok_s"),
    CellRow("requests within the SLO", 0, "slo_attainment", "percent"),
    CellRow(
        "largest rate within the SLO", 1, "load.within_slo.max_rate", "req_s", "by 90 % of requests, or plan.attainment"
    ),
    CellRow("cost per million tokens", 0, "usd_per_million_tokens", "usd", "prompts and answers"),
    CellRow("energy per output token", 0, "joules_per_output_token"),
)


def compared(findings: Sequence[QueryState], rows: Sequence[CellRow], num_columns: int) -> list[Compared]:
    """Rows with figures from `findings` (all requests, by column); rows without any are dropped."""
    per_column = len(findings) // num_columns
    columns = [findings[per_column * number : per_column * (number + 1)] for number in range(num_columns)]
    changes = [_changes(columns[0], column) for column in columns]
    compared_rows = []
    for row in rows:
        answers = [column[row.of].shown for column in columns]
        values = [None if answer is None else value_at(answer.data, row.path) for answer in answers]
        values = [value if isinstance(value, int | float) else None for value in values]
        most, cells = max((value for value in values if value is not None), default=0) or 1, []
        for number, (column, value) in enumerate(zip(columns, values, strict=True)):
            if value is None:
                cells.append(Cell(None, refusal=column[row.of].refusal))
            else:
                words, tone = _words(changes[number].get(row.path), number, values[0])
                cells.append(Cell(column[row.of].shown, max(value / most, 0.0), words, tone))
        if any(cell.shown for cell in cells):
            compared_rows.append(Compared(row, tuple(cells)))
    return compared_rows


@dataclass(frozen=True, slots=True)
class SpeedReading:
    """Where a curve gives its users the speed that is asked for. in_flight: requests at the points around it, or at the
    last point if even that is faster; values: metric -> read off the curve there, as it is drawn"""

    in_flight: str
    values: Mapping[str, float]


COST, _THROUGHPUT = "usd_per_million_output_tokens", "output_throughput_per_gpu"


def cheapest(readings: Sequence[SpeedReading | None]) -> tuple[int, float] | None:
    """(its number, by which share it costs less than the next) of the cheapest of several."""
    costs = [(reading.values[COST], i) for i, reading in enumerate(readings) if reading and COST in reading.values]
    costs.sort()
    return (costs[0][1], 1 - costs[0][0] / costs[1][0]) if len(costs) > 1 else None


def at_speed(points: Sequence[Mapping[str, Any]], speed: float) -> SpeedReading | None:
    """The curve through `points` of `perfmodel whatif` at `speed`, in tokens/s of a user; None if one request in flight
    is slower already."""
    rows = [(1e3 / tpot_ms, point) for point in points if (tpot_ms := point["values"].get("mean_tpot_ms"))]
    number = max((number for number, (own_speed, _) in enumerate(rows) if own_speed >= speed), default=None)
    if number is None:
        return None
    (above, first), (below, second) = rows[number], rows[min(number + 1, len(rows) - 1)]
    share = (above - speed) / (above - below) if above > below else 0.0
    counts, values = [point["set"].rpartition("=")[2] for point in (first, second)], {}
    for metric, low in first["values"].items():
        if low and (high := second["values"].get(metric)):  # axes of cost and energy are logarithmic
            is_linear = metric == _THROUGHPUT
            values[metric] = low + share * (high - low) if is_linear else low * (high / low) ** share
    return SpeedReading(f"{counts[0]} to {counts[1]}" if first is not second else f"{counts[0]} or more", values)


def reading_text(metric: str, reading: SpeedReading) -> str:
    """A value that was read off a curve, to three digits."""
    value = reading.values.get(metric)
    return MISSING if value is None else f"≈ {value * study_metric(metric).scale:,.3g}"


def headings(columns: Sequence[PageState], findings: Sequence[QueryState]) -> list[tuple[str, str]]:
    """(model, devices) per column from its first answer in `findings`, else from its address."""
    names = []
    for column, finding in zip(columns, findings[:: len(findings) // len(columns)], strict=True):
        if finding.shown is None:
            flags = column.flags
            model, devices = flags.get("model", column.get("scenario")), flags.get("hardware", "")
            names.append((without_marks(model), without_marks(devices)))
        elif "num_devices" in (data := finding.shown.data):  # of `memory`
            names.append((data["model"], f"{data['num_devices']} x {data['hardware']}"))
        else:  # of `simulate`
            scenario = data["provenance"]["inputs"]["scenario"]
            devices = f"{data['mean_num_devices']:g} x {scenario['hardware']['name']}"
            names.append((scenario["model"]["name"], devices))
    return names


def _changes(first: Sequence[QueryState], other: Sequence[QueryState]) -> dict[str, Any]:
    """Path -> change by `perfmodel compare` between two columns."""
    from perfmodel.commands.runs import compared as results_compared

    changes: dict[str, Any] = {}
    for one, another in zip(first, other, strict=True):
        if one.shown is None or another.shown is None or one is another:
            continue
        answers = results_compared(one.shown.data, another.shown.data, "first", "other").data["answers"]
        changes |= {".".join([*change["place"].split(), change["metric"]]): change for change in answers}
    return changes


def _words(change: Mapping[str, Any] | None, number: int, first: float | None) -> tuple[str, str]:
    """`12 % lower, better`, or `the same`; empty for the first column."""
    if not number or first is None:
        return "", ""
    if change is None:
        return "the same", ""
    if change["relative"] is None:
        return "", ""
    size, verdict = change["relative"], change["verdict"]
    text = f"{abs(size):.1%} {'higher' if size > 0 else 'lower'}".replace("%", " %")
    text = f"{1 + size:.3g} times" if size >= 1 else text
    return f"{text}, {verdict}" if verdict else text, {"better": "good", "worse": "bad"}.get(verdict, "")


_PUBLISHERS = {"steady-state": STEADY_STATES.publisher, "served": PUBLISHED_RESULTS.publisher}


class MeasuredPoint(NamedTuple):
    """One measured load. speed: tokens/s of a user; throughput: output tokens/s of a device; is_alike: of the curve's
    engine, number format, number of devices, and lengths up to a factor of two; words: setup and source"""

    speed: float
    throughput: float
    is_alike: bool
    words: str


def published_points(scenario: Mapping[str, Any]) -> list[MeasuredPoint]:
    """Those of a resolved scenario's model and device, from servers whose prefill and decode share devices."""
    model, engine, device = scenario["model"], scenario["engine"], scenario["hardware"]["name"]
    weights = (model.get("quantization") or {}).get("weights") or model["dtype"]
    alike: tuple[Any, ...] = (engine["profile"], weights, _num_devices(engine))
    loads: dict[tuple[str, MeasuredSetup, str], dict[str, float]] = {}
    for row in measured_rows():
        if (row.setup.model, row.setup.device, row.setup.separate) == (model["name"], device, False):
            loads.setdefault((row.kind, row.setup, row.label), {})[row.metric] = row.measured
    points = []
    for (kind, setup, label), metrics in loads.items():
        if "tpot_mean" in metrics and (throughput := _throughput(setup, metrics)):
            law = "" if "output_tokens_per_s" in metrics else "throughput by Little's law<br>"
            words = (
                f"{setup.engine} {setup.version}, {setup.weights}, {setup.devices:g} devices, "
                f"{setup.input_tokens:,.0f} in, {setup.output_tokens:,.0f} out, {setup.concurrency:g} in flight<br>"
                f"{law}{_PUBLISHERS.get(kind, kind)}<br>{label}"
            )
            is_alike = (setup.engine, setup.weights, setup.devices) == alike and _has_lengths(
                setup, scenario["traffic"]
            )
            points.append(MeasuredPoint(1e3 / metrics["tpot_mean"], throughput / setup.devices, is_alike, words))
    return points


def _has_lengths(setup: MeasuredSetup, traffic: Mapping[str, Any]) -> bool:
    """Whether its prompts and answers are at most twice or half as long; true where the traffic's are in a file."""
    pairs = ((setup.input_tokens, traffic.get("input_tokens")), (setup.output_tokens, traffic.get("output_tokens")))
    means = [(measured, Lengths.model_validate(given).mean_tokens) for measured, given in pairs if given]
    return all(mean is None or mean / 2 <= measured <= 2 * mean for measured, mean in means)


def _throughput(setup: MeasuredSetup, metrics: Mapping[str, float]) -> float:
    """Output tokens/s of all devices, as measured, else by Little's law from the requests in flight and the time of
    one; 0 if unknown. Of 119 rows that state both, the law's is 1.03 times the measured one in the median, within 25 %
    in three of four: requests are fewer while a run starts and ends."""
    if "output_tokens_per_s" in metrics:
        return metrics["output_tokens_per_s"]
    duration_ms = metrics.get("ttft_mean", inf) + max(setup.output_tokens - 1, 0.0) * metrics["tpot_mean"]
    return setup.concurrency * setup.output_tokens / duration_ms * 1e3


def _num_devices(engine: Mapping[str, Any]) -> int:
    return prod(engine[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data", "prefill_context"))


@lru_cache(maxsize=16)
def own_points(path: Path, devices: int) -> Sequence[MeasuredPoint]:
    """Points of a load tool's result file, of a server on so many devices. Raises SpecError for another file, and for
    one without a run that can be marked."""
    from perfmodel.evidence.sources.bench import read_bench_files

    points = []
    for run in read_bench_files((path,))[0]:
        tpot_ms, throughput = run.metrics.get("mean_tpot_ms"), run.metrics.get("output_throughput")
        if tpot_ms and throughput:
            load = f", {run.load.concurrency:g} in flight" if getattr(run.load, "concurrency", None) else ""
            words = f"{run.source} {run.setup.version}".strip() + f", {devices} devices{load}<br>{run.name}"
            points.append(MeasuredPoint(1e3 / tpot_ms, throughput / devices, True, words))
    if not points:
        raise SpecError(f"{path.name}: no run has both a mean TPOT and an output throughput; nothing can be marked.")
    return points


def own_results(state: PageState, scenario: Mapping[str, Any], folder: Path) -> tuple[Sequence[MeasuredPoint], str]:
    """(points, refusal) of the result file that a state marks; scenario: resolved, of the devices that ran."""
    if not (mark := state.get("results")):
        return (), ""
    try:
        with only_dropped(folder):
            devices = _num_devices(scenario["engine"]) * scenario["cluster"]["replicas"]
            return own_points(upload(mark, folder), devices), ""
    except PerfmodelError as error:
        return (), str(error)
