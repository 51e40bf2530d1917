"""The summary of a run under the names of vLLM's `bench serve`, and ours beside them. The same for both clocks."""

__all__ = ["DeviceTotals", "costs", "summarize"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.sim.records.collector import Collector, GapHistogram
from perfmodel.sim.records.columns import RequestColumns
from perfmodel.sim.records.conversations import conversation_summary
from perfmodel.sim.records.ensemble import Ensemble
from perfmodel.sim.records.kv_waste import kv_cache_waste
from perfmodel.sim.records.latencies import (
    attained,
    finite,
    latencies,
    missed,
    num_good,
    percentiles_met,
    ratio,
    tail,
    token_latencies,
)
from perfmodel.sim.records.overload import overload
from perfmodel.sim.traffic.hashed import class_shares
from perfmodel.specs.scenario import Scenario

if TYPE_CHECKING:
    from perfmodel.sim.records.whole_runs import WholeRuns

_QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class DeviceTotals:
    """What only the driver knows about a run. Fields that a clock does not know are None.

    num_devices: of all engines together
    energy_split_j: `energy_j` by what takes it: idle, memory, compute
    bound_share: share of the busy time by what bounded it; mfu, mbu: over the whole run, per device
    pipeline_bubble_share: of the time of devices whose engine had plans under way, what they had nothing to do in; None
                 without pipeline stages
    kv_cache_usage_peak: of the engine that was fullest, a fraction
    device_s:    that devices were there, summed; num_devices over the whole run unless given
    usd_per_hour: of all devices, on the average of the run
    prompt_cost_share: of the bill, what prompts cost; the answers cost the rest
    num_rejected, num_retries: requests that the gateway refused, each time that it did, and times one was sent again
    pools, kv_transfer: a mapping for each pool where there are several, and for what was moved between them
    kv_offload: a mapping for what went to a second tier and came back
    """

    num_devices: int
    num_preemptions: int = 0
    prefix_tokens_asked: int = 0
    prefix_tokens_hit: int = 0
    energy_j: float | None = None
    energy_split_j: Mapping[str, float] | None = None
    mfu: float | None = None
    mbu: float | None = None
    bound_share: Mapping[str, float] = field(default_factory=dict)
    pipeline_bubble_share: float | None = None
    kv_cache_usage_peak: float | None = None
    device_s: float | None = None
    usd_per_hour: float | None = None
    prompt_cost_share: float | None = None
    num_rejected: int = 0
    num_retries: int = 0
    pools: Sequence[Mapping[str, Any]] = ()
    kv_transfer: Mapping[str, Any] | None = None
    kv_offload: Mapping[str, Any] | None = None


def costs(totals: DeviceTotals, duration: float, inputs: int, outputs: int) -> dict[str, Any]:
    """Cost and energy of a run of `duration` seconds that answered `inputs` tokens with `outputs`; see docs/costs.md.

    totals: device seconds, price and energy of the run

    None where there is no price, no energy, or no token to divide by.
    """
    device_s = totals.num_devices * duration if totals.device_s is None else totals.device_s
    hourly, energy, share = totals.usd_per_hour, totals.energy_j, totals.prompt_cost_share
    usd = hourly * duration / 3600 if hourly is not None else None
    of_prompts = usd * share if usd is not None and share is not None else None
    of_answers = usd - of_prompts if usd is not None and of_prompts is not None else None
    return {
        "gpu_hours": device_s / 3600,
        "mean_num_devices": ratio(device_s, duration),
        "output_throughput_per_gpu": ratio(outputs, device_s),
        "total_token_throughput_per_gpu": ratio(inputs + outputs, device_s),
        "usd_total": usd,
        "usd_per_million_tokens": _per_million(usd, inputs + outputs),
        "usd_per_million_output_tokens": ratio(hourly * duration / 3600 * 1e6, outputs) if hourly is not None else None,
        "usd_per_million_input_tokens_split": _per_million(of_prompts, inputs),
        "usd_per_million_output_tokens_split": _per_million(of_answers, outputs),
        "energy_j": energy,
        "energy_split_j": None if totals.energy_split_j is None else dict(totals.energy_split_j),
        "energy_wh": None if energy is None else energy / 3600,
        "mean_power_w": None if energy is None else ratio(energy, device_s),
        "joules_per_output_token": None if energy is None else ratio(energy, outputs),
    }


def _per_million(usd: float | None, tokens: int) -> float | None:
    return None if usd is None else ratio(usd * 1e6, tokens)


def summarize(
    scenario: Scenario,
    collector: Collector,
    totals: DeviceTotals,
    calibration: Calibration | None = None,
    ensemble: "Ensemble | WholeRuns | None" = None,
) -> dict[str, Any]:
    """The summary of a run of `scenario` as `collector` has seen it. Latencies in ms; null where there is no value.

    totals:      seconds, energy and cost of the devices
    calibration: what the times came from, for their origin
    ensemble:    the run under other factors, for the prediction intervals
    """
    requests = collector.requests()
    duration = collector.end_tick / 1e12
    inputs, outputs = int(requests.num_prompt_tokens.sum()), int(requests.num_output_tokens.sum())
    classes = _class_summaries(scenario, collector) if scenario.traffic.classes else []
    bubbles = totals.pipeline_bubble_share
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(requests),
        "failed": collector.num_lost("failed"),
        "timed_out": collector.num_lost("timed_out"),
        "rejected": totals.num_rejected,
        "retries": totals.num_retries,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": ratio(len(requests), duration),
        **_goodput(scenario, requests, classes, duration, len(collector.lost)),
        "output_throughput": ratio(outputs, duration),
        "total_token_throughput": ratio(inputs + outputs, duration),
    }
    summary |= latencies("ttft", requests.ttft_s) | latencies("tpot", requests.tpot_s)
    summary |= _gap_latencies(collector.gaps) | latencies("e2el", requests.e2el_s) | token_latencies(requests)
    summary |= percentiles_met(scenario.slo, summary, len(collector.lost))
    if scenario.traffic.is_offline and not scenario.cluster.is_disaggregated:  # else two engines have each request
        summary |= tail(requests, duration)
    summary |= costs(totals, duration, inputs, outputs)
    summary |= {
        "mean_batch": collector.mean_batch,
        "mfu": totals.mfu,
        "mbu": totals.mbu,
        "kv_cache_usage_peak": totals.kv_cache_usage_peak,
        "kv_cache_waste": kv_cache_waste(scenario, requests),
        "preemptions": totals.num_preemptions,
        "prefix_cache_hit_rate": ratio(totals.prefix_tokens_hit, totals.prefix_tokens_asked),
        **_speculation(collector),
        "bound_share": dict(totals.bound_share),
        **({} if bubbles is None else {"pipeline_bubble_share": bubbles}),
        "num_steps": collector.num_steps,
        "origin": calibration.origin if calibration else "measured",
    }
    if (overloaded := overload(scenario, requests, len(collector.lost))) is not None:
        summary["overload"] = overloaded
    if classes:
        summary["classes"] = classes
    if requests.turn is not None:
        summary["conversations"] = conversation_summary(requests)
    if totals.pools:
        summary["pools"] = [dict(pool) for pool in totals.pools]
    if totals.kv_transfer is not None:
        summary["kv_transfer"] = dict(totals.kv_transfer)
    if totals.kv_offload is not None:
        summary["kv_offload"] = dict(totals.kv_offload)
    intervals = _intervals(summary, ensemble)
    if ensemble is not None and scenario.traffic.is_offline:
        intervals["duration"] = [duration * end for end in ensemble.duration_factor()]
    return summary | {"interval": intervals}


def _speculation(collector: Collector) -> dict[str, float | None]:
    """In vLLM's terms: the share of drafted tokens that were right, and the tokens that a draft brought, with the one
    that comes in any case. Of a tree every node is a drafted token."""
    drafts, tokens, accepted = collector.num_drafts, collector.num_draft_tokens, collector.num_accepted_tokens
    return {
        "acceptance_rate": ratio(accepted, tokens),
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "num_draft_tokens": tokens,
    }


def _goodput(
    scenario: Scenario, requests: RequestColumns, classes: Sequence[Mapping[str, Any]], duration: float, num_lost: int
) -> dict[str, Any]:
    """Good requests per second, and the share of all that are, each by the limits of its class; where a class has none,
    all its answers are good."""
    if any(kind["request_goodput"] is not None for kind in classes):
        rates = [(kind["request_goodput"], kind["request_throughput"]) for kind in classes]
        rate = float(sum((total if good is None else good) or 0.0 for good, total in rates))
        return {"request_goodput": rate, "slo_attainment": ratio(rate * duration, len(requests) + num_lost)}
    misses = missed(scenario.slo, requests)
    num = num_good(misses)
    return {"request_goodput": None if num is None else ratio(num, duration), **attained(misses, num_lost)}


def _gap_latencies(gaps: GapHistogram) -> dict[str, float | None]:
    values = {"mean": gaps.mean, "median": gaps.quantile(0.5), "std": gaps.std}
    values |= {name: gaps.quantile(q) for name, q in _QUANTILES.items()}
    return {f"{statistic}_itl_ms": finite(value * 1e3) for statistic, value in values.items()}


def _intervals(summary: Mapping[str, Any], ensemble: "Ensemble | WholeRuns | None") -> dict[str, list[float]]:
    """80 % prediction intervals of the means, in ms; none of what has no mean, or was measured."""
    factors = {} if ensemble is None else ensemble.factors()
    named = {f"mean_{metric}_ms": ends for metric, ends in factors.items()}
    means = {name: summary[name] for name in named if summary[name] is not None}
    return {name: [mean * named[name][0], mean * named[name][1]] for name, mean in means.items()}


def _class_summaries(scenario: Scenario, collector: Collector) -> list[dict[str, Any]]:
    """What became of the requests of each class; latencies of those that were completed."""
    shares, requests = class_shares(scenario), collector.requests()
    done = shares.of_all(requests.request_id)
    lost = [(shares.of(number), fate) for number, fate in collector.lost]
    duration = collector.end_tick / 1e12
    rows = []
    for number, kind in enumerate(scenario.traffic.classes):
        mine = requests.some(np.flatnonzero(done == number))
        misses = missed(kind.slo or scenario.slo, mine)
        good = num_good(misses)
        fates = [fate for of, fate in lost if of == number]
        row = {
            "name": kind.name,
            "priority": kind.priority,
            "completed": len(mine),
            "failed": fates.count("failed"),
            "timed_out": fates.count("timed_out"),
            "request_throughput": ratio(len(mine), duration),
            "request_goodput": None if good is None else ratio(good, duration),
            **attained(misses, len(fates)),
            **latencies("ttft", mine.ttft_s),
            **latencies("tpot", mine.tpot_s),
            **latencies("e2el", mine.e2el_s),
            **token_latencies(mine),
        }
        rows.append(row | percentiles_met(kind.slo or scenario.slo, row, len(fates)))
    return rows
