"""Stage one of a plan: the highest rate under the SLO of every candidate, without simulating any.

Step times come from the simulator's own tables (`surfaces`), how requests wait from closed forms (`service`); the rate
is found by bisection for all candidates at once. What the closed forms do not know (policies, preemption, the order of
requests) is for stage two, the simulator, on those that are best here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from perfmodel.cost import profile_of
from perfmodel.errors import SpecError
from perfmodel.planning.finalist import Job, Screened
from perfmodel.planning.service import Demand, Served, Service, demand_of, mean_context, repeated, serve
from perfmodel.planning.space import Candidate, Layout
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import (
    NUM_DRAWS,
    Drawn,
    Grid,
    SharedScores,
    StepSurface,
    Surfaces,
    drawn_surfaces,
    step_surface,
)
from perfmodel.sim.fleet.kv_transfer import transfer_cost
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.slo import SLO

Floats = NDArray[np.float64]
Engine = tuple[Layout, int]  # and the tokens of its plans
Key = tuple[int, int]

_AT_ONCE = 400  # candidates: as many rows as stay in a processor's cache
_HALVINGS = 10
_WIDEST = 1e3  # highest to lowest rate that is looked at
_MUCH = 0.05  # of a limit spent waiting for a slot: then slots are what is scarce
_BEYOND = 1.05  # times the highest rate: where what binds is seen


@dataclass(frozen=True)
class _Wanted:
    """What typical requests are held to, in seconds, a column for each of them.

    limits:     metric -> limit that a request meets together with all others; `attainment`: the share that is to
    statistics: (metric, limit, share of the requests that is to meet it; None: their mean is to)
    """

    limits: dict[str, Floats]
    attainment: float
    statistics: tuple[tuple[str, Floats, float | None], ...]

    @property
    def all_limits(self) -> list[tuple[str, Floats, float | None]]:
        """(metric, limit, share of the requests that is to meet it, as of `statistics`)"""
        return [*((name, limit, self.attainment) for name, limit in self.limits.items()), *self.statistics]


class Screen:
    """The screen of `candidates` for the traffic and SLO of `scenario`.

    Raises SpecError for a scenario without an SLO.
    """

    def __init__(self, candidates: Sequence[Candidate], scenario: Scenario, attainment: float) -> None:
        self.demand = demand_of(scenario)
        self._wanted, self._attainment = _wanted(scenario.slo, self.demand, attainment), attainment
        self._candidates = candidates
        batches = max((candidate.max_num_seqs for candidate in candidates), default=1)
        chunk = max((max(c.max_num_batched_tokens, _budget(c)) for c in candidates), default=1)
        self._most = batches, chunk
        engines = {self._key(engine): engine for candidate in candidates for engine in _engines(candidate)}
        self._surfaces: dict[Key, StepSurface] = {}
        layouts = {id(layout): layout for layout, _ in engines.values()}
        for layout in layouts.values():
            costs = shared_step_costs(layout.scenario)
            mine = [engine for engine in engines.values() if engine[0] is layout]
            for each in mine:
                grid = self._grid(*each)
                self._surfaces[self._key(each)] = step_surface(layout.scenario, *grid, costs=costs)

    def _grid(self, layout: Layout, tokens: int) -> Grid:
        """What a layout's steps are asked for; only where plans pass stages does it matter how large one may be."""
        has_stages = layout.scenario.engine.pipeline_parallel_size > 1
        return (self.demand.context, self.demand.mean_prompt, *self._most, tokens if has_stages else 0)

    def _key(self, engine: Engine) -> Key:
        return id(engine[0]), self._grid(*engine)[-1]

    def all(self) -> list[Screened]:
        """Every candidate, in order."""
        found: list[Screened] = []
        for start in range(0, len(self._candidates), _AT_ONCE):
            found += self._screened(self._candidates[start : start + _AT_ONCE])
        return found

    def tightness(self, chosen: Sequence[Screened], rates: Sequence[float]) -> list[float]:
        """For each candidate at its rate, the smallest factor on all limits with which the wanted share meets them."""
        found: list[float] = []
        for start in range(0, len(chosen), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            service = self._service([each.candidate for each in chosen[part]])
            served = serve(service, self.demand, np.array(rates[part])[:, None])
            found += self._wanted_tightness(served).tolist()
        return found

    def _wanted_tightness(self, served: Served) -> Floats:
        """The share of its limit that is used up, by the requests together and by each statistic, at most."""
        wanted, parts = self._wanted, []
        if wanted.limits:
            worst = np.max(
                [_seconds(served, self.demand, name) / limit for name, limit in wanted.limits.items()], axis=0
            )
            parts.append(np.quantile(worst, wanted.attainment, axis=1, method="higher"))
        for name, limit, share in wanted.statistics:
            used = _seconds(served, self.demand, name) / limit
            parts.append(used.mean(axis=1) if share is None else np.quantile(used, share, axis=1, method="higher"))
        tightness: Floats = np.max(parts, axis=0)
        return tightness

    def under_draws(self, chosen: Sequence[Screened], rates: Sequence[float]) -> list[Drawn]:
        """What common draws of the calibration's errors do to each, at the rate that it is to serve."""
        known = SharedScores()
        return [self._under_draws(each.candidate, rate, known) for each, rate in zip(chosen, rates, strict=True)]

    def _under_draws(self, candidate: Candidate, rate: float, known: SharedScores) -> Drawn:
        plain = self._service([candidate])
        found, is_apart = {}, candidate.ratio is not None
        for engine in _engines(candidate):
            scenario = engine[0].scenario
            found[self._key(engine)] = drawn_surfaces(scenario, self._grid(*engine), known.of(scenario), is_apart)
        read = {key: Surfaces(surfaces, np.arange(NUM_DRAWS)) for key, (surfaces, _) in found.items()}
        decode, prompts = (self._key(engine) for engine in _engines(candidate))
        drawn = repeated(plain, NUM_DRAWS, read[decode], read[prompts], found[prompts][1])
        base = self._latencies(serve(plain, self.demand, np.array([[rate]])))
        each = self._latencies(serve(drawn, self.demand, np.full((NUM_DRAWS, 1), rate)))
        highest, most = self._highest(drawn)[:, 0], float(self._highest(plain)[0, 0])
        return Drawn(
            highest / most if most > 0 else np.ones(NUM_DRAWS),
            {name: _over(values, float(base[name][0])) for name, values in each.items()},
        )

    def _latencies(self, served: Served) -> dict[str, Floats]:
        """The latencies that the wanted share of requests does not exceed, in seconds."""
        return {
            name: np.quantile(_seconds(served, self.demand, name), self._attainment, axis=1, method="higher")
            for name in ("ttft", "tpot", "itl", "e2el")
        }

    def _service(self, candidates: Sequence[Candidate]) -> Service:
        surfaces = self._read([_engines(candidate)[0] for candidate in candidates])
        prompts = surfaces
        if any(candidate.prefill is not None for candidate in candidates):
            prompts = self._read([_engines(candidate)[1] for candidate in candidates])
        return _service(candidates, surfaces, prompts, self.demand)

    def _read(self, engines: Sequence[Engine]) -> Surfaces:
        """The surfaces of so many candidates' engines."""
        keys = [self._key(engine) for engine in engines]
        place = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        return Surfaces([self._surfaces[key] for key in place], np.array([place[key] for key in keys], np.intp))

    def _origin(self, candidate: Candidate) -> str:
        """Origin of the candidate's step times: the datasheet where any of them comes from there."""
        origins = [self._surfaces[self._key(engine)].origin for engine in _engines(candidate)]
        return "datasheet" if "datasheet" in origins else origins[0]

    def _highest(self, service: Service) -> Floats:
        return _highest(service, self.demand, self._wanted)

    def _screened(self, candidates: Sequence[Candidate]) -> list[Screened]:
        service = self._service(candidates)
        rate = self._highest(service)
        at = serve(service, self.demand, np.maximum(rate, 1e-9))
        beyond = serve(service, self.demand, np.maximum(rate, 1e-9) * _BEYOND)
        binds = _binding(candidates, service, beyond, self.demand, self._wanted)
        return [
            Screened(
                candidate,
                float(rate[i, 0]),
                binds[i],
                float(at.batch[i, 0]),
                candidate.usd_per_hour,
                self._origin(candidate),
            )
            for i, candidate in enumerate(candidates)
        ]


def _wanted(slo: SLO, demand: Demand, attainment: float) -> _Wanted:
    """The limits of `slo` for the demand's typical requests. Raises SpecError where there is none."""
    prompt, cached, _ = demand.typical
    whole = slo.ttft_ms if slo.ttft_ms_per_input_token is None else slo.ttft_limit_ms(prompt + cached)
    given = {"ttft": whole, "tpot": slo.tpot_limit_ms, "max_itl": slo.max_itl_ms, "e2el": slo.e2el_ms}
    if slo.reading_speed is not None:
        given["reading"] = slo.reading_wait_ms + 1e3 / slo.reading_speed

    def seconds(limit: Any) -> Floats:
        return np.broadcast_to(np.asarray(limit, np.float64) / 1e3, (1, len(prompt)))

    limits = {name: seconds(limit) for name, limit in given.items() if limit is not None}
    statistics = tuple((limit.latency, seconds(limit.limit_ms), limit.share) for limit in slo.statistics)
    if not slo.is_given:
        raise SpecError(
            "a plan needs limits to meet: give --ttft 500ms --tpot 50ms, or slo: {ttft_ms: 500, tpot_ms: 50}."
        )
    return _Wanted(limits, attainment, statistics)


def _over(values: Floats, base: float) -> Floats:
    """Ratios; 1 where there is nothing to compare (no token after the first)."""
    return values / base if 0 < base < np.inf else np.ones(len(values))


def _service(candidates: Sequence[Candidate], surfaces: Surfaces, prompts: Surfaces, demand: Demand) -> Service:
    def column(values: list[float]) -> Floats:
        return np.array(values, np.float64)[:, None]

    held = [candidate.memory.max_batch(max(int(demand.context), 1)) for candidate in candidates]
    moved = [_transfer(candidate) for candidate in candidates]
    server = profile_of(candidates[0].layout.scenario.engine).server
    ones = np.ones((len(candidates), 1))
    return Service(
        surfaces,
        prompts,
        column([max(1, min(c.max_num_seqs, n)) for c, n in zip(candidates, held, strict=True)]),
        column([_budget(c) for c in candidates]),
        column(
            [c.ratio[0] * c.prefill_layout.scenario.engine.data_parallel_size if c.ratio else 0 for c in candidates]
        ),
        column([c.num_engines for c in candidates]),
        (column([start for start, _ in moved]), column([per_token for _, per_token in moved])),
        (
            (server.in_s + server.out_s) * ones,
            server.in_per_prompt_token_s * ones,
            server.out_per_sequence_s * ones,
        ),
        column([float(c.layout.scenario.engine.plans_ahead) for c in candidates]),
    )


def _engines(candidate: Candidate) -> tuple[Engine, Engine]:
    """Engines that decode, and engines that compute prompts (the same, unless disaggregated)."""
    of_prompts = candidate.prefill or candidate
    return (candidate.layout, candidate.max_num_batched_tokens), (of_prompts.layout, of_prompts.max_num_batched_tokens)


def _budget(candidate: Candidate) -> int:
    """Tokens of a step of the engines that compute prompts: of a plan for each stage."""
    layout, tokens = _engines(candidate)[1]
    return layout.scenario.engine.pipeline_parallel_size * tokens


def _transfer(candidate: Candidate) -> tuple[float, float]:
    """Seconds to hand a prompt's KV on: before its first token, and for each."""
    if candidate.ratio is None:
        return 0.0, 0.0
    ends = [layout.scenario for layout in (candidate.prefill_layout, candidate.layout)]
    source, target = (candidate.layout.kv_transfer.link_of(end.hardware) for end in ends)
    cost = transfer_cost(ends[0], ends[1], source, target)
    none, some = cost.duration_s(0), cost.duration_s(10_000)
    return none, (some - none) / 10_000


def _highest(service: Service, demand: Demand, wanted: _Wanted) -> Floats:
    """The highest rate of each candidate at which typical requests are as wanted; 0 if none."""
    step = service.surfaces.decode(service.slots) / service.surfaces.tokens(service.slots)
    high = service.decodes * service.slots / (demand.mean_outputs * step)
    low = high / _WIDEST
    is_ever = _is_met(serve(service, demand, low), demand, wanted)
    for _ in range(_HALVINGS):
        middle = np.sqrt(low * high)
        is_met = _is_met(serve(service, demand, middle), demand, wanted)
        low, high = np.where(is_met, middle, low), np.where(is_met, high, middle)
    return np.where(is_ever, low, 0.0)


def _is_met(served: Served, demand: Demand, wanted: _Wanted) -> NDArray[np.bool_]:
    """Whether enough typical requests meet all limits together, and each statistic's by itself."""
    good = np.ones(served.ttft.shape, dtype=bool)
    for name, limit in wanted.limits.items():
        good &= _seconds(served, demand, name) <= limit
    is_met: NDArray[np.bool_] = good.mean(axis=1, keepdims=True) >= wanted.attainment
    for name, limit, share in wanted.statistics:
        seconds = _seconds(served, demand, name)
        if share is None:
            is_met &= (seconds / limit).mean(axis=1, keepdims=True) <= 1
        else:
            is_met &= (seconds <= limit).mean(axis=1, keepdims=True) >= share
    return is_met


def _seconds(served: Served, demand: Demand, metric: str) -> Floats:
    """A latency of typical requests; TPOT of an answer of one token is nothing. Gaps between tokens (itl) are taken to
    be as long as their mean."""
    later = np.maximum(demand.typical[2][None, :] - 1, 0.0)
    if metric == "ttft":
        return served.ttft
    if metric in ("tpot", "itl"):
        return np.where(later > 0, served.tpot, 0.0)
    if metric == "e2el":
        # Where no rate is sustained tokens take for ever, which an answer of one token does not wait for.
        return served.ttft + np.multiply(later, served.tpot, out=np.zeros(served.ttft.shape), where=later > 0)
    assert served.single is not None  # the demand has asked for it
    if metric == "max_itl":
        return np.where(later > 0, np.where(served.is_stable, served.single.gap, np.inf), 0.0)
    speed = demand.reading_speed or np.inf  # reading: until the next token is there to be read, at worst
    wait = np.maximum(served.single.reader_wait(speed), later * (served.tpot - 1.0 / speed))
    return np.where(later > 0, wait, 0.0) + 1.0 / speed


def _binding(
    candidates: Sequence[Candidate], service: Service, beyond: Served, demand: Demand, wanted: _Wanted
) -> list[str]:
    """What is missed most often, relative to how often it may be, a little above the highest rate; of a mean, how far
    it is beyond its limit."""
    names = [name for name, _, _ in wanted.all_limits]
    limits = [limit for _, limit, _ in wanted.all_limits]
    missed = []
    for name, limit, share in wanted.all_limits:
        seconds = _seconds(beyond, demand, name)
        if share is None:
            missed.append((seconds / limit).mean(axis=1))
        else:
            missed.append((seconds > limit).mean(axis=1) / (1 - share))
    most = np.array(missed).argmax(axis=0)
    binding = []
    for index, candidate in enumerate(candidates):
        name = names[most[index]]
        if name in ("ttft", "e2el") and beyond.slot_wait[index, 0] > _MUCH * limits[most[index]].mean():
            name = "max_num_seqs" if service.slots[index, 0] >= candidate.max_num_seqs else "KV cache"
        binding.append(name)
    return binding


_PARTS = 48  # of the tail


@dataclass(frozen=True)
class _JobTimes:
    """A row of one column for each candidate. seconds: of the job; pace: requests a second of an engine while its slots
    are taken; batch: sequences that decode then."""

    seconds: Floats
    pace: Floats
    batch: Floats


def _job_times(
    surfaces: Surfaces, slots: Floats, budget: Floats, engines: Floats, requests: Floats, demand: Demand
) -> _JobTimes:
    """Times of a job of `requests` on each of `engines` engines, with `slots` sequences and `budget` tokens in a step.

    surfaces: step times of the candidates; demand: lengths of the job's prompts and answers
    """
    prompt, answer = demand.mean_prompt, demand.mean_outputs
    full, step = _steady(surfaces, slots, budget, demand)
    brought = surfaces.tokens(full)
    pace = full * brought / (answer * step)
    batch = np.minimum(full, requests)
    alone = surfaces.decode(np.maximum(batch, 1.0)) / surfaces.tokens(np.maximum(batch, 1.0))
    rests = _rests(demand.outputs)
    mean_rest = float((demand.outputs**2).sum() / (2 * demand.outputs.sum()))
    ahead = ndtri((engines - 0.375) / (engines + 0.25)) * np.sqrt(requests) * float(demand.outputs.std())
    many = requests / pace - mean_rest * alone + _drained(surfaces, batch, engines, *rests)
    many = many + np.maximum(ahead, 0.0) * alone / batch
    room = np.maximum(budget - batch / 2, 1.0)
    steps = np.maximum(requests * prompt / room, 1.0)
    context = mean_context(surfaces, demand, room)
    prompts = steps * surfaces.beside(batch / 2, np.minimum(requests * prompt, room)) + requests * context
    few = prompts + _drained(surfaces, batch, engines, *_whole(demand.outputs))
    return _JobTimes(np.where(requests > full, many, few), pace, full)


def _steady(surfaces: Surfaces, slots: Floats, budget: Floats, demand: Demand) -> tuple[Floats, Floats]:
    """Sequences that decode, and seconds of a step."""
    prompt, answer = demand.mean_prompt, demand.mean_outputs
    brought = surfaces.tokens(slots)
    held_back = answer * budget / (prompt * brought + answer)
    batch = np.maximum(np.minimum(slots, held_back), 1.0)
    tokens = np.minimum(batch * brought * prompt / answer, np.maximum(budget - batch, 1.0))
    size = np.minimum(np.maximum(tokens, prompt), np.maximum(budget - batch, 1.0))
    share = tokens / size  # of steps that have prompts: whole ones, where a step's share is less than one
    step = (1 - share) * surfaces.decode(batch) + share * surfaces.beside(batch, size)
    return batch, step + tokens / prompt * mean_context(surfaces, demand, np.maximum(budget - batch, 1.0))


def _whole(outputs: Floats) -> tuple[Floats, Floats]:
    """(share of answers that are at most so long, so long)."""
    lengths = np.sort(outputs)
    return (np.arange(len(lengths)) + 1.0) / len(lengths), lengths


def _rests(outputs: Floats) -> tuple[Floats, Floats]:
    """(share of answers under way that have at most so much left, so much)."""
    lengths = np.concatenate([[0.0], np.sort(outputs)])
    longer = 1.0 - np.arange(len(outputs)) / len(outputs)  # share of answers above lengths[i]
    shares = np.concatenate([[0.0], np.cumsum(longer * np.diff(lengths))])
    return shares / shares[-1], lengths


def _drained(surfaces: Surfaces, batch: Floats, engines: Floats, shares: Floats, lengths: Floats) -> Floats:
    """Seconds until the last of `batch` answers on each engine ends, of lengths distributed so."""
    last = 0.5 / np.maximum(batch * engines, 1.0)
    left = last ** (np.arange(_PARTS + 1)[None, :] / _PARTS)  # from all to the last
    ends = np.interp(1.0 - left, shares, lengths)
    ends[:, 0] = 0.0
    between = np.maximum(batch * np.sqrt(left[:, 1:] * left[:, :-1]), 1.0)
    step = surfaces.decode(between) / surfaces.tokens(between)
    found: Floats = (np.diff(ends, axis=1) * step).sum(axis=1, keepdims=True)
    return found


class JobScreen:
    """Times and costs of unified candidates for the offline job of `scenario`, in closed form."""

    def __init__(self, candidates: Sequence[Candidate], scenario: Scenario, spec: PlanSpec) -> None:
        self._candidates, self._spec = candidates, spec
        self._num_requests = scenario.traffic.num_requests or 0
        self._demand = demand = demand_of(scenario)
        batches = max((each.max_num_seqs for each in candidates), default=1)
        chunk = max(map(_job_budget, candidates), default=1)
        self._grid = demand.context, demand.mean_prompt, batches, chunk
        engines = {_job_key(each): each.layout.scenario for each in candidates}
        self._surfaces = {key: step_surface(engine, *self._grid, key[1]) for key, engine in engines.items()}

    def jobs(self) -> list[Job]:
        """The job on every number of replicas that is allowed of every candidate."""
        rows = [(each, count) for each in self._candidates for count in self.allowed(each)]
        found: list[Job] = []
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            seconds = self._seconds(part, self._read(part))
            found += [Job(each, count, float(s)) for (each, count), s in zip(part, seconds[:, 0], strict=True)]
        return found

    def origin(self, candidate: Candidate) -> str:
        """Origin of the candidate's step times."""
        return self._surfaces[_job_key(candidate)].origin

    def allowed(self, candidate: Candidate) -> list[int]:
        """Numbers of replicas within what may be spent, no more than there are requests."""
        spec, price = self._spec, candidate.usd_per_hour
        most = min(spec.max_gpus // candidate.num_devices, self._num_requests)
        if spec.budget_usd_per_hour is not None and price:
            most = min(most, int(spec.budget_usd_per_hour / price))
        return [count for count in spec.space.replicas or range(1, most + 1) if count <= most]

    def under_draws(self, jobs: Sequence[Job]) -> list[Job]:
        """The same jobs with their spread under common draws of the calibration's errors."""
        known, found = SharedScores(), []
        engines = {_job_key(job.candidate): job.candidate.layout.scenario for job in jobs}
        read = {
            key: Surfaces(
                drawn_surfaces(engine, (*self._grid, key[1]), known.of(engine), False)[0], np.arange(NUM_DRAWS)
            )
            for key, engine in engines.items()
        }
        for job in jobs:
            row = [(job.candidate, job.replicas)]
            base = self._seconds(row, self._read(row))
            drawn = self._seconds(row * NUM_DRAWS, read[_job_key(job.candidate)])
            found.append(replace(job, drawn=drawn[:, 0] / base[0, 0]))
        return found

    def _read(self, rows: Sequence[tuple[Candidate, int]]) -> Surfaces:
        used = list(dict.fromkeys(_job_key(each) for each, _ in rows))
        place = {key: index for index, key in enumerate(used)}
        which = np.array([place[_job_key(each)] for each, _ in rows], np.intp)
        return Surfaces([self._surfaces[key] for key in used], which)

    def _seconds(self, rows: Sequence[tuple[Candidate, int]], surfaces: Surfaces) -> Floats:
        def column(values: list[float]) -> Floats:
            return np.array(values, np.float64)[:, None]

        context = max(int(self._demand.context), 1)
        slots = column([max(1, min(each.max_num_seqs, each.memory.max_batch(context))) for each, _ in rows])
        budget = column([float(_job_budget(each)) for each, _ in rows])
        engines = column([float(count * each.num_engines) for each, count in rows])
        requests = np.ceil(self._num_requests / engines)
        return _job_times(surfaces, slots, budget, engines, requests, self._demand).seconds


def _job_key(candidate: Candidate) -> tuple[int, int]:
    """What a candidate's step times depend on; the size of a step matters only on pipeline stages."""
    has_stages = candidate.layout.scenario.engine.pipeline_parallel_size > 1
    return id(candidate.layout), candidate.max_num_batched_tokens if has_stages else 0


def _job_budget(candidate: Candidate) -> int:
    """Tokens of a step: of a plan for each stage."""
    return candidate.layout.scenario.engine.pipeline_parallel_size * candidate.max_num_batched_tokens
