"""The summary of a run under the names of vLLM's `bench serve`, and ours beside them. The same for both clocks.

How much of the KV memory that requests hold is empty: the rest of a last block, or of a reservation.

Over the steps in which requests decode, of requests that hold h(n) slots with n tokens in the cache:

    waste = 1 - sum over requests and steps of min(n, span) / sum of h(n)

    paged        h = ceil(min(n, span) / block) block      half a block of a sequence on average
    groups       h = ceil(min(n, span) / block) block, and a row more for a window, in each group of layers
    contiguous   h = max_model_len, or prompt + answer - 1 where that is reserved (or the answer's next power of two)

Buffers for newer tokens in wider formats (`Surplus`) are slots, too, in tokens of the oldest format. Shared blocks
count for each request that holds them. Not counted: what a request of a static batch still holds when its own answer
is complete, room that no request holds, and pieces between reservations that are too short for the next.
Source: Kwon et al. 2023 (PagedAttention), section 3.1.

Whether more requests came than were served, and about how many would have been: what a run's latencies hide.

Beyond what a system sustains, a queue grows as long as requests come, and a request that arrives at t waits

    TTFT(t) = TTFT(0) + (offered / sustained - 1) t

so that latencies are a matter of how long the run was. The slope of TTFT over arrivals gives what is sustained.

What became of conversations: latencies turn by turn, and each conversation as its user had it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.memory.groups import kv_groups
from perfmodel.engine.admission import DISCIPLINES
from perfmodel.kv_groups import KVGroup
from perfmodel.models.number_formats import kv_element_bytes, kv_surplus, surplus_tokens
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.sim.records.collector import Collector, GapHistogram
from perfmodel.sim.records.columns import (
    RequestColumns,
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
from perfmodel.sim.records.ensemble import Ensemble
from perfmodel.sim.traffic.distributions import class_shares
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario

Floats = NDArray[np.float64]


def kv_cache_waste(scenario: Scenario, requests: RequestColumns) -> float | None:
    """The share of held slots that are empty; None where nothing is held."""
    engine, model = scenario.engine, served_model(scenario.model, scenario.engine)
    if engine.kv_cache == "off" or not len(requests):
        return None
    prompts = requests.num_prompt_tokens.astype(np.float64)
    last = prompts + requests.num_output_tokens - 1  # the last token sampled is never computed
    span = np.full_like(prompts, model.rolling_span or np.inf)
    steps = requests.num_output_tokens.astype(np.float64)
    filled = _sum_min(prompts, last, span) + _sum_surplus(model, prompts, last)
    reserved = _reserved(engine, prompts, steps, scenario)
    block = engine.block_size
    groups = kv_groups(scenario.model, scenario.hardware, engine)
    if groups:
        return _waste_of_groups(groups, prompts, last, block)
    if reserved is None:
        held = block * _sum_blocks(prompts, last, np.ceil(span / block), block)
    else:
        held = steps * block * np.minimum(np.ceil(reserved / block), np.ceil(span / block))
    held = held + steps * block * ceil(surplus_tokens(model) / block)
    total = float(held.sum())
    return max(1.0 - float(filled.sum()) / total, 0.0) if total else None


def _waste_of_groups(groups: Sequence[KVGroup], prompts: Floats, last: Floats, block: int) -> float:
    """The same in slots of one token in one layer, over groups of layers; a block has room for the largest group's.

    prompts, last: tokens of each request when its first and its last token are sampled; block: tokens of a block
    """
    size, filled, held = max(group.num_layers for group in groups), 0.0, 0.0
    for group in groups:
        span = np.full_like(prompts, group.span or np.inf)
        most = np.full_like(prompts, np.inf if group.span is None else group.most_kept(block))
        filled += group.num_layers * float(_sum_min(prompts, last, span).sum())
        held += size * block * float(_sum_blocks(prompts, last, most, block).sum())
    return max(1.0 - filled / held, 0.0)


def _reserved(engine: EngineSpec, prompts: Floats, outputs: Floats, scenario: Scenario) -> Floats | None:
    """Tokens that each request has room for from its beginning; None if as many as it has."""
    longest = float(engine.max_model_len or scenario.model.max_position_embeddings)
    is_contiguous = engine.kv_cache == "contiguous"
    takes_all = DISCIPLINES[engine.batching].reserves_all
    knows = bool(engine.reserve_output) if is_contiguous else engine.rules.reserves_output
    if knows and (is_contiguous or not takes_all):
        if engine.reserve_output == "pow2":
            outputs = 2 ** np.ceil(np.log2(outputs))
        return np.minimum(prompts + outputs - 1, longest)
    return np.full_like(prompts, longest) if is_contiguous or takes_all else None


def _sum_min(first: Floats, last: Floats, most: Floats) -> Floats:
    """Sum of min(n, most) for n = first ... last."""
    cut = np.clip(np.where(np.isinf(most), last, most), first - 1, last)
    below: Floats = (cut - first + 1) * (first + cut) / 2
    above = np.where(cut < last, (last - cut) * np.where(np.isinf(most), 0.0, most), 0.0)
    return below + above


def _sum_surplus(model: ModelSpec, first: Floats, last: Floats) -> Floats:
    """What newer tokens fill beyond one slot each."""
    quantization, total = model.quantization, np.zeros_like(first)
    each = kv_element_bytes(quantization.kv_cache or model.dtype, quantization.kv_group_size)
    for tier in kv_surplus(model):
        total += tier.num_bytes / each * _sum_min(first, last, np.full_like(first, tier.tokens))
    return total


def _sum_blocks(first: Floats, last: Floats, most: Floats, block: int) -> Floats:
    """Sum of min(ceil(n / block), most) for n = first ... last."""
    cut = np.minimum(last, np.where(np.isinf(most), last, np.maximum(most * block, first - 1)))
    below: Floats = _blocks_upto(cut, block) - _blocks_upto(first - 1, block)
    return below + np.where(cut < last, (last - cut) * np.where(np.isinf(most), 0.0, most), 0.0)


def _blocks_upto(last: Floats, block: int) -> Floats:
    """Sum of ceil(n / block) for n = 1 ... last."""
    whole, rest = np.divmod(last, block)
    total: Floats = block * whole * (whole + 1) / 2 + rest * (whole + 1)
    return total


_FEWEST = 40  # requests, in four quarters
_LEAST_SLOPE = 0.1  # seconds of TTFT per second of arrivals: a tenth more than is sustained
_LEAST_GROWTH = 3.0  # of the mean TTFT from the first quarter to the last
_MANY_LOST = 0.1  # of the requests


def overload(scenario: Scenario, requests: RequestColumns, num_lost: int) -> dict[str, float] | None:
    """Requests per second that were offered, and that are sustained at about; None where they were served as they came.

    Of stages, those of the highest rate count. Closed loops and bursts offer no rate.

    num_lost: requests that were refused, gave up or failed
    """
    arrivals = scenario.traffic.arrivals
    if arrivals.process in ("closed_loop", "burst"):
        return None
    order = np.argsort(requests.arrival_s, kind="stable")
    times, ttft = requests.arrival_s[order], requests.ttft_s[order]
    inside = _busiest(scenario, times)
    times, ttft = times[inside], ttft[inside]
    if len(times) < _FEWEST or times[-1] <= times[0]:
        return None
    span = float(times[-1] - times[0])
    given = max((stage.rate for stage in arrivals.stages), default=arrivals.rate)
    rate = given or (len(times) + num_lost) / span
    slope = _growth(times, ttft)
    if slope > _LEAST_SLOPE:
        return {"offered_req_s": rate, "sustained_req_s": len(times) / span / (1 + slope)}
    if num_lost > _MANY_LOST * (num_lost + len(requests)) and not arrivals.stages:
        return {"offered_req_s": rate, "sustained_req_s": len(times) / span}
    return None


def _busiest(scenario: Scenario, times: Floats) -> slice:
    """The arrivals of the stage with the highest rate; all without stages."""
    stages = scenario.traffic.arrivals.stages
    if not stages:
        return slice(None)
    ends = np.cumsum([stage.duration_s for stage in stages])
    number = max(range(len(stages)), key=lambda each: stages[each].rate)
    start, end = ends[number] - stages[number].duration_s, ends[number]
    return slice(int(np.searchsorted(times, start)), int(np.searchsorted(times, end)))


def _growth(times: Floats, ttft: Floats) -> float:
    """The slope of TTFT over arrivals from the second quarter to the last, the first left for the system to fill; 0
    unless it grows from quarter to quarter."""
    quarters = [float(part.mean()) for part in np.array_split(ttft, 4)]
    middles = [float(part.mean()) for part in np.array_split(times, 4)]
    grows = quarters[1] < quarters[2] < quarters[3] and quarters[3] > _LEAST_GROWTH * quarters[0]
    return (quarters[3] - quarters[1]) / (middles[3] - middles[1]) if grows else 0.0


_MOST_TURNS = 10  # that get a line of their own; those beyond share one


def conversation_summary(requests: RequestColumns) -> dict[str, Any]:
    """`conversations` of the summary: how many began and how many turns they came to; `duration`, from a conversation's
    first turn to its last answer, and `waiting`, the part of it in which an answer was on its way (mean, p99 ..., in
    ms); and `turns`, each with its requests, latencies and the share of its prompts that was cached.
    """
    assert requests.session is not None
    assert requests.turn is not None
    _, numbers = np.unique(requests.session, return_inverse=True)
    count = int(numbers.max()) + 1 if len(numbers) else 0
    begun, ended = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(begun, numbers, requests.arrival_s)
    np.maximum.at(ended, numbers, requests.finished_s)
    waiting = np.zeros(count)
    np.add.at(waiting, numbers, requests.e2el_s)
    last = int(requests.turn.max(initial=-1))
    masks = {str(turn + 1): requests.turn == turn for turn in range(min(last + 1, _MOST_TURNS))}
    if last >= _MOST_TURNS:
        masks[f"from {_MOST_TURNS + 1} on"] = requests.turn >= _MOST_TURNS
    return {
        "conversations": count,
        "mean_turns": ratio(len(requests), count),
        **latencies("duration", ended - begun),
        **latencies("waiting", waiting),
        "turns": [_turn(name, requests, mask) for name, mask in masks.items()],
    }


def _turn(name: str, requests: RequestColumns, mask: NDArray[np.bool_]) -> dict[str, Any]:
    mine = requests.some(np.flatnonzero(mask))
    ttft, tpot = latencies("ttft", mine.ttft_s), latencies("tpot", mine.tpot_s)
    prompts = int(mine.num_prompt_tokens.sum())
    return {
        "turn": name,
        "requests": len(mine),
        "mean_prompt_tokens": ratio(prompts, len(mine)),
        "cached_share": ratio(int(mine.num_cached_tokens.sum()), prompts),
        **{key: ttft[key] for key in ("mean_ttft_ms", "p99_ttft_ms")},
        "mean_tpot_ms": tpot["mean_tpot_ms"],
    }


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
