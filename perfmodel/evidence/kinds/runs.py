"""`validate serving`, `steady-state`, `throughput`, `per-request`, `energy` and `acceptance`: recorded runs, simulated
(energy: their mean steps priced; accepted lengths: by the acceptance catalog), and compared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from perfmodel.cost import ServerFit, plan_memory
from perfmodel.evidence.breakdown import TypicalSteps, latency_breakdown
from perfmodel.evidence.fit.acceptance import FOLDS, LENGTH, fit_laws, law_of, read_acceptance
from perfmodel.evidence.fit.power import predict_all
from perfmodel.evidence.fit.profiles import config_key
from perfmodel.evidence.observation import Observation, Prediction, Progress, Reasons, grouped
from perfmodel.evidence.predict import recorded
from perfmodel.evidence.report import (
    Comparison,
    Rows,
    ValidationReport,
    comparison_of,
    median_of_others,
    pooled,
    range_names,
    report_of,
    rows_of,
)
from perfmodel.evidence.sources.recorded import METRICS, read_offline_runs, read_request_log, read_serving_runs
from perfmodel.evidence.sources.steady import read_energy_rows, read_steady_states
from perfmodel.planning.typical_step import StepChoice, mean_step
from perfmodel.specs import Scenario
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.engine.speculation import AcceptanceCatalog, load_catalog
from perfmodel.trust.index import setup_of

Dimensions = Mapping[str, Callable[[Prediction], str]]
_DEVICE: Dimensions = {"device": lambda pair: pair.row.scenario.hardware.name}
_MODEL: Dimensions = {"model": lambda pair: pair.row.scenario.model.name}
_PRECISION: Dimensions = {
    "precision": lambda pair: pair.row.scenario.model.quantization.weights or pair.row.scenario.model.dtype
}
_TENSOR_PARALLEL: Dimensions = {"tensor parallel": lambda pair: str(pair.row.scenario.engine.tensor_parallel_size)}


def _labelled(*names: str) -> Dimensions:
    """Dimensions that rows have labels of."""
    return {name: partial(_label, name) for name in names}


def _label(name: str, pair: Prediction) -> str:
    return pair.row.labels[name]


def validated(
    read: Callable[[str | Path], tuple[list[Observation], Reasons]],
    predict: Callable[[Sequence[Observation], Progress | None], Sequence[Prediction]],
    report: Callable[[Sequence[Prediction], Reasons], ValidationReport],
    path: str | Path,
    progress: Progress | None = None,
) -> ValidationReport:
    """The `report` of what `predict` says of all rows that `read` finds at `path`; rows that cannot be described or
    predicted are listed with the reason. Raises SpecError for another kind of file."""
    rows, left_out = read(path)
    return report(predict(rows, progress), left_out)


def _report(
    kind: str,
    units: Mapping[str, str],
    dimensions: Dimensions,
    parts: Callable[[Sequence[Prediction], Comparison, int], Mapping[str, Any]],
    pairs: Sequence[Prediction],
    left_out: Sequence[tuple[str, str]] = (),
) -> ValidationReport:
    """Errors over all rows in the metrics of `units`, and by dimension."""
    covered = [pair for pair in pairs if not pair.reason]
    comparisons = [comparison_of(metric, unit, covered, dimensions) for metric, unit in units.items()]
    return report_of(kind, pairs, left_out, comparisons, partial(parts, covered))


def _compared(comparison: Comparison, number: int, pairs: Sequence[Prediction]) -> Prediction:
    """The pair of row `number` of a comparison."""
    members = [pair for pair in pairs if comparison.metric in pair.row.metrics]
    return members[int(np.flatnonzero(comparison.rows.kept)[number])]


def _latency_parts(
    pairs: Sequence[Prediction], scenario_of: Callable[[Prediction], Scenario], comparison: Comparison, number: int
) -> dict[str, Any]:
    pair, metric = _compared(comparison, number, pairs), comparison.metric
    predicted, measured, ttft = pair.metrics[metric], pair.row.metrics[metric], pair.metrics["ttft_mean"]
    return latency_breakdown(metric, predicted, measured, ttft, TypicalSteps.of(scenario_of(pair)))


# ---------------------------------------------------------------- serving

_STAGE_DIMENSIONS: Dimensions = {
    **_DEVICE,
    **_MODEL,
    "load": lambda pair: "overloaded" if pair.row.is_overloaded else "steady",
    "engine": lambda pair: pair.row.scenario.engine.profile,
    **_TENSOR_PARALLEL,
}
_RATES = (2, 5, 10, 20)


def report_serving(pairs: Sequence[Prediction], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """Errors over all stages, and by device, model and load."""
    comparisons = []
    for metric in METRICS:
        members = [pair for pair in pairs if metric in pair.row.metrics]
        rates = [_at_stage(pair).traffic.arrivals.stages[0].rate for pair in members]
        rate = {"rate": range_names(rates, _RATES, "req/s")}
        comparisons.append(comparison_of(metric, "ms", members, _STAGE_DIMENSIONS, rate))
    parts = partial(_latency_parts, pairs, _at_stage)
    notes = [*_memory_notes(pairs), *filter(None, map(_overload_note, pairs))]
    return report_of("serving", pairs, left_out, comparisons, parts, notes, 3)


def _at_stage(pair: Prediction) -> Scenario:
    scenario, end = pair.row.scenario, 0.0
    assert pair.row.window is not None
    for stage in scenario.traffic.arrivals.stages:
        end += stage.duration_s
        if end >= pair.row.window[1] * (1 - 1e-9):
            return recorded.with_traffic(scenario, {"stages": (stage,)})
    raise ValueError(f"{pair.row.label}: its run has no such stage")


def _memory_notes(pairs: Sequence[Prediction]) -> list[str]:
    """Planned vs. logged KV blocks; simulations use the logged ones."""
    result: dict[str, None] = {}
    for pair in pairs:
        scenario, engine = pair.row.scenario, pair.row.scenario.engine
        logged = engine.num_gpu_blocks_override
        if logged is None:
            continue
        free = engine.model_copy(update={"num_gpu_blocks_override": None})
        planned = plan_memory(scenario.model, scenario.hardware, free).num_kv_blocks
        where = f"memory: {scenario.model.name} on {engine.num_devices} x {scenario.hardware.name}"
        result[f"{where}: {planned:,} KV blocks planned, {logged:,} logged ({planned / logged - 1:+.1%})."] = None
    return list(result)


def mean_backlog_wait_s(rate: float, capacity: float, duration_s: float) -> float:
    """Mean wait in seconds of requests that arrive at `rate` during `duration_s` in a queue served at `capacity`, both
    in requests/s: one that arrives at t waits t (rate / capacity - 1)."""
    return max(rate / capacity - 1, 0.0) * duration_s / 2


def _overload_note(pair: Prediction) -> str:
    """Effect of step time errors on waiting times in overload."""
    if not pair.row.is_overloaded:
        return ""
    scenario, (measured, predicted) = _at_stage(pair), (pair.row.metrics, pair.metrics)
    (stage,) = scenario.traffic.arrivals.stages
    slots = scenario.engine.max_num_seqs
    served, expected = (slots * 1e3 / (item["e2el_mean"] - item["ttft_mean"]) for item in (measured, predicted))
    waits = [mean_backlog_wait_s(stage.rate, item, stage.duration_s) for item in (served, expected)]
    if not waits[0]:
        return ""
    return (
        f"overloaded: {pair.row.label}: all slots serve {served:.2f} requests/s as measured, {expected:.2f} "
        f"({expected / served - 1:+.1%}) as predicted, of {stage.rate:g} that arrive; what is left over waits, "
        f"which alone makes TTFT {waits[1] / waits[0] - 1:+.0%} "
        f"({predicted['ttft_mean'] / measured['ttft_mean'] - 1:+.0%} found)."
    )


# ---------------------------------------------------------------- steady states

_STEADY_METRICS = ("tpot_mean", "ttft_mean")


def _tokens(scenario: Scenario) -> str:
    lengths = scenario.traffic.input_tokens, scenario.traffic.output_tokens
    prompts, answers = ((item.high or 0) if item else 0 for item in lengths)
    return f"{prompts:,} in, {answers:,} out"


def _parallelism(pool: PoolSpec) -> str:
    engine = pool.engine
    degrees = f"TP {engine.tensor_parallel_size}, DP {engine.data_parallel_size}"
    experts = ", experts shared out" if engine.enable_expert_parallel else ""
    return f"{'' if pool.role == 'unified' else pool.role + ' '}{degrees}{experts}"


_STEADY_DIMENSIONS: Dimensions = {
    **_DEVICE,
    "engine": lambda pair: pair.row.scenario.engine.profile,
    **_MODEL,
    **_PRECISION,
    "concurrency": lambda pair: f"{pair.row.scenario.traffic.arrivals.concurrency:,}",
    "tokens": lambda pair: _tokens(pair.row.scenario),
    "parallelism": lambda pair: "; ".join(_parallelism(pool) for pool in pair.row.scenario.pools),
    "cell": lambda pair: config_key(pair.row.scenario),
    "face value": lambda pair: "yes" if pair.row.is_reliable else "no",
}


def report_steady_state(pairs: Sequence[Prediction], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """`metrics` counts reliable rows, or all if none are; `by` has all groups, and "all rows"."""
    covered = [pair for pair in pairs if not pair.reason]
    reliable = [pair for pair in covered if pair.row.is_reliable]
    counted = reliable or covered
    comparisons, counted_only = (
        [comparison_of(metric, "ms", members, _STEADY_DIMENSIONS) for metric in _STEADY_METRICS]
        for members in (covered, counted)
    )
    given = {}  # groups named by the reader
    for name in sorted({group for pair in covered for group in pair.row.groups}):
        members = [pair for pair in covered if name in pair.row.groups]
        given[name] = {metric: rows_of(metric, members).stats() for metric in _STEADY_METRICS}
    what = (
        f"{len(reliable)} of {len(covered)} rows, those with known lengths and no unlabelled MTP."
        if reliable
        else "all rows; none has known lengths and no suspicion of unlabelled MTP."
    )
    notes = [f"metrics: {what}", *_cells(counted), *_in_part(covered)]
    parts = partial(_latency_parts, counted, lambda pair: pair.row.scenario)
    groups = {"all rows": pooled(comparisons)}, given
    return report_of("steady-state", pairs, left_out, comparisons, parts, notes, counted=counted_only, groups=groups)


def _cells(pairs: Sequence[Prediction]) -> list[str]:
    """Errors by cell, each counting once: what to expect of an unmeasured cell."""
    members = grouped((config_key(pair.row.scenario), pair) for pair in pairs)
    if not members:
        return []
    result = []
    for metric in _STEADY_METRICS:
        medians = [rows_of(metric, cell).stats().median_ape for cell in members.values()]
        middle, most = np.quantile(medians, [0.5, 0.9])
        result.append(f"{metric.split('_')[0].upper()} {middle:.1%} and {most:.1%}")
    what = f"{len(members)} cells (model x engine version x device x number format)"
    return [f"by cell: median and p90 over {what} of each one's median error: {'; '.join(result)}."]


def _in_part(pairs: Sequence[Prediction]) -> list[str]:
    """Rows simulated in part, or with fewer requests than were sent."""
    sliced = sum(recorded.num_slices(pair.row.scenario) > 1 for pair in pairs)
    fewer = sum(pair.details["is_shortened"] for pair in pairs)
    what = "large disaggregated deployments: one of their equal slices was simulated, under its share of the load."
    shortened = (
        f"shortened: of {fewer} rows four or five rounds of requests were simulated instead of ten, the last but "
        f"one counting for those left out (mean TPOT within 1 %, mean TTFT within 3 % of whole runs)."
    )
    return [*([f"simulated in part: {sliced} rows are {what}"] if sliced else []), *([shortened] if fewer else [])]


# ---------------------------------------------------------------- offline jobs

_UNITS = {"throughput": "tok/s", "static_throughput": "tok/s", "ttft": "ms"}
_OFFLINE_DIMENSIONS: Dimensions = {
    **_DEVICE,
    **_MODEL,
    **_PRECISION,
    **_TENSOR_PARALLEL,
    **_labelled("tokens"),
}


def _together(pairs: Sequence[Prediction], comparison: Comparison, number: int) -> dict[str, Any]:
    return {"sizes": {"sequences together": _compared(comparison, number, pairs).details["batch"]}}


report_throughput = partial(_report, "throughput", _UNITS, _OFFLINE_DIMENSIONS, _together)

# ---------------------------------------------------------------- single requests

_REQUEST_METRICS = ("e2el", "ttft", "tpot")
_LENGTHS = (32, 128, 512, 2048)  # tokens


def validate_per_request(folder: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Simulate the run and compare single requests, and their means."""
    with TemporaryDirectory() as traces:
        log = read_request_log(folder, traces)
        pair = recorded.simulate_log(log, progress)
    times = log.requests
    assert times is not None
    assert pair.result is not None
    prompts, answers = times.num_prompt_tokens, times.num_output_tokens
    sizes = enumerate(zip(prompts.tolist(), answers.tolist(), strict=True))
    labels = [f"request {i}, {prompt} prompt tokens, {answer} output tokens" for i, (prompt, answer) in sizes]
    dimensions = {"prompt": range_names(prompts, _LENGTHS), "answer": range_names(answers, _LENGTHS)}
    setup = setup_of(log.scenario)._replace(input_tokens=float(prompts.mean()), output_tokens=float(answers.mean()))
    comparisons, means = [], {}
    for metric in _REQUEST_METRICS:
        measured_s = getattr(times, f"{metric}_s")
        rows = Rows(pair.requests[metric], measured_s, labels, None, median_of_others(measured_s, [""] * len(times)))
        comparisons.append(Comparison.of(metric, rows, "s", dimensions, [setup] * len(times)))
        name = f"{metric}_mean"
        of_means = [rows.predicted.mean()], [rows.measured.mean()], ["mean over requests"]
        means[name] = Rows(*of_means, pair.intervals.get(name)).stats()
    parts = partial(_request_parts, pair, mean_step(pair.result))
    result = report_of("per-request", [pair], (), comparisons, parts, num_worst=3)
    covered = len(pair.result.requests or ())
    return replace(result, rows=len(times), covered=covered, metrics=means | pooled(comparisons))


def _request_parts(pair: Prediction, steps: StepChoice | None, comparison: Comparison, number: int) -> dict[str, Any]:
    rows, request = comparison.rows, int(np.flatnonzero(comparison.rows.kept)[number])
    assert pair.row.requests is not None
    typical = TypicalSteps.of(pair.row.scenario, steps, int(pair.row.requests.num_prompt_tokens[request]), ServerFit())
    predicted_ms, measured_ms = 1e3 * float(rows.predicted[number]), 1e3 * float(rows.measured[number])
    ttft_ms = 1e3 * float(pair.requests["ttft"][request])
    return latency_breakdown(comparison.metric, predicted_ms, measured_ms, ttft_ms, typical)


# ---------------------------------------------------------------- energy, accepted lengths

_ENERGY_UNITS = {"itl": "ms", "tokens_per_s": "tok/s", "power": "W", "energy_per_token": "J"}
_ENERGY_DIMENSIONS: Dimensions = {
    **_DEVICE,
    **_MODEL,
    **_PRECISION,
    **_labelled("task"),
    "batch": lambda pair: f"{pair.row.scenario.engine.max_num_seqs:,}",
}
report_energy = partial(_report, "energy", _ENERGY_UNITS, _ENERGY_DIMENSIONS, lambda *_: {})


def validate_acceptance(path: str | Path, progress: Progress | None = None, group: str = "") -> ValidationReport:
    """Compare each row of accepted lengths with the committed catalog, or, left out with its `group` (of `FOLDS`), with
    laws fitted to the rest of the rows. Rows that cannot be read are listed. Raises SpecError for another kind of
    file."""
    rows, unread = read_acceptance(path)
    if group:
        folds = [(left_out, fit_laws(kept)) for left_out, kept in FOLDS[group](rows) if kept]
        pairs = [_accepted(row, laws, "left out") for left_out, laws in folds for row in left_out]
        missed = sorted({row.name for row in rows} - {pair.row.name for pair in pairs})
        unread = [*unread, *((name, f"no row is left without its {group} to fit to.") for name in missed)]
    else:
        pairs = [_accepted(row, load_catalog()) for row in rows]
    dimensions = _labelled("row", "model", "method", "mode", "dataset", "drafted tokens")
    nearest = {pair.row.setup.series: pair.details["nearest"] for pair in pairs if pair.details["nearest"]}
    notes = [f"{series}: predicted by the mean of {names}." for series, names in nearest.items()]
    return report_of("acceptance", pairs, unread, [comparison_of(LENGTH, "tokens", pairs, dimensions)], notes=notes)


def _accepted(row: Observation, catalog: AcceptanceCatalog, status: str = "") -> Prediction:
    match, depth, is_known = law_of(catalog, row), row.setup.depth, row.setup.series in catalog.laws
    if not status and is_known:
        status = "fitted" if depth <= match.law.longest else "further length"
    error = catalog.length_error if is_known else max(catalog.length_error, catalog.model_error)
    constant = match.law.model_copy(update={"decay": 1.0}).length(depth)
    return Prediction(
        replace(row, labels={**row.labels, "row": status or "not in the catalog"}, trivial={LENGTH: constant}),
        {LENGTH: match.law.length(depth)},
        intervals={LENGTH: (exp(-error), exp(error))} if error else {},
        details={"nearest": () if is_known else match.names},
    )


validate_serving = partial(
    validated, read_serving_runs, partial(recorded.simulate_runs, intervals=True), report_serving
)
validate_steady_state = partial(
    validated, read_steady_states, partial(recorded.simulate_steady_states, intervals=True), report_steady_state
)
validate_throughput = partial(validated, read_offline_runs, recorded.simulate_offline_runs, report_throughput)
validate_energy = partial(validated, read_energy_rows, predict_all, report_energy)
