"""`Demand`: a scenario's requests as moments, typical requests and a rate; `serve`: their latencies in closed form."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import BATCHES, Floats, Surfaces, between, read_between
from perfmodel.sim.traffic.traces import read_trace
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Trace

Bools = NDArray[np.bool_]

_LOOKED_AT = 4000
NUM_TYPICAL = 100
_RATED = ("constant", "poisson", "poisson_fixed_count", "gamma")


@dataclass(frozen=True)
class Demand:
    """Requests as the engine sees them, without cached prefixes.

    prompt, outputs: tokens to compute and to generate, of all sampled requests
    typical:         (tokens to compute, cached, to generate) of one request from each of NUM_TYPICAL equal parts by
                     prompt length
    context:         mean KV length of a decoding sequence
    asks_for_tokens: the SLO has limits on single tokens; reading_speed: tokens/s of readers, if any"""

    prompt: Floats
    outputs: Floats
    typical: tuple[Floats, Floats, Floats]
    context: float
    asks_for_tokens: bool = False
    reading_speed: float | None = None

    @property
    def mean_prompt(self) -> float:
        return float(self.prompt.mean())

    @property
    def mean_outputs(self) -> float:
        return float(self.outputs.mean())


def demand_of(scenario: Scenario) -> Demand:
    """The demand of the scenario's traffic. Shared prefixes count as cached where the second half of the requests finds
    them from the first, in an unbounded cache."""
    if scenario.traffic.beam_width > 1:
        raise SpecError(f"{scenario.name}: got traffic.beam_width, which closed forms do not have; simulate it.")
    longest = scenario.engine.max_model_len or scenario.model.max_position_embeddings
    longest += scenario.model.pooling is not None  # what is returned takes no position
    traffic = scenario.traffic.model_copy(update={"num_requests": None})
    drafts = list(islice(Workload(scenario.model_copy(update={"traffic": traffic})).drafts(), _LOOKED_AT))
    drafts = [draft for draft in drafts if draft.num_prompt_tokens < longest]
    if not drafts:
        limit = scenario.engine.max_model_len
        raise WorkloadError(f"{scenario.name}: no request fits max_model_len={limit}; raise it, or shorten prompts.")
    whole = np.array([draft.num_prompt_tokens for draft in drafts], np.float64)
    outputs = np.minimum([draft.num_output_tokens for draft in drafts], longest - whole)
    cached = np.zeros(len(drafts))
    if scenario.engine.enable_prefix_caching and any(draft.block_hashes for draft in drafts):
        seen: set[int] = set()
        for place, hashes in enumerate(draft.block_hashes for draft in drafts):
            count = next((index for index, block in enumerate(hashes) if block not in seen), len(hashes))
            cached[place] = float(count * scenario.engine.kv_block_tokens)
            seen.update(hashes)
        half = slice(len(drafts) // 2, None)
        whole, outputs, cached = whole[half], outputs[half], cached[half]
    prompt = np.maximum(whole - cached, 1.0)
    order = np.argsort(prompt, kind="stable")
    places = ((np.arange(NUM_TYPICAL) + 0.5) / NUM_TYPICAL * len(order)).astype(np.intp)
    chosen = order[places]
    context = float(((whole + outputs / 2) * outputs).sum() / outputs.sum())
    typical = prompt[chosen], cached[chosen], outputs[chosen]
    return Demand(prompt, outputs, typical, context, scenario.slo.needs_token_times, scenario.slo.reading_speed)


def wanted_rate(scenario: Scenario, spec: PlanSpec) -> float:
    """Requests/s to plan for; a trace's average. Raises SpecError if none is given."""
    traffic, arrivals = scenario.traffic, scenario.traffic.arrivals
    if spec.rate is not None:
        return spec.rate
    if arrivals.stages:
        return max(stage.rate for stage in arrivals.stages)
    if traffic.is_offline:
        raise SpecError(
            "a burst has no rate to serve: it is a job; set plan.objective to cheapest_job or shortest_job, or give "
            "plan.rate in requests per second."
        )
    if arrivals.process == "trace" and traffic.trace is not None:
        count, rate = _recorded(traffic.trace, traffic.num_requests, traffic.duration_s)
        if not rate:
            raise SpecError(
                f"{traffic.trace.path}: its first {count} requests come at once, which is no rate to plan for; raise "
                f"traffic.num_requests, or give plan.rate in requests per second."
            )
        return rate
    if arrivals.rate is None:
        raise SpecError(
            f"a plan needs a rate to serve; arrivals of process {arrivals.process} have none, give plan.rate in "
            f"requests per second, as in --set plan.rate=10."
        )
    return arrivals.rate


def at_rate(scenario: Scenario, rate: float, num_requests: int) -> dict[str, Any]:
    """Traffic fields of `scenario` for `num_requests` arriving at `rate`, by its own process if that takes a rate, else
    Poisson; all requests of a trace."""
    traffic, arrivals = scenario.traffic, scenario.traffic.arrivals
    no_end = {"traffic.duration_s": None} if traffic.duration_s is not None else {}
    if arrivals.process == "trace" and traffic.trace is not None:
        count, recorded = _recorded(traffic.trace, traffic.num_requests, traffic.duration_s)
        speedup = traffic.trace.speedup * rate / recorded if recorded else traffic.trace.speedup
        return {"traffic.trace.speedup": speedup, "traffic.num_requests": count} | no_end
    process: dict[str, Any] = {"process": "poisson"}
    if arrivals.process in _RATED:
        process = arrivals.model_dump(mode="json", include={"process", "cv"}, exclude_defaults=True)
        process.setdefault("process", arrivals.process)
    return {"traffic.arrivals": {**process, "rate": rate}, "traffic.num_requests": num_requests} | no_end


@lru_cache(maxsize=16)
def _recorded(trace: Trace, num_requests: int | None, duration_s: float | None) -> tuple[int, float]:
    """Requests sent from the trace, and their mean rate in requests/s over the time from first to last."""
    count, last_s = 0, 0.0
    for row in read_trace(trace.path, trace.format):
        at_s = row.arrival_s / trace.speedup
        if count == num_requests or (duration_s is not None and at_s > duration_s):
            break
        count, last_s = count + 1, at_s
    return count, (count - 1) / last_s if last_s else 0.0


# Even, independent-looking places in the unit cube for each typical request: an additive recurrence (Roberts 2018).
_PHI = 1.2207440846057596  # the root of x^4 = x + 1: three dimensions
SCORES = np.array([(0.5 + (np.arange(NUM_TYPICAL) + 1) * _PHI**-k) % 1.0 for k in (1, 2, 3, 4)])


def exponential(score: Floats, chance: Floats, mean: Floats) -> Floats:
    """Quantile at `score` (0 to 1) of a wait that is 0 except with probability `chance`, then exponential."""
    return np.where(score < chance, -mean * np.log(np.maximum(score / np.maximum(chance, 1e-12), 1e-12)), 0.0)


def held_steps(arrived: Floats, extra: Floats, extra_square: Floats) -> tuple[Floats, Floats, Floats]:
    """Steps delayed by prompts: (share of steps with any, mean delay in s, mean square in s2). arrived: prompts per
    step, Poisson; extra, extra_square: mean and mean square of one prompt's delay, s and s2"""
    share = np.maximum(1.0 - np.exp(-arrived), 1e-12)
    mean = extra * arrived / share
    return share, mean, square_of_some(arrived, mean, extra_square)


def square_of_some(arrived: Floats, mean: Floats, extra_square: Floats) -> Floats:
    """Mean square of a Poisson sum, given at least one term: (l s2 + (l s)^2) / (1 - exp(-l)). arrived: l; mean: l s /
    (1 - exp(-l)), of sums with any term; extra_square: s2, the mean square of one term"""
    share = np.maximum(1.0 - np.exp(-arrived), 1e-12)
    return arrived / share * extra_square + share * mean**2


@dataclass(frozen=True)
class SingleTokens:
    """Times of single tokens, in seconds.

    gap:     longest between two tokens
    pace:    between two tokens without prompts
    held:    (share of steps delayed by prompts, mean and mean square of the delay)
    at_once: probability that the steps after the first token are delayed: prompts arrived during the request's prefill
    """

    gap: Floats
    pace: Floats
    held: tuple[Floats, Floats, Floats]
    at_once: Floats

    def reader_wait(self, speed: float) -> Floats:
        """A reader's total wait at `speed` tokens/s, without the last token's own delay.

        Each token saves r = 1 / speed - pace; a step delayed by w takes w from it. With q the share of such steps, the
        walk never falls below its start with probability (1 - q w / r) / (1 - q) (unit steps down: Feller 1968, section
        XIV.9). Its fall is an M/G/1 waiting time (duality), exponential with the Pollaczek-Khinchine mean. Prompts that
        arrived during the request's own prefill delay its first tokens, when little is saved (r for each of two)."""
        share, mean, square = self.held
        spare = 1.0 / speed - self.pace
        load = share * mean / np.maximum(spare, 1e-12)
        falls = np.clip(1.0 - (1.0 - load) / (1.0 - share), 0.0, 1.0)
        depth = square / np.maximum(2 * mean * (1.0 - np.minimum(load, 0.99)), 1e-12)
        spread = np.sqrt(np.log(np.maximum(square / np.maximum(mean, 1e-12) ** 2, 1.01)))  # of a lognormal
        far = np.log(np.maximum(mean, 1e-12) / np.maximum(2 * spare, 1e-12)) / spread - spread / 2
        early = self.at_once * ndtr(far)
        depth = np.maximum(depth, early * mean)
        return exponential(SCORES[0][None, :], early + (1.0 - early) * falls, depth)


def longest_gap(
    surfaces: Surfaces, budget: Floats, demand: Demand, rate: Floats, batch: Floats, step: Floats, long: Floats
) -> Floats:
    """Seconds of the longest step that a request meets while decoding.

    It has the largest prompt arriving in the request's life: of L on average, the largest is at most m with probability
    exp(-L P(prompt > m)); plus those that arrived in the `long` seconds of steps with prompts before.

    rate: requests/s; batch: decoding sequences; step: seconds of a step; budget: tokens of a step
    surfaces: step times; demand: lengths of prompts and answers"""
    outputs = demand.typical[2][None, :]
    prompts = np.maximum(rate * np.maximum(outputs - 1, 0.0) * step, 1e-12)
    share = 1.0 + np.log(SCORES[0][None, :]) / prompts  # of prompts that are at most as large
    lengths = np.sort(demand.prompt)
    largest = np.interp(share, (np.arange(len(lengths)) + 0.5) / len(lengths), lengths)
    tokens = np.minimum(largest + rate * long * demand.mean_prompt, np.maximum(budget - batch, 1.0))
    alone = surfaces.decode(batch)
    return np.where(share > 0, np.maximum(surfaces.mixed_step_time(batch, tokens), alone), alone)


_ROUNDS = 6  # of the fixed point of T
_COUNTS = np.arange(1, int(BATCHES[-1]) + 1, dtype=np.float64)
# Linear interpolation from BATCHES to 1, 2, 3 ... as a matrix: a column for each.
_BETWEEN = np.array([np.interp(_COUNTS, BATCHES, row) for row in np.eye(len(BATCHES))])


@dataclass(frozen=True)
class Service:
    """Service parameters of candidates, arrays (rows, 1), or (1, 1) where all rows are equal. Rates are of one group (a
    unified replica).

    surfaces:   step times of decode engines; `prompts`: of prefill engines, the same unless disaggregated
    slots:      most running sequences, by max_num_seqs and KV cache
    budget:     tokens per step of prefill engines
    prefills, decodes: engines of the group; 0 prefill engines: each decode engine computes its own prompts
    transfer:   KV transfer seconds, fixed and per token
    front_end:  server seconds (per request, per prompt token, per sequence of the batch)
    gates:      steps planned ahead of an arrival besides the running one
    stations:   what a request's images pass before it is read: name, seconds of all servers there for them, and until
                idle ones are done, with the way to the next"""

    surfaces: Surfaces
    prompts: Surfaces
    slots: Floats
    budget: Floats
    prefills: Floats
    decodes: Floats
    transfer: tuple[Floats, Floats]
    front_end: tuple[Floats, Floats, Floats]
    gates: Floats
    stations: tuple[tuple[str, Floats, Floats], ...] = ()


@dataclass(frozen=True)
class Served:
    """Latencies in seconds: a row per candidate, a column per typical request.

    batch:     mean decoding sequences per engine
    slot_wait: mean wait for a slot
    station_waits: mean wait of images at each station
    is_stable: queues stay finite; latencies are infinite if not
    single:    single-token times, if the demand needs them"""

    ttft: Floats
    tpot: Floats
    batch: Floats
    slot_wait: Floats
    is_stable: Bools
    single: SingleTokens | None = None
    station_waits: tuple[Floats, ...] = ()


def serve(service: Service, demand: Demand, rate: Floats) -> Served:
    """How `service` serves `demand` at `rate` requests/s, a row per candidate."""
    surfaces, is_apart = service.surfaces, service.prefills > 0
    decode_rate = rate / service.decodes
    beside_rate = np.where(is_apart, 0.0, decode_rate)
    prompt_rate = np.where(is_apart, rate / np.maximum(service.prefills, 1), decode_rate)
    steps = _mean_steps(service, demand, beside_rate)
    chain = _chain(service, demand, decode_rate, steps)
    num_running = np.where(is_apart, 0.0, chain.mean)
    work = _prompt_work(service, demand, prompt_rate, num_running)
    alone, mean_step = surfaces.decode(np.maximum(chain.mean, 1.0)), _at(steps, chain.mean)
    held_up = np.where(is_apart, 0.0, 1.0 - alone / mean_step)  # share of the time that prompts take from decodes
    deviation, full_share, slot_wait = _batch(service, chain, held_up, work)
    prompt, cached, outputs = (values[None, :] for values in demand.typical)
    for_gate, for_slot, for_batch, for_queue = (scores[None, :] for scores in SCORES)
    life = outputs / demand.mean_outputs
    smoothed = 2 * (life - 1 + np.exp(-life)) / life**2
    met = np.clip(chain.mean + deviation * np.sqrt(smoothed) * ndtri(for_batch), 1.0, service.slots)
    step = _at(steps, met)
    own, first_s, is_busy = _first_step(service, demand, prompt_rate, is_apart, chain.mean, work, mean_step)
    full = surfaces.mixed_step_time(chain.mean, np.maximum(service.budget - chain.mean, 1.0))
    tpot = _held_up(surfaces.decode(met), step, own, outputs, beside_rate, work.square, full, for_batch)
    start_of = np.clip(for_gate / np.maximum(is_busy, 1e-9), 0.0, 1.0)  # of the step that is found running
    ahead = service.gates * np.where(is_apart, first_s, mean_step)
    waits = np.where(for_gate < is_busy, start_of * first_s + ahead, 0.0)
    waits = waits + exponential(for_queue, work.chance, work.wait) + exponential(for_slot, full_share, slot_wait)
    fixed, per_token, per_sequence = service.front_end
    ttft = fixed + per_token * (prompt + cached) + per_sequence * chain.mean + waits + own
    start, per_kv_token = service.transfer
    ttft = ttft + np.where(is_apart, start + per_kv_token * (prompt + cached) + (0.5 + service.gates) * step, 0.0)
    is_bad, station_waits = ~(chain.is_stable & work.is_stable), []
    for _, busy, passed in service.stations:  # as at one server (Pollaczek and Khinchine, constant service)
        load = rate * busy
        wait = busy / 2 / np.maximum(1 - load, 1e-9)
        ttft = ttft + passed + exponential(for_queue, np.minimum(load, 1.0), wait)
        is_bad |= load >= 1.0
        station_waits.append(np.minimum(load, 1.0) * wait)
    brought = surfaces.tokens(met)
    single = None
    if demand.asks_for_tokens:
        met_by = beside_rate * step, work.extra.mean(axis=1, keepdims=True), work.square
        gap = longest_gap(surfaces, service.budget, demand, beside_rate, met, step, own + first_s)
        at_once = 1.0 - np.exp(-beside_rate * (own + service.gates * step))
        single = SingleTokens(gap, surfaces.decode(met) / brought, held_steps(*met_by), at_once)
    ttft, tpot = np.where(is_bad, np.inf, ttft), np.where(is_bad, np.inf, tpot / brought)
    return Served(ttft, tpot, chain.mean, full_share * slot_wait, ~is_bad, single, tuple(station_waits))


@dataclass(frozen=True)
class _Work:
    """Prompt load. extra: seconds each typical prompt adds to steps; square: mean square; chance, wait: of queueing"""

    extra: Floats
    square: Floats
    chance: Floats
    wait: Floats
    is_stable: Bools


def _prompt_work(service: Service, demand: Demand, rate: Floats, num_running: Floats) -> _Work:
    """A queue of prompts drains at the pace of full steps: budget / t(n, budget) tokens/s."""
    surfaces = service.prompts
    budget = np.maximum(service.budget - num_running, 1.0)
    prompt, cached, _ = (values[None, :] for values in demand.typical)
    context = _contexts(surfaces, prompt, cached, budget)
    full = surfaces.mixed_step_time(num_running, budget)
    alone = np.where(num_running > 0, surfaces.decode(np.maximum(num_running, 1.0)), 0.0)
    parts = np.maximum(prompt / budget, 1.0)
    extra = np.maximum(surfaces.mixed_step_time(num_running, np.minimum(prompt, budget)) - alone, 0.0) * parts + context
    square = (extra**2).mean(axis=1, keepdims=True)
    busy = prompt * full / budget + context
    mean = busy.mean(axis=1, keepdims=True)
    load = rate * mean
    wait = (busy**2).mean(axis=1, keepdims=True) / (2 * mean) / np.maximum(1 - load, 1e-9)
    # Others are in front with the probability `load`; as often, the next step has room for them and this one.
    return _Work(extra, square, np.minimum(load, 1.0) ** 2, wait, load < 1.0)


def _first_step(
    service: Service, demand: Demand, rate: Floats, is_apart: Bools, decodes: Floats, work: _Work, mean_step: Floats
) -> tuple[Floats, Floats, Floats]:
    """Seconds of a prompt's own steps, of the step it finds running, and the probability of one. Arrivals find steps in
    proportion to their duration: steps without prompts, and steps with the prompts that came through one gate, a
    Poisson number whose work adds up (so the mean found is E[t^2] / E[t])."""
    surfaces = service.prompts
    num_decodes = np.where(is_apart, 0.0, decodes)
    alone = np.where(is_apart, 0.0, surfaces.decode(np.maximum(decodes, 1.0)))
    budget = np.maximum(service.budget - num_decodes, 1.0)
    prompt, cached, _ = (values[None, :] for values in demand.typical)
    gap = np.where(is_apart, surfaces.mixed_step_time(num_decodes, np.minimum(demand.mean_prompt, budget)), mean_step)
    arrived = rate * gap
    share = np.maximum(1.0 - np.exp(-arrived), 1e-12)
    mixed = surfaces.mixed_step_time(num_decodes, np.minimum(arrived * demand.mean_prompt / share, budget))
    added = np.maximum(mixed - alone, 0.0)
    square = square_of_some(arrived, added, work.square)
    biased = mixed + np.maximum(square - added**2, 0.0) / mixed
    busy = share * mixed
    in_mixed = busy / np.maximum(busy + (1 - share) * alone, 1e-12)
    first_s = np.where(SCORES[1][None, :] < in_mixed, biased, alone)
    is_busy = np.where(is_apart, np.minimum(rate * gap, 1.0), 1.0 - np.exp(-np.maximum(decodes, rate * gap)))
    first_s = np.where(is_apart, biased, first_s)
    whole = prompt + rate * first_s * np.where(SCORES[0][None, :] < is_busy, 1.0, 0.0) * demand.mean_prompt
    own = surfaces.mixed_step_time(num_decodes, np.minimum(whole, budget)) * np.maximum(whole / budget, 1.0)
    return own + _contexts(surfaces, prompt, cached, budget), first_s, is_busy


def _held_up(
    alone: Floats, step: Floats, own: Floats, outputs: Floats, rate: Floats, square: Floats, full: Floats, score: Floats
) -> Floats:
    """Seconds between two tokens, for steps that take `alone` without prompts, `step` on average and `full` at most.

    A request is delayed by prompts that arrived since its own began, and by those arriving meanwhile: a delay busy
    period. With x = (tokens - 1) alone, p the share of time that prompts take, y the long first step, and prompts of
    mean square s at rate l (Takacs 1962; Kleinrock 1975, section 5.8):

        E[delay] = p (x + y) / (1 - p),      Var = l s (x + y) / (1 - p)^3

    0 with probability exp(-l (x + y)), else gamma with the remaining mean and variance. Bursts also enlarge the batch:
    `score` is the batch's."""
    later = np.maximum(outputs - 1, 1.0)
    share = np.clip(1 - alone / step, 0.0, 0.95)
    delay = later * alone + np.maximum(own - step, 0.0)
    mean = share * delay / (1 - share)
    none = np.exp(-np.maximum(rate * delay, 1e-9))
    of_some = mean / (1 - none)
    variance = np.maximum((rate * square * delay / (1 - share) ** 3 + mean**2) / (1 - none) - of_some**2, 1e-30)
    normal = ndtri(np.clip((score - none) / (1 - none), 1e-6, 1 - 1e-6))
    shape = np.maximum(of_some**2 / variance, 0.05)  # of the gamma, whose quantile is Wilson and Hilferty's (1931)
    quantile = np.maximum(1 - 1 / (9 * shape) + normal / (3 * np.sqrt(shape)), 0.0) ** 3
    held = np.where(score > none, of_some * quantile, 0.0)
    return alone + np.minimum(held / later, np.maximum(full - alone, 0.0))


def _mean_steps(service: Service, demand: Demand, rate: Floats) -> Floats:
    """Step time T at each of BATCHES, a row per candidate, with prompts arriving at `rate` between decodes."""
    batches = BATCHES[None, :]
    alone, _ = service.surfaces.at_batches
    budget = np.maximum(service.budget - batches, 1.0)
    mean = demand.mean_prompt
    context = mean_context(service.surfaces, demand, budget)
    mean_steps = alone
    for _ in range(_ROUNDS):
        share = np.maximum(1.0 - np.exp(-rate * mean_steps), 1e-12)
        tokens = np.minimum(rate * mean_steps * mean / share, budget)
        # Prompts beyond the budget take further steps: as many of them as there are budgets in the tokens.
        busy = np.minimum(np.maximum(share, rate * mean_steps * mean / budget), 1.0)
        mean_steps = (1 - busy) * alone + busy * service.surfaces.mixed_step_time(batches + 0 * budget, tokens)
        mean_steps = mean_steps + np.minimum(rate * mean_steps, 1e6) * context
    return mean_steps


def mean_context(surfaces: Surfaces, demand: Demand, budget: Floats) -> Floats:
    """Mean seconds of a prompt's attention to cached tokens, (rows, 1), at the first budget of each row."""
    prompt, cached, _ = (values[None, :] for values in demand.typical)
    seconds: Floats = _contexts(surfaces, prompt, cached, budget[:, :1]).mean(axis=1, keepdims=True)
    return seconds


def _contexts(surfaces: Surfaces, prompt: Floats, cached: Floats, budget: Floats) -> Floats:
    """Seconds that a prompt's chunks take longer because of the cache before them."""
    parts = np.ceil(prompt / budget)
    size = prompt / parts
    before = parts * cached + size * parts * (parts - 1) / 2
    return np.where(before > 0, surfaces.cached(size) * before, 0.0)


@dataclass(frozen=True)
class _Chain:
    """The batch as a birth-death chain: log weights of 0, 1, 2 ... sequences up to the slots, and beyond."""

    weights: Floats
    beyond: Floats
    mean: Floats
    deviation: Floats
    wait: Floats
    is_stable: Bools


def _chain(service: Service, demand: Demand, rate: Floats, steps: Floats) -> _Chain:
    _, brought = service.surfaces.at_batches
    paces = demand.mean_outputs * steps / brought
    most = int(min(np.ceil(service.slots.max()), BATCHES[-1]))
    counts = np.arange(1, most + 1, dtype=np.float64)[None, :]
    logs = np.cumsum(np.log(rate * (paces @ _BETWEEN[:, :most]) / counts), axis=1)
    slots = np.maximum(np.floor(service.slots), 1.0)
    logs = np.where(counts <= slots, logs, -np.inf)
    top = np.maximum(logs.max(axis=1, keepdims=True), 0.0)
    weights = np.concatenate([np.exp(-top), np.exp(logs - top)], axis=1)
    last = np.take_along_axis(weights, slots.astype(np.intp), axis=1)
    pace = _at(paces, slots) / slots
    ratio = rate * pace
    is_stable = ratio < 1.0
    beyond = np.where(is_stable, last * ratio / np.maximum(1 - ratio, 1e-9), 0.0)
    total = weights.sum(axis=1, keepdims=True) + beyond
    weights, beyond = weights / total, beyond / total
    counts = np.arange(most + 1, dtype=np.float64)
    mean = (weights @ counts)[:, None] + beyond * slots
    square = (weights @ counts**2)[:, None] + beyond * slots**2
    wait = pace / np.maximum(1 - ratio, 1e-9)
    return _Chain(weights, beyond, mean, np.sqrt(np.maximum(square - mean**2, 0.0)), wait, is_stable)


def _batch(service: Service, chain: _Chain, held_up: Floats, work: _Work) -> tuple[Floats, Floats, Floats]:
    """The chain's batch, widened by prompts that delay decodes: its deviation, the probability that all slots are
    taken, and the mean wait then."""
    ahead = held_up / np.maximum(1 - held_up, 1e-3)  # departures that a prompt delays, on average
    mean = work.extra.mean(axis=1, keepdims=True)
    wider = 1 + ahead + ahead**2 * work.square / np.maximum(mean, 1e-12) ** 2 / 2
    reach = chain.mean + (np.floor(service.slots) - chain.mean) / np.sqrt(wider)
    counts = np.arange(chain.weights.shape[1], dtype=np.float64)[None, :]
    full = np.where(counts >= reach, chain.weights, 0.0).sum(axis=1, keepdims=True) + chain.beyond
    return chain.deviation * np.sqrt(wider), full, chain.wait * wider


def _at(values: Floats, batch: Floats) -> Floats:
    """Interpolate `values`, given at BATCHES, at `batch`."""
    index, share = between(BATCHES, batch)
    return read_between(values, np.arange(len(values))[:, None], index, share)
