"""A run as a document: latencies, throughput, efficiency, cost, what bounded its time, where its numbers come from."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.cost.power import load_power_fit
from perfmodel.planning.metrics import LATENCIES, STATISTICS, metric_of
from perfmodel.planning.typical_step import StepReport
from perfmodel.report import document as doc
from perfmodel.report.document import Block, Details, Document, Fact, Line, Paragraph, Plot, Span, Table, Tile, Tiles
from perfmodel.report.numbers import MISSING, format_in, format_number, format_optional, is_number
from perfmodel.report.plots.run import pool_names
from perfmodel.report.views import scenario as facts
from perfmodel.report.views.scenario import MORE, describe_traffic, few_notes, hardware_source, headline, scenario_facts
from perfmodel.report.views.step import bound_shares, step_blocks
from perfmodel.sim.records.columns import Bools, RequestColumns, missed
from perfmodel.sim.records.result import RunResult
from perfmodel.sim.traffic.distributions import class_shares
from perfmodel.specs.scenario import price_lines

if TYPE_CHECKING:
    from perfmodel.evidence.executed.compare import RunComparison

_DEFINITIONS = (
    "TTFT: from arrival to the first output token, queueing included. TPOT: (E2E - TTFT) / (output tokens - 1), "
    "requests of one output token have none. ITL: gap between consecutive tokens of a request. "
    "E2E: from arrival to the last token. The names are those of vLLM's bench serve."
)
_GROUPS = {  # heading -> keys of the summary
    "Requests": "completed failed timed_out rejected retries duration total_input_tokens total_output_tokens",
    "Throughput": "request_throughput request_goodput slo_attainment output_throughput total_token_throughput "
    "output_throughput_per_gpu",
    "Offline job": "tail_s tail_share",
    "Rollouts": "iteration_s rollout_s slowest_tenth_share idle_share update_share",
    "Efficiency": "mfu mbu kv_cache_usage_peak pipeline_bubble_share kv_cache_waste prefix_cache_hit_rate "
    "acceptance_rate mean_acceptance_length preemptions",
    "Cost and energy": "gpu_hours usd_total usd_per_million_tokens usd_per_million_output_tokens "
    "usd_per_million_input_tokens_split usd_per_million_output_tokens_split energy_j mean_power_w "
    "usd_per_million_cached_input_tokens_split usd_per_million_computed_input_tokens_split "
    "joules_per_output_token site_joules_per_output_token gco2_per_million_output_tokens gco2_per_million_tokens",
}
_RARE = ("timed_out", "rejected", "retries")  # shown where they are not 0
_ALWAYS = ("ttft", "tpot", "itl", "e2el")
_OF_GROUPS = (
    *("completed", "failed", "timed_out", "request_goodput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
    *("p99_e2el_ms", "busy_share", "replicas_peak", "failures", "gpu_hours", "usd_total"),
)
_OF_CONVERSATIONS = ("mean_duration", "p99_duration", "mean_waiting", "p99_waiting")


def run_view(result: RunResult, step: StepReport | None = None, comparison: "RunComparison | None" = None) -> Document:
    """The whole answer of `simulate` and `execute`. step: the one that a page draws on the roofline; comparison: the
    prediction of an executed run"""
    scenario, summary = result.scenario, result.summary
    blocks: list[Block] = [
        *overload(summary),
        Paragraph(Span(f"{describe_traffic(scenario.traffic)}, seed {scenario.seed}", "muted")),
        Details([_tiles(result), scenario_facts(scenario, "What was run")]),
        doc.Facts("Summary", list(_summary(summary))),
        *slo_verdict(result),
        latency_table(result),
        *comparison_blocks(comparison),
        *_group_tables(summary),
        *conversation_tables(summary),
        *shares(summary),
        Details(
            [
                *_plots(result),
                *(_plots(comparison.simulated, "Predicted: ") if comparison is not None else ()),
                *(step_blocks(step) if step is not None else ()),
            ]
        ),
        Paragraph(("Origin of step times: ", Span(str(summary.get("origin") or MISSING), "strong"))),
        *facts.trust_blocks(result.trust),
        *alternatives_table(summary),
        *map(Paragraph, price_lines(scenario)),
        Details([doc.Sentences([_origin(result), hardware_source(scenario)], "Where the numbers come from")]),
        doc.Notes(result.notes),
    ]
    return Document(scenario.name, blocks, f"{headline(scenario)}, {result.clock}", result.clock)


def comparison_blocks(comparison: "RunComparison | None") -> Iterator[Block]:
    """Predicted vs measured means of an executed run, and the step with the largest miss."""
    if comparison is None:
        return
    rows: list[list[Line]] = []
    for name, (predicted, measured, of_what) in comparison.means.items():
        error = f"{predicted / measured - 1:+.1%}" if measured else MISSING
        figures = [format_number(1e3 * predicted), format_number(1e3 * measured), error]
        rows.append([Span(name, "strong"), *figures, of_what if "step" in name else ""])
    yield Table(["", "predicted", "measured", "off by", ""], rows, "Predicted and measured (ms)")
    if comparison.worst:
        yield Paragraph(comparison.worst)
    if comparison.simulated.summary.get("origin") == "datasheet":
        yield Paragraph("Predicted from the datasheet alone: `perfmodel calibrate` fits this machine's steps first.")


def overload(summary: Mapping[str, Any]) -> Iterator[Paragraph]:
    """The first sentence of an answer whose latencies say how long the run was."""
    if rates := summary.get("overload"):
        offered, sustained = (f"{rates[name]:.3g}" for name in ("offered_req_s", "sustained_req_s"))
        text = f"Overloaded: offered {offered} req/s, sustains about {sustained}; latencies grow with the run."
        lost = "failed" if summary.get("failed") else "timed_out" if summary.get("timed_out") else ""
        if lost:
            text = f"Overloaded: offered {offered} req/s, answers about {sustained}; the others fail or wait in vain."
        yield Paragraph(Span(text, "bad"))


def _tiles(result: RunResult) -> Tiles:
    summary = result.summary
    tiles = []
    for name in ("ttft", "tpot", "e2el"):
        p99, verdict = f"p99 {_short(summary.get(f'p99_{name}_ms'))} ms", _slo_cell(result, name)
        aside = Span(f"{p99}, SLO {verdict.text}" if verdict.text else p99, verdict.tone)
        tiles.append(Tile(f"mean {LATENCIES[name][0]}", _short(summary.get(f"mean_{name}_ms")), "ms", aside))
    goodput, requests = summary.get("request_goodput"), summary.get("request_throughput")
    within = f"{goodput / requests:.1%} within the SLO" if goodput is not None and requests else ""
    if (output := summary.get("output_throughput")) is not None:
        tiles.append(Tile("output", _short(output), "tok/s"))
    else:
        tiles.append(Tile("input", _short(summary.get("total_token_throughput")), "tok/s"))
    tiles.append(Tile("requests", _short(requests), "per s", Span(within)))
    cost = summary.get("usd_per_million_output_tokens")
    if cost is not None:
        tiles.append(Tile("cost", f"{cost:,.2f}", "USD", Span("per million output tokens")))
    return Tiles(tiles)


def _short(value: Any) -> str:
    """Three significant digits, as large numbers are read at a glance."""
    size = abs(value) if is_number(value) else 0
    return format_number(value, 0 if size >= 100 else 1 if size >= 10 else 2)


def _summary(summary: Mapping[str, Any]) -> Iterator[tuple[str, list[Fact]]]:
    """Groups of what the summary has a value of."""
    for group, keys in _GROUPS.items():
        present = [key for key in keys.split() if summary.get(key) is not None]
        shown = [key for key in present if not (key in _RARE and summary[key] == 0)]
        metrics = map(metric_of, shown)
        facts = [Fact(metric.name, format_in(summary, metric), metric.unit) for metric in metrics]
        if facts:
            yield group, facts


def latency_table(result: RunResult, statistics: Sequence[str] = STATISTICS) -> Table:
    """By statistic, in ms, with the share of requests within the SLO where there is one."""
    summary, slo = result.summary, result.scenario.slo
    names = [name for name in LATENCIES if name in _ALWAYS or f"mean_{name}_ms" in summary]
    intervals = {name: (summary.get("interval") or {}).get(f"mean_{name}_ms") or () for name in names}
    has_interval = any(intervals.values())
    head = ["", *statistics, *(["80 % interval of mean"] * has_interval), *(["SLO"] * slo.is_given)]
    rows: list[list[Line]] = []
    for name in names:
        row: list[Line] = [Span(LATENCIES[name][0], "strong")]
        row += [format_number(summary.get(f"{statistic}_{name}_ms")) for statistic in statistics]
        row += [" to ".join(map(format_number, intervals[name]))] * has_interval
        row += [_slo_cell(result, name)] * slo.is_given
        rows.append(row)
    return Table(head, rows, "Latency (ms)", note=_DEFINITIONS)


def _slo_cell(result: RunResult, name: str) -> Span:
    """The share of requests within the per-request limit, good at the target attainment, and whether the limits on the
    mean and on percentiles are met: `150: 94.0% met, 1000 p99 ok`."""
    summary, slo = result.summary, result.scenario.slo
    share, limit = (summary.get("slo_attainment_by") or {}).get(name), slo.limit_ms(name)
    texts, is_good = [], True
    if share is not None:
        texts.append(f"{'' if limit is None else f'{limit:g}: '}{share:.1%} met")
        is_good = share >= result.scenario.attainment
    for limited in slo.statistics:
        is_met = (summary.get("slo_percentiles_met") or {}).get(limited.field)
        if limited.latency == name:
            texts.append(f"{limited.limit_ms:g} {limited.statistic} {'ok' if is_met else 'over'}")
            is_good = is_good and bool(is_met)
    return Span(", ".join(texts), ("good" if is_good else "bad") if texts else "")


def slo_verdict(result: RunResult) -> Iterator[Paragraph]:
    """Whether the run meets its SLO: the share of requests within all per-request limits, then every limited mean and
    percentile with its limit."""
    scenario, summary, verdict = result.scenario, result.summary, result.slo
    if verdict is None:
        return
    parts, limits = [], " and ".join(scenario.slo.request_limits_in_words)
    if limits:
        limits = "the limits of their classes" if any(item.slo for item in scenario.traffic.classes) else limits
        share = format_number(100 * (summary.get("slo_attainment") or 0.0), 1)
        parts.append(f"{share}% of requests meet {limits}, {scenario.attainment:.0%} wanted")
    for limited in scenario.slo.statistics:
        value = format_number(summary.get(limited.metric))
        parts.append(f"{limited.in_words} {value} ms, limit {limited.limit_ms:,g} ms")
    state = "met" if verdict["is_met"] else "missed"
    yield Paragraph((Span(f"SLO {state}", "good" if verdict["is_met"] else "bad"), f": {'; '.join(parts)}."))


def _group_tables(summary: Mapping[str, Any]) -> Iterator[Table]:
    """A table of the pools and one of the priority classes, where there are several."""
    for key, title in (("pools", "Pools"), ("classes", "Classes")):
        groups: Sequence[Mapping[str, Any]] = summary.get(key) or ()
        metrics = [metric_of(name) for name in _OF_GROUPS if any(group.get(name) is not None for group in groups)]
        rows = [
            (name, *(format_in(group, metric) for metric in metrics))
            for name, group in zip(pool_names(groups), groups, strict=True)
        ]
        if rows:
            yield Table(("", *(metric.title for metric in metrics)), rows, title)


def conversation_tables(summary: Mapping[str, Any]) -> Iterator[Table]:
    """Turn by turn, where the requests of a run's `summary` are turns."""
    talks = summary.get("conversations")
    if talks is None:
        return
    rows = []
    for turn in talks["turns"]:
        cached = None if turn["cached_share"] is None else 100 * turn["cached_share"]
        sizes = [format_optional(turn["mean_prompt_tokens"], ",.0f"), format_optional(cached, ".1f")]
        times = (format_optional(turn[name], ",.1f") for name in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"))
        if (ideal := turn.get("ideal_cached_share")) is not None:
            sizes.append(f"{100 * ideal:.1f}")
        rows.append((turn["turn"], f"{turn['requests']:,}", *sizes, *times))
    head: tuple[str, ...] = (
        "turn",
        "requests",
        "prompt tokens",
        "cached (%)",
        "mean TTFT (ms)",
        "p99 TTFT (ms)",
        "mean TPOT (ms)",
    )
    if "ideal_cached_share" in talks:
        head = (*head[:4], "ideal (%)", *head[4:])
    times_ms = {name: talks[f"{name}_ms"] for name in _OF_CONVERSATIONS}
    of_user = {name: format_optional(None if ms is None else ms / 1e3, ",.1f") for name, ms in times_ms.items()}
    note = (
        f"{talks['conversations']:,} conversations of {format_optional(talks['mean_turns'], '.1f')} turns; each lasts "
        f"{of_user['mean_duration']} s (p99 {of_user['p99_duration']} s), of which its user waits for answers "
        f"{of_user['mean_waiting']} s (p99 {of_user['p99_waiting']} s)."
    )
    yield Table(head, rows, "Turns of conversations", note=note)


def alternatives_table(summary: Mapping[str, Any]) -> Iterator[Table]:
    """What renting, owning and an API cost at a run's traffic, with their break-even points."""
    ways = {"rented": ("rent", "usd"), "owned": ("own", "own_usd"), "API": ("api", "api_usd")}
    rows = [
        (name, *(format_number(summary[key], 3) for key in (f"{way}_usd_per_hour", f"{usd}_per_million_tokens")))
        for name, (way, usd) in ways.items()
        if summary.get(f"{way}_usd_per_hour") is not None
    ]
    if sentences := list(alternatives_sentences(summary)):
        yield Table(("", "USD an hour", "USD per million tokens"), rows, "Rent, own or API", note=" ".join(sentences))


def alternatives_sentences(figures: Mapping[str, float | None]) -> Iterator[str]:
    """USD per hour of a deployment rented, owned and from an API, and from which use on which is cheaper."""
    rent, own, api = (figures.get(f"{way}_usd_per_hour") for way in ("rent", "own", "api"))
    if own is None and api is None:
        return
    costs = {"rented": rent, "owned": own, "from the API": api}
    yield f"Per hour: {', '.join(f'{usd:.4g} USD {way}' for way, usd in costs.items() if usd is not None)}."
    share, rate = figures.get("rent_api_break_even_share"), figures.get("rent_api_break_even_req_s")
    if share is not None and rate is not None:
        beyond = ", more than this traffic: simulate whether it serves them" if share > 1 else ""
        yield f"Rented devices kept all hours are cheaper than the API from {rate:.3g} requests/s on{beyond}."
    for other, hourly in (("rent", rent), ("api", api)):
        if own is None or hourly is None:
            continue
        what, share = {"rent": "renting", "api": "the API"}[other], figures.get(f"own_{other}_break_even_share")
        if share is None or share > 1:
            yield f"Owning is not cheaper than {what}, even with this traffic at all hours."
        else:
            yield f"Owning is cheaper than {what} for the hours in use, where these are more than {share:.0%} of all."


def shares(summary: Mapping[str, Any]) -> Iterator[Paragraph]:
    if shares := summary.get("bound_share"):
        yield Paragraph(("Time bound by: ", *bound_shares(shares)))
    if split := summary.get("energy_split_j"):
        taken = {name: joules / sum(split.values()) for name, joules in split.items()}
        yield Paragraph(("Energy taken by: ", *bound_shares(taken)))


def _plots(result: RunResult, before: str = "") -> Iterator[Plot]:
    """before: what titles begin with"""
    from perfmodel.report.plots.run import MAX_BINS, MAX_POINTS

    requests, steps = result.requests, result.steps
    if requests is not None and len(requests):
        note = f"Share of {len(requests):,} requests at or below each latency."
        if len(requests) > MAX_POINTS:
            note += f" Drawn through {MAX_POINTS} of them, evenly spaced in rank, the extremes included."
        yield doc.named_plot(
            f"{before}Latency distributions", "run.latency_figure", note, requests, result.scenario.slo
        )
    pools = result.summary.get("pools") or ()
    if pools:
        yield from _fleet_plots(result, pools)
    if steps is not None and len(steps):
        binned = f"Means over at most {MAX_BINS} equal intervals; {len(steps):,} step records in all."
        banded = f"{binned} Shaded: from minimum to maximum of an interval."
        yield doc.named_plot(f"{before}Tokens per second", "run.throughput_figure", binned, steps)
        if not pools:
            yield doc.named_plot(
                f"{before}Requests in the system", "run.load_figure", f"All replicas together. {banded}", steps
            )
        if result.num_blocks:
            note = banded if len({*steps.replica.tolist()}) == 1 else binned
            yield doc.named_plot(f"{before}KV cache in use", "run.kv_figure", note, steps, result.num_blocks, pools)
    if any(alternatives_sentences(result.summary)):
        note = "Share of hours that have this traffic; the others have none. Dotted: rented devices that are kept."
        yield doc.named_plot(f"{before}Cost by utilisation", "run.utilisation_figure", note, result.summary)
    if shares := result.summary.get("bound_share"):
        yield doc.named_plot(f"{before}What bounded the time", "run.bound_figure", "", shares)


def _fleet_plots(result: RunResult, pools: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    """What a fleet did: its replicas, the load of its pools, what each costs, and the classes of its requests."""
    requests, steps = result.requests, result.steps
    if any(pool.get("replicas_over_time") for pool in pools):
        note = "Replicas that serve, by pool; dotted with those that are starting and paid for; a cross is a failure."
        yield doc.named_plot("Replicas over time", "run.replicas_figure", note, pools, result.summary["duration"])
        is_good = None if requests is None or not len(requests) else _within_slo(result, requests)
        if requests is not None and is_good is not None:
            note, end_s = "Answered requests by when they arrived, in 60 equal intervals.", result.summary["duration"]
            yield doc.named_plot(
                "Requests within the SLO", "run.attainment_figure", note, requests.arrival_s, is_good, end_s
            )
    if steps is not None and len(steps):
        note = "Means over equal intervals, all engines of a pool together."
        yield doc.named_plot("Requests in each pool", "run.pool_load_figure", note, steps, pools)
    if all(pool.get("usd_total") is not None for pool in pools):
        note = "Replicas are paid for from the beginning of their start until they stop or fail."
        yield doc.named_plot("Cost by pool", "run.pool_costs_figure", note, pools)
    kinds = result.scenario.traffic.classes
    if kinds and requests is not None and len(requests):
        of_all = class_shares(result.scenario).of_all(requests.request_id)
        ttft = {kind.name: requests.ttft_s[of_all == number] * 1e3 for number, kind in enumerate(kinds)}
        limits = {kind.name: (kind.slo or result.scenario.slo).limit_ms("ttft") for kind in kinds}
        yield doc.named_plot("TTFT by class", "run.classes_figure", "", ttft, limits)


def _within_slo(result: RunResult, requests: RequestColumns) -> Bools | None:
    """Mask of requests within their class's limits; None without limits."""
    slo, kinds = result.scenario.slo, result.scenario.traffic.classes
    limits = [kind.slo or slo for kind in kinds] or [slo]
    of_all = class_shares(result.scenario).of_all(requests.request_id) if kinds else np.zeros(len(requests), np.int64)
    masks = [missed(limit, requests) for limit in limits]
    if not any(masks):
        return None
    good: Bools = np.ones(len(requests), np.bool_)
    for number, by_limit in enumerate(masks):
        for mask in by_limit.values():
            good &= (of_all != number) | ~mask
    return good


def _origin(result: RunResult) -> str:
    if result.clock == "executed":
        return "Step times: measured while the model ran on this machine, on a clock that counts those times alone."
    if result.summary.get("origin") == "calibrated":
        own = result.scenario.engine.calibration
        profile = result.scenario.engine.profile if own is None else pathlib.Path(own).stem.partition("@")[2]
        return f"Step times: predicted by a calibration fitted to measurements (profile {profile!r})."
    return "Step times: predicted from the datasheet alone; no measurement of this device was used."


_BRIEF_STATISTICS = ("mean", "median", "p90", "p99")
_LINES = {  # of a run: what stands on one line -> metrics and what they read as
    "Throughput": {
        "output_throughput": "{} output tok/s",
        "output_throughput_per_gpu": "{} a device",
        "request_throughput": "{} req/s",
        "request_goodput": "{} within the SLO",
    },
    "Efficiency": {
        "mean_batch": "mean batch {}",
        "mfu": "MFU {} %",
        "mbu": "MBU {} %",
        "kv_cache_usage_peak": "KV cache at most {} % full",
        "prefix_cache_hit_rate": "prefix cache hits {} %",
        "preemptions": "{} preemptions",
    },
    "Speculation": {"acceptance_rate": "{} % of drafts accepted", "mean_acceptance_length": "{} tokens a step"},
    "Offline job": {"tail_s": "tail of {} s", "tail_share": "{} % of the run"},
    "Rollouts": {
        "iteration_s": "{} s an iteration",
        "rollout_s": "{} s of it rollout",
        "slowest_tenth_share": "{} % of that for the slowest tenth of the answers",
        "idle_share": "{} % of the engines' time idle",
    },
    "Cost": {
        "usd_per_million_output_tokens": "{} USD per million output tokens",
        "usd_per_million_tokens": "{} per million of all",
        "usd_total": "{} in all",
    },
    "Energy": {"mean_power_w": "{} W a device", "joules_per_output_token": "{} J per output token"},
    "Site": {
        "site_joules_per_output_token": "{} J per output token with servers and cooling",
        "gco2_per_million_output_tokens": "{} g CO2 per million output tokens",
    },
}

_OF_INPUT: Mapping[str, Mapping[str, str]] = {  # of a run without output tokens
    "Throughput": {"total_token_throughput": "{} input tok/s", "total_token_throughput_per_gpu": "{} a device"},
    "Cost": {"usd_per_million_tokens": "{} USD per million input tokens"},
}


def run_brief(result: RunResult, comparison: "RunComparison | None" = None) -> Document:
    """A run in some thirty lines; `run_view` has all of it. comparison: with the prediction of an executed run"""
    scenario, summary = result.scenario, result.summary
    further = "`plan` how many GPUs serve it" if scenario.traffic.beam_width == 1 else "`whatif` what makes it faster"
    blocks: list[Block] = [
        *overload(summary),
        Paragraph(Span(_served(result), "strong")),
        *slo_verdict(result),
        latency_table(result, _BRIEF_STATISTICS),
        *comparison_blocks(comparison),
        doc.Sentences([line for name, texts in _LINES.items() if (line := _figures(name, texts, summary))]),
        *map(Paragraph, alternatives_sentences(summary)),
        *shares(summary),
        *facts.trust_line(result.trust),
        *few_notes(result.notes),
        Paragraph(f"Next: `perfmodel explain` says what a step takes, {further}. {MORE}, --out DIR."),
    ]
    title = f"{scenario.name}: {headline(scenario)}, {result.clock}"
    return Document(title, blocks, f"{describe_traffic(scenario.traffic)}, seed {scenario.seed}", result.clock)


def _served(result: RunResult) -> str:
    """`1,000 requests answered in 248 s, 2 failed`; where classes alone have limits, the share within them, too."""
    summary = result.summary
    text = f"{summary.get('completed', 0):,} requests answered in {format_number(summary.get('duration'))} s"
    if result.slo is None and (attained := summary.get("slo_attainment")) is not None:
        text += f", {attained:.1%} of all within the SLO"
    kinds = [key for key in ("failed", "timed_out", "rejected") if summary.get(key)]
    return ", ".join([text, *(f"{summary[key]:,} {key.replace('_', ' ')}" for key in kinds)]) + "."


def _figures(name: str, texts: Mapping[str, str], summary: Mapping[str, Any]) -> str:
    """The figures of a line; nothing without any. A run without output tokens has those of its input instead."""
    if summary.get("output_throughput") is None:
        texts = {**_OF_INPUT.get(name, {}), **texts, **_OF_INPUT.get(name, {})}
    shown = {key: text for key, text in texts.items() if summary.get(key) is not None}
    parts = [text.format(format_in(summary, metric_of(key))) for key, text in shown.items()]
    joules = summary.get("joules_per_output_token")
    if name == "Energy" and joules and summary.get("energy_split_j"):  # modelled, not read from a sensor
        power = load_power_fit().residuals
        low, high = (format_number(joules * exp(end)) for end in (power.p10, power.p90))
        parts.append(f"80 % interval {low} to {high}; devices alone; `site` adds hosts and cooling")
    return f"{name}: {', '.join(parts)}." if parts else ""
