"""Summary of a run in vLLM's `bench serve` names plus ours; the same for both clocks.

KV waste: the empty share of the KV slots held by decoding requests, over steps (Kwon et al. 2023, PagedAttention,
section 3.1), where a request with n cached tokens holds h(n) slots:

    waste = 1 - sum over requests and steps of min(n, span) / sum of h(n)

    paged        h = ceil(min(n, span) / block) block      half a block per sequence on average
    groups       as paged, plus one block per window, in each layer group
    contiguous   h = max_model_len, or prompt + answer - 1 where that is reserved (or the answer's next power of two)

Buffers for newer tokens in wider formats (`Surplus`) count as slots, in tokens of the oldest format. Shared blocks
count for each holder. Excluded: slots of finished requests in a static batch, unheld room, and fragments between
reservations too short for the next.

Overload: beyond the sustained rate the queue grows with time, so latencies depend on the length of the run. The slope
of TTFT over arrival time t gives the sustained rate:

    TTFT(t) = TTFT(0) + (offered / sustained - 1) t"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.memory.groups import kv_groups
from perfmodel.engine.admission import DISCIPLINES
from perfmodel.models.number_formats import kv_element_bytes, kv_surplus, surplus_tokens
from perfmodel.ops.formats import served_model
from perfmodel.sim.records import columns as cols
from perfmodel.sim.records.collector import Collector
from perfmodel.sim.records.columns import Floats, RequestColumns, latencies, ratio
from perfmodel.sim.records.ensemble import Ensemble
from perfmodel.sim.traffic.conversations import ideal_cached_tokens
from perfmodel.sim.traffic.distributions import class_shares
from perfmodel.specs.hardware import Site
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Traffic


def kv_cache_waste(scenario: Scenario, requests: RequestColumns) -> float | None:
    """Empty share of held KV slots; None where nothing is held."""
    engine, block = scenario.engine, scenario.engine.kv_block_tokens
    model = served_model(scenario.model, engine)
    if engine.kv_cache == "off" or not len(requests) or scenario.traffic.beam_width > 1:  # beams share theirs
        return None
    prompts = requests.num_prompt_tokens.astype(np.float64)
    last = prompts + requests.num_output_tokens - 1  # the last sampled token is never computed
    if groups := kv_groups(scenario.model, scenario.hardware, engine):
        # In slots of one token in one layer; a block has room for the largest group's.
        size, slots, room = max(group.num_layers for group in groups), 0.0, 0.0
        for group in groups:
            most = np.inf if group.span is None else group.most_kept(block)
            slots += group.num_layers * float(_sum_min(prompts, last, group.span or np.inf).sum())
            room += size * block * float(_sum_blocks(prompts, last, most, block).sum())
        return max(1.0 - slots / room, 0.0)
    span, steps = model.rolling_span or np.inf, requests.num_output_tokens.astype(np.float64)
    surplus, quantization = np.zeros_like(prompts), model.quantization  # what newer tokens fill beyond one slot each
    bytes_each = kv_element_bytes(quantization.kv_cache or model.dtype, quantization.kv_group_size)
    for tier in kv_surplus(model):
        surplus += tier.num_bytes / bytes_each * _sum_min(prompts, last, tier.tokens)
    filled = _sum_min(prompts, last, span) + surplus
    reserved = _reserved(scenario, prompts, steps)
    if reserved is None:
        held = block * _sum_blocks(prompts, last, np.ceil(span / block), block)
    else:
        held = steps * block * np.minimum(np.ceil(reserved / block), np.ceil(span / block))
    held = held + steps * block * ceil(surplus_tokens(model) / block)
    total = float(held.sum())
    return max(1.0 - float(filled.sum()) / total, 0.0) if total else None


def _reserved(scenario: Scenario, prompts: Floats, outputs: Floats) -> Floats | None:
    """Tokens reserved per request at admission; None if allocated as needed."""
    engine = scenario.engine
    longest = float(engine.max_model_len or scenario.model.max_position_embeddings)
    is_contiguous = engine.kv_cache == "contiguous"
    takes_all = DISCIPLINES[engine.batching].reserves_all
    is_reserved = bool(engine.reserve_output) if is_contiguous else engine.rules.reserves_output
    if is_reserved and (is_contiguous or not takes_all):
        if engine.reserve_output == "pow2":
            outputs = 2 ** np.ceil(np.log2(outputs))
        return np.minimum(prompts + outputs - 1, longest)
    return np.full_like(prompts, longest) if is_contiguous or takes_all else None


def _sum_min(first: Floats, last: Floats, most: float) -> Floats:
    """Sum of min(n, most) for n = first ... last."""
    cut = np.clip(most, first - 1, last)
    below: Floats = (cut - first + 1) * (first + cut) / 2
    return below + (0.0 if np.isinf(most) else (last - cut) * most)


def _sum_blocks(first: Floats, last: Floats, most: float, block: int) -> Floats:
    """Sum of min(ceil(n / block), most) for n = first ... last."""
    cut = np.minimum(last, np.maximum(most * block, first - 1))
    below: Floats = _blocks_upto(cut, block) - _blocks_upto(first - 1, block)
    return below + (0.0 if np.isinf(most) else (last - cut) * most)


def _blocks_upto(last: Floats, block: int) -> Floats:
    """Sum of ceil(n / block) for n = 1 ... last."""
    whole, rest = np.divmod(last, block)
    total: Floats = block * whole * (whole + 1) / 2 + rest * (whole + 1)
    return total


_FEWEST = 40  # requests, in four quarters
_MIN_SLOPE = 0.1  # seconds of TTFT per second of arrivals: a tenth more than is sustained
_MIN_GROWTH = 3.0  # of the mean TTFT from the first quarter to the last
_MANY_LOST = 0.1  # of the requests


def overload(scenario: Scenario, requests: RequestColumns, num_lost: int) -> dict[str, float] | None:
    """{offered, sustained} requests per second, estimated; None if the run was not overloaded.

    num_lost: requests refused, timed out or failed"""
    arrivals = scenario.traffic.arrivals
    if arrivals.process in ("closed_loop", "burst"):
        return None
    order = np.argsort(requests.arrival_s, kind="stable")
    times, ttft = requests.arrival_s[order], requests.ttft_s[order]
    if stages := arrivals.stages:  # those of the one with the highest rate
        ends = np.cumsum([stage.duration_s for stage in stages])
        busiest = max(range(len(stages)), key=lambda number: stages[number].rate)
        start, end = np.searchsorted(times, (ends[busiest] - stages[busiest].duration_s, ends[busiest]))
        times, ttft = times[start:end], ttft[start:end]
    if len(times) < _FEWEST or times[-1] <= times[0]:
        return None
    span = float(times[-1] - times[0])
    rate = max((stage.rate for stage in stages), default=arrivals.rate) or (len(times) + num_lost) / span
    # Slope from the second quarter to the last; the first fills the system.
    quarters = [float(part.mean()) for part in np.array_split(ttft, 4)]
    middles = [float(part.mean()) for part in np.array_split(times, 4)]
    grows = quarters[1] < quarters[2] < quarters[3] and quarters[3] > _MIN_GROWTH * quarters[0]
    slope = (quarters[3] - quarters[1]) / (middles[3] - middles[1]) if grows else 0.0
    if slope > _MIN_SLOPE:
        return {"offered_req_s": rate, "sustained_req_s": len(times) / span / (1 + slope)}
    if num_lost > _MANY_LOST * (num_lost + len(requests)) and not stages:
        return {"offered_req_s": rate, "sustained_req_s": len(times) / span}
    return None


_MAX_TURNS = 10  # with a line of their own; later turns share one


def conversation_summary(requests: RequestColumns, traffic: Traffic | None = None) -> dict[str, Any]:
    """`conversations` of the summary: their number, turns, `duration` (first turn to last answer), `waiting` for the
    answers in it (mean, p99 ..., in ms) and `turns`, each with requests, latencies and cached share of prompts; with
    the `traffic` of agents' sessions also `ideal_cached_share`, which a cache without bounds would have."""
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
    masks = {str(turn + 1): requests.turn == turn for turn in range(min(last + 1, _MAX_TURNS))}
    if last >= _MAX_TURNS:
        masks[f"from {_MAX_TURNS + 1} on"] = requests.turn >= _MAX_TURNS
    turns, of_all = [_turn(name, requests, mask) for name, mask in masks.items()], {}
    if traffic is not None and traffic.has_sessions:
        known, keys = ideal_cached_tokens(traffic), zip(requests.session.tolist(), requests.turn.tolist(), strict=True)
        ideal = np.array([known[session % len(known)][turn] for session, turn in keys], np.int64)
        of_all = {"ideal_cached_share": ratio(int(ideal.sum()), int(requests.num_prompt_tokens.sum()))}
        for turn, mask in zip(turns, masks.values(), strict=True):
            turn["ideal_cached_share"] = ratio(int(ideal[mask].sum()), int(requests.num_prompt_tokens[mask].sum()))
    return {
        "conversations": count,
        "mean_turns": ratio(len(requests), count),
        **of_all,
        **latencies("duration", ended - begun),
        **latencies("waiting", waiting),
        "turns": turns,
    }


def _turn(name: str, requests: RequestColumns, mask: cols.Bools) -> dict[str, Any]:
    of_turn = requests.some(np.flatnonzero(mask))
    ttft, tpot = latencies("ttft", of_turn.ttft_s), latencies("tpot", of_turn.tpot_s)
    prompts = int(of_turn.num_prompt_tokens.sum())
    return {
        "turn": name,
        "requests": len(of_turn),
        "mean_prompt_tokens": ratio(prompts, len(of_turn)),
        "cached_share": ratio(int(of_turn.num_cached_tokens.sum()), prompts),
        **{key: ttft[key] for key in ("mean_ttft_ms", "p99_ttft_ms")},
        "mean_tpot_ms": tpot["mean_tpot_ms"],
    }


if TYPE_CHECKING:
    from perfmodel.sim.records.whole_runs import WholeRuns


@dataclass(frozen=True)
class DeviceTotals:
    """Totals that only the driver knows; None for what a clock does not know."""

    num_devices: int  # of all engines together
    num_preemptions: int = 0
    prefix_tokens_asked: int = 0
    prefix_tokens_hit: int = 0
    energy_j: float | None = None
    energy_split_j: Mapping[str, float] | None = None  # by what takes it: idle, memory, compute
    mfu: float | None = None  # over the whole run, per device
    mbu: float | None = None
    bound_share: Mapping[str, float] = field(default_factory=dict)  # of the busy time, by what bounded it
    # Of the time of devices whose engine had plans under way, what they had nothing to do in; None without stages.
    pipeline_bubble_share: float | None = None
    kv_cache_usage_peak: float | None = None  # of the engine that was fullest, a fraction
    device_s: float | None = None  # that devices were there, summed; num_devices over the whole run unless given
    usd_per_hour: float | None = None  # of all devices, on the average of the run
    prompt_cost_share: float | None = None  # of the bill, what prompts cost; the answers cost the rest
    cached_cost_share: float | None = None  # of the bill, what cached prompt tokens cost, a part of what prompts cost
    owned: tuple[float, float] | None = None  # of owned devices: USD per hour before electricity, idle watts
    num_rejected: int = 0  # requests that the gateway refused, each time that it did
    num_retries: int = 0  # times one was sent again
    pools: Sequence[Mapping[str, Any]] = ()  # one for each pool where there are several
    kv_transfer: Mapping[str, Any] | None = None  # what was moved between pools
    ec_transfer: Mapping[str, Any] | None = None  # and from encode pools
    image_processing: Mapping[str, Any] | None = None  # on the hosts, before an encoder has the images
    kv_offload: Mapping[str, Any] | None = None  # what went to a second tier and came back


def costs(
    totals: DeviceTotals, duration: float, inputs: int, outputs: int, site: Site | None = None, cached: int = 0
) -> dict[str, Any]:
    """Cost and energy of a run of `duration` seconds with `inputs` and `outputs` tokens; see docs/costs.md.

    None without a price, energy, `site` or tokens to divide by. `totals`: device-seconds, price and energy; cached:
    input tokens found in a prefix cache"""
    device_s = totals.num_devices * duration if totals.device_s is None else totals.device_s
    energy, share = totals.energy_j, totals.prompt_cost_share
    usd = None if totals.usd_per_hour is None else totals.usd_per_hour * duration / 3600
    of_prompts = usd * share if usd is not None and share is not None else None
    of_answers = usd - of_prompts if usd is not None and of_prompts is not None else None
    of_cached = None if usd is None or totals.cached_cost_share is None else usd * totals.cached_cost_share
    of_computed = of_prompts - of_cached if of_prompts is not None and of_cached else None  # else as of all inputs

    drawn = energy * site.factor if energy is not None and site is not None else None
    grid = None if site is None else site.grid_gco2_per_kwh
    emitted = None if drawn is None or grid is None else drawn * grid / 3.6e6

    def per_million(amount: float | None, tokens: int) -> float | None:
        return None if amount is None else ratio(amount * 1e6, tokens)

    return {
        "gpu_hours": device_s / 3600,
        "mean_num_devices": ratio(device_s, duration),
        "output_throughput_per_gpu": ratio(outputs, device_s) if outputs else None,
        "total_token_throughput_per_gpu": ratio(inputs + outputs, device_s),
        "usd_total": usd,
        "usd_per_million_tokens": per_million(usd, inputs + outputs),
        "usd_per_million_output_tokens": per_million(usd, outputs),
        "usd_per_million_input_tokens_split": per_million(of_prompts, inputs),
        "usd_per_million_cached_input_tokens_split": per_million(of_cached, cached),
        "usd_per_million_computed_input_tokens_split": per_million(of_computed, inputs - cached),
        "usd_per_million_output_tokens_split": per_million(of_answers, outputs),
        "energy_j": energy,
        "energy_split_j": None if totals.energy_split_j is None else dict(totals.energy_split_j),
        "energy_wh": None if energy is None else energy / 3600,
        "mean_power_w": None if energy is None else ratio(energy, device_s),
        "joules_per_output_token": None if energy is None else ratio(energy, outputs),
        "site_joules_per_output_token": None if drawn is None else ratio(drawn, outputs),
        "gco2_per_million_output_tokens": per_million(emitted, outputs),
        "gco2_per_million_tokens": per_million(emitted, inputs + outputs),
    }


def alternatives(
    totals: DeviceTotals, scenario: Scenario, summary: Mapping[str, Any], cached: int
) -> dict[str, float | None]:
    """USD per hour of the same deployment rented and owned, and of the same tokens from an API, and where they break
    even; nothing without `price.owned` or `price.api`. See docs/costs.md.

    totals: device-seconds, price and energy; scenario: prices and site; summary: of the run; cached: input tokens found
    in a prefix cache

    Break-even shares are of the hours that have this traffic, the others having none."""
    price, site, hours = scenario.price, scenario.site, float(summary["duration"]) / 3600
    if price is None or (price.owned is None and price.api is None) or not hours:
        return {}
    inputs, outputs = summary["total_input_tokens"], summary["total_output_tokens"]
    rent = totals.usd_per_hour
    api = None if price.api is None else price.api.usd(inputs - cached, cached, outputs) / hours
    idle = own = None
    if totals.owned is not None and totals.energy_j is not None and site is not None and site.usd_per_kwh is not None:
        fixed, idle_w = totals.owned
        usd_per_wh = site.factor * site.usd_per_kwh / 1e3
        idle, own = fixed + idle_w * usd_per_wh, fixed + totals.energy_j / 3600 / hours * usd_per_wh

    def owning_from(hourly: float | None) -> float | None:
        """The share h of hours at which idle + (own - idle) h = hourly h; None if owning never gets as cheap."""
        if hourly is None or own is None or idle is None or hourly <= own - idle:
            return None
        return idle / (hourly - (own - idle))

    renting_from = None if rent is None or not api else rent / api
    requests_per_s = summary["request_throughput"]
    millions = (inputs + outputs) / hours / 1e6
    return {
        "rent_usd_per_hour": rent,
        "own_usd_per_hour": own,
        "own_idle_usd_per_hour": idle,
        "api_usd_per_hour": api,
        "own_usd_per_million_tokens": None if own is None else ratio(own, millions),
        "api_usd_per_million_tokens": None if api is None else ratio(api, millions),
        "rent_api_break_even_share": renting_from,
        "rent_api_break_even_req_s": None if renting_from is None else renting_from * (requests_per_s or 0.0),
        "own_rent_break_even_share": owning_from(rent),
        "own_api_break_even_share": owning_from(api),
    }


def summarize(
    scenario: Scenario,
    collector: Collector,
    totals: DeviceTotals,
    calibration: Calibration | None = None,
    ensemble: "Ensemble | WholeRuns | None" = None,
) -> dict[str, Any]:
    """Summary of a run of `scenario` recorded by `collector`. Latencies in ms; null for no value.

    totals: seconds, energy and cost of devices; calibration: origin of the step times; ensemble: for intervals"""
    requests, gaps, num_lost = collector.requests(), collector.gaps, len(collector.lost)
    duration = collector.end_tick / 1e12
    gives_text = scenario.model.pooling is None  # what else is returned counts as one token of a request, as no output
    inputs, outputs = int(requests.num_prompt_tokens.sum()), int(requests.num_output_tokens.sum()) if gives_text else 0
    classes = _class_summaries(scenario, collector) if scenario.traffic.classes else []
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
        **_goodput(scenario, requests, classes, duration, num_lost),
        "output_throughput": ratio(outputs, duration) if gives_text else None,
        "total_token_throughput": ratio(inputs + outputs, duration),
    }
    tpot_s = requests.tpot_s if scenario.traffic.beam_width == 1 else requests.tpot_s[:0]  # beams come all at once
    summary |= latencies("ttft", requests.ttft_s) | latencies("tpot", tpot_s)
    itl = {"mean": gaps.mean, "median": gaps.quantile(0.5), "std": gaps.std}
    itl |= {name: gaps.quantile(q) for name, q in cols.QUANTILES.items()}
    summary |= {f"{statistic}_itl_ms": cols.finite(value * 1e3) for statistic, value in itl.items()}
    summary |= latencies("e2el", requests.e2el_s) | cols.token_latencies(requests)
    summary |= cols.percentiles_met(scenario.slo, summary, num_lost)
    if scenario.traffic.is_offline and not scenario.cluster.is_disaggregated:  # else each request is on two engines
        rollouts = scenario.traffic.rollouts
        own = None if rollouts is None else cols.rollout_times(requests, rollouts.weight_update_s)
        summary |= cols.tail(requests, duration) if own is None else own
    cached = int(requests.num_cached_tokens.sum())
    summary |= costs(totals, duration, inputs, outputs, scenario.site, cached)
    summary |= alternatives(totals, scenario, summary, cached)
    drafts, tokens, accepted = collector.num_drafts, collector.num_draft_tokens, collector.num_accepted_tokens
    summary |= {
        "mean_batch": collector.mean_batch,
        "mfu": totals.mfu,
        "mbu": totals.mbu,
        "kv_cache_usage_peak": totals.kv_cache_usage_peak,
        "kv_cache_waste": kv_cache_waste(scenario, requests),
        "preemptions": totals.num_preemptions,
        "prefix_cache_hit_rate": ratio(totals.prefix_tokens_hit, totals.prefix_tokens_asked),
        # As in vLLM: accepted tokens of a draft exclude the one that comes in any case; every node of a tree is a
        # drafted token.
        "acceptance_rate": ratio(accepted, tokens),
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "num_draft_tokens": tokens,
        "bound_share": dict(totals.bound_share),
    }
    if totals.pipeline_bubble_share is not None:
        summary["pipeline_bubble_share"] = totals.pipeline_bubble_share
    summary |= {"num_steps": collector.num_steps, "origin": calibration.origin if calibration else "measured"}
    optional = {
        "overload": overload(scenario, requests, num_lost),
        "classes": classes or None,
        "conversations": None if requests.turn is None else conversation_summary(requests, scenario.traffic),
        "pools": [dict(pool) for pool in totals.pools] or None,
        "kv_transfer": None if totals.kv_transfer is None else dict(totals.kv_transfer),
        **({} if totals.ec_transfer is None else {"ec_transfer": dict(totals.ec_transfer)}),
        "image_processing": totals.image_processing,
        "kv_offload": None if totals.kv_offload is None else dict(totals.kv_offload),
    }
    summary |= {name: part for name, part in optional.items() if part is not None}
    factors = {} if ensemble is None else ensemble.factors()
    means = {f"mean_{metric}_ms": ends for metric, ends in factors.items()}
    intervals = {
        name: [summary[name] * low, summary[name] * high]
        for name, (low, high) in means.items()
        if summary[name] is not None
    }
    if ensemble is not None and scenario.traffic.is_offline:
        intervals["duration"] = [duration * end for end in ensemble.duration_factor()]
    return summary | {"interval": intervals}


def _goodput(
    scenario: Scenario, requests: RequestColumns, classes: Sequence[Mapping[str, Any]], duration: float, num_lost: int
) -> dict[str, Any]:
    """Good requests per second and their share, by the limits of each class; a class without limits is all good."""
    if any(kind["request_goodput"] is not None for kind in classes):
        rates = [(kind["request_goodput"], kind["request_throughput"]) for kind in classes]
        rate = float(sum((total if good is None else good) or 0.0 for good, total in rates))
        return {"request_goodput": rate, "slo_attainment": ratio(rate * duration, len(requests) + num_lost)}
    misses = cols.missed(scenario.slo, requests)
    num = cols.num_good(misses)
    return {"request_goodput": None if num is None else ratio(num, duration), **cols.attained(misses, num_lost)}


def _class_summaries(scenario: Scenario, collector: Collector) -> list[dict[str, Any]]:
    shares, requests = class_shares(scenario), collector.requests()
    done = shares.of_all(requests.request_id)
    lost = [(shares.of(number), fate) for number, fate in collector.lost]
    duration = collector.end_tick / 1e12
    rows = []
    for number, kind in enumerate(scenario.traffic.classes):
        of_class = requests.some(np.flatnonzero(done == number))
        misses = cols.missed(kind.slo or scenario.slo, of_class)
        good = cols.num_good(misses)
        fates = [fate for of, fate in lost if of == number]
        row = {
            "name": kind.name,
            "priority": kind.priority,
            "completed": len(of_class),
            "failed": fates.count("failed"),
            "timed_out": fates.count("timed_out"),
            "request_throughput": ratio(len(of_class), duration),
            "request_goodput": None if good is None else ratio(good, duration),
            **cols.attained(misses, len(fates)),
            **cols.request_latencies(of_class),
            **cols.token_latencies(of_class),
        }
        rows.append(row | cols.percentiles_met(kind.slo or scenario.slo, row, len(fates)))
    return rows
