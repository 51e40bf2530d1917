"""Stage one of a plan: the highest rate under the SLO of every candidate in closed form, by vectorized bisection. Step
times come from the simulator's tables (`surfaces`), waiting times from `service`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perfmodel.cost import profile_of
from perfmodel.errors import SpecError
from perfmodel.planning.encoders import encoding_s, processing_s
from perfmodel.planning.finalist import Screened
from perfmodel.planning.service import Bools, Demand, Served, Service, demand_of, serve
from perfmodel.planning.space import Candidate
from perfmodel.planning.surfaces import NUM_DRAWS, Drawn, Engine, EngineSurfaces, Floats, Surfaces
from perfmodel.sim.fleet.kv_transfer import transfer_cost
from perfmodel.specs.hardware import GivenLink
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.slo import SLO

_AT_ONCE = 400  # candidates: as many rows as stay in a processor's cache
_HALVINGS = 10
_WIDEST = 1e3  # highest to lowest rate that is looked at
_MUCH = 0.05  # of a limit spent waiting for a slot: then slots are the bottleneck
_BEYOND = 1.05  # times the highest rate, at which the binding limit is determined


# (metric -> limits of typical requests in seconds, a column each; the share of requests that must meet all of them
# together, or None: the mean must meet the only limit)
Goals = list[tuple[dict[str, Floats], float | None]]


class ClosedForm:
    """Step times of `candidates` for the traffic of `scenario`, or another `demand`."""

    def __init__(self, candidates: Sequence[Candidate], scenario: Scenario, demand: Demand | None = None) -> None:
        self.demand, self._candidates = demand or demand_of(scenario), candidates
        batches = max((candidate.max_num_seqs for candidate in candidates), default=1)
        chunk = max((max(c.max_num_batched_tokens, budget_of(c)) for c in candidates), default=1)
        engines = (engine for candidate in candidates for engine in engines_of(candidate))
        self._engines = EngineSurfaces(engines, self.demand.context, self.demand.mean_prompt, batches, chunk)

    def origin(self, candidate: Candidate) -> str:
        """Origin of the candidate's step times."""
        return self._engines.origin(*engines_of(candidate))

    def _service(self, candidates: Sequence[Candidate]) -> Service:
        surfaces = self._engines.read([engines_of(candidate)[0] for candidate in candidates])
        prompts = surfaces
        if any(candidate.prefill is not None for candidate in candidates):
            prompts = self._engines.read([engines_of(candidate)[1] for candidate in candidates])
        return _service(candidates, surfaces, prompts, self.demand)


class Screen(ClosedForm):
    """Screens `candidates` for the traffic (or another `demand`) and the SLO of `scenario`, which `attainment` of the
    requests have to meet. Raises SpecError without an SLO."""

    def __init__(
        self, candidates: Sequence[Candidate], scenario: Scenario, attainment: float, demand: Demand | None = None
    ) -> None:
        super().__init__(candidates, scenario, demand)
        self._goals, self._attainment = goals_of(scenario.slo, self.demand, attainment), attainment

    def all(self) -> list[Screened]:
        """Every candidate, in order."""
        screened: list[Screened] = []
        for start in range(0, len(self._candidates), _AT_ONCE):
            candidates = self._candidates[start : start + _AT_ONCE]
            service = self._service(candidates)
            rate = _highest(service, self.demand, self._goals)
            at = serve(service, self.demand, np.maximum(rate, 1e-9))
            beyond = serve(service, self.demand, np.maximum(rate, 1e-9) * _BEYOND)
            binds = _binding(candidates, service, beyond, self.demand, self._goals)
            for i, candidate in enumerate(candidates):
                batch, origin = float(at.batch[i, 0]), self.origin(candidate)
                screened.append(Screened(candidate, float(rate[i, 0]), binds[i], batch, origin))
        return screened

    def tightness(self, chosen: Sequence[Screened], rates: Sequence[float]) -> list[float]:
        """Per candidate at its rate, the smallest factor on all limits at which the required share meets them."""
        tightness: list[float] = []
        for start in range(0, len(chosen), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            service = self._service([one.candidate for one in chosen[part]])
            served = serve(service, self.demand, np.array(rates[part])[:, None])
            parts = []
            for limits, share in self._goals:
                used = np.max([_seconds(served, self.demand, name) / limit for name, limit in limits.items()], axis=0)
                parts.append(used.mean(axis=1) if share is None else _quantile(used, share))
            tightness += np.max(parts, axis=0).tolist()
        return tightness

    def under_draws(self, chosen: Sequence[Screened], rates: Sequence[float]) -> list[Drawn]:
        """Factors on rate and latencies of each candidate at its rate, under common calibration draws."""
        return [self._under_draws(one.candidate, rate) for one, rate in zip(chosen, rates, strict=True)]

    def _under_draws(self, candidate: Candidate, rate: float) -> Drawn:
        plain, (of_decode, of_prompts) = self._service([candidate]), engines_of(candidate)
        decode, server = self._engines.drawn(of_decode, candidate.ratio is not None)
        prompts = decode
        if of_prompts != of_decode:
            prompts, server = self._engines.drawn(of_prompts, candidate.ratio is not None)
        fixed, per_token, per_sequence = (part * server[:, None] for part in plain.front_end)
        factor = server[:, None]
        stations = tuple(
            (name, busy * factor, alone * factor) if name == _PROCESSING else (name, busy, alone)
            for name, busy, alone in plain.stations
        )
        front_end = fixed, per_token, per_sequence
        drawn = replace(plain, surfaces=decode, prompts=prompts, front_end=front_end, stations=stations)

        def over(values: Floats, base: float) -> Floats:
            # 1 where there is nothing to compare (no token after the first).
            return values / base if 0 < base < np.inf else np.ones(len(values))

        latencies = {}
        base, varied = (serve(one, self.demand, np.full((n, 1), rate)) for one, n in ((plain, 1), (drawn, NUM_DRAWS)))
        for name in ("ttft", "tpot", "itl", "e2el"):
            now, values = (_quantile(_seconds(one, self.demand, name), self._attainment) for one in (base, varied))
            latencies[name] = over(values, float(now[0]))
        most, highest = (_highest(one, self.demand, self._goals)[:, 0] for one in (plain, drawn))
        return Drawn(over(highest, float(most[0])), latencies)


def _quantile(values: Floats, share: float) -> Floats:
    """The quantile `share` over typical requests."""
    return np.quantile(values, share, axis=1, method="higher")


def goals_of(slo: SLO, demand: Demand, attainment: float) -> Goals:
    """Limits of `slo` for the demand's typical requests: those that the share `attainment` has to meet, then each
    statistic. Raises SpecError without any."""
    prompt, cached, _ = demand.typical
    whole = slo.ttft_ms if slo.ttft_ms_per_input_token is None else slo.ttft_limit_ms(prompt + cached)
    given = {"ttft": whole, "tpot": slo.tpot_limit_ms, "max_itl": slo.max_itl_ms, "e2el": slo.e2el_ms}
    if slo.reading_speed is not None:
        given["reading"] = slo.reading_wait_ms + 1e3 / slo.reading_speed

    def seconds(limit: Any) -> Floats:
        return np.broadcast_to(np.asarray(limit, np.float64) / 1e3, (1, len(prompt)))

    limits = {name: seconds(limit) for name, limit in given.items() if limit is not None}
    if not slo.is_given:
        raise SpecError(
            "a plan needs limits to meet: give --ttft 500ms --tpot 50ms, or slo: {ttft_ms: 500, tpot_ms: 50}."
        )
    statistics: Goals = [({limit.latency: seconds(limit.limit_ms)}, limit.share) for limit in slo.statistics]
    return [(limits, attainment), *statistics] if limits else statistics


def _service(candidates: Sequence[Candidate], surfaces: Surfaces, prompts: Surfaces, demand: Demand) -> Service:
    def column(values: Iterable[float]) -> Floats:
        return np.array(list(values), np.float64)[:, None]

    context = max(int(demand.context), 1)
    transfer = [_transfer(candidate) for candidate in candidates]
    server = profile_of(candidates[0].layout.scenario.engine).server
    ones = np.ones((len(candidates), 1))
    has_images = candidates[0].layout.scenario.traffic.images is not None
    passed = [(name, zip(*map(station, candidates), strict=True)) for name, station in _STATIONS if has_images]
    prefills = (
        c.ratio[0] * c.num_behind_encoders * c.prefill_layout.scenario.engine.data_parallel_size if c.ratio else 0
        for c in candidates
    )
    return Service(
        surfaces,
        prompts,
        column(max(1, min(c.max_num_seqs, c.memory.max_batch(context))) for c in candidates),
        column(budget_of(c) for c in candidates),
        column(prefills),
        column(c.num_engines for c in candidates),
        (column(start for start, _ in transfer), column(per_token for _, per_token in transfer)),
        ((server.in_s + server.out_s) * ones, server.in_per_prompt_token_s * ones, server.out_per_sequence_s * ones),
        column(float(c.layout.scenario.engine.plans_ahead) for c in candidates),
        tuple((name, column(busy), column(alone)) for name, (busy, alone) in passed),
    )


def engines_of(candidate: Candidate) -> tuple[Engine, Engine]:
    """The engines that decode and those that prefill (the same, unless disaggregated)."""
    of_prompts = candidate.prefill or candidate
    return (
        (candidate.layout.scenario, candidate.max_num_batched_tokens, candidate.encoders is None),
        (of_prompts.layout.scenario, of_prompts.max_num_batched_tokens, candidate.encoders is None),
    )


def budget_of(candidate: Candidate) -> int:
    """Token budget per step of the prefill engines; per plan with pipeline stages."""
    scenario, tokens, _ = engines_of(candidate)[1]
    return scenario.engine.pipeline_parallel_size * tokens


def _transfer(candidate: Candidate) -> tuple[float, float]:
    """KV transfer time of a prompt in seconds: (before its first token, per token)."""
    if candidate.ratio is None:
        return 0.0, 0.0
    ends = [layout.scenario for layout in (candidate.prefill_layout, candidate.layout)]
    source, target = (candidate.layout.kv_transfer.link_of(end.hardware) for end in ends)
    cost = transfer_cost(ends[0], ends[1], source, target)
    none, some = cost.duration_s(0), cost.duration_s(10_000)
    return none, (some - none) / 10_000


def _encoding(candidate: Candidate) -> tuple[float, float]:
    if candidate.encoders is None:
        return 0.0, 0.0
    link = GivenLink.model_validate(candidate.layout.cluster.get("ec_transfer") or {})
    return encoding_s(candidate.encoders.layout.scenario, candidate.encoders.ratio[0], link)


def _processed(candidate: Candidate) -> tuple[float, float]:
    """At the engines that read the images' tokens."""
    engine, count = candidate.prefill_layout.scenario.engine, candidate.ratio[0] if candidate.ratio is not None else 1
    num_servers = count * candidate.num_behind_encoders * (engine.api_server_count or engine.data_parallel_size)
    return processing_s(candidate.layout.scenario, num_servers)


def _processed_to_encode(candidate: Candidate) -> tuple[float, float]:
    if candidate.encoders is None:
        return 0.0, 0.0
    scenario, count = candidate.encoders.layout.scenario, candidate.encoders.ratio[0]
    return processing_s(scenario, count * (scenario.engine.api_server_count or 1), is_apart=True)


_PROCESSING = "image processing"
_STATIONS = ((_PROCESSING, _processed_to_encode), ("encoders", _encoding), (_PROCESSING, _processed))


def _highest(service: Service, demand: Demand, goals: Goals) -> Floats:
    """The highest rate of each candidate that meets the limits; 0 if none."""
    step = service.surfaces.decode(service.slots) / service.surfaces.tokens(service.slots)
    high = service.decodes * service.slots / (demand.mean_outputs * step)
    low = high / _WIDEST
    is_ever = _is_met(serve(service, demand, low), demand, goals)
    for _ in range(_HALVINGS):
        middle = np.sqrt(low * high)
        is_met = _is_met(serve(service, demand, middle), demand, goals)
        low, high = np.where(is_met, middle, low), np.where(is_met, high, middle)
    return np.where(is_ever, low, 0.0)


def _is_met(served: Served, demand: Demand, goals: Goals) -> Bools:
    """Whether enough typical requests meet all limits together, and each statistic holds."""
    is_met = np.ones((len(served.ttft), 1), dtype=bool)
    for limits, share in goals:
        pairs = [(_seconds(served, demand, name), limit) for name, limit in limits.items()]
        if share is None:
            ((seconds, limit),) = pairs
            is_met &= (seconds / limit).mean(axis=1, keepdims=True) <= 1
        else:
            good = np.all([seconds <= limit for seconds, limit in pairs], axis=0)
            is_met &= good.mean(axis=1, keepdims=True) >= share
    return is_met


def _seconds(served: Served, demand: Demand, metric: str) -> Floats:
    """A latency of typical requests; TPOT of a one-token answer is 0. Token gaps (itl) are taken at their mean."""
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
    candidates: Sequence[Candidate], service: Service, beyond: Served, demand: Demand, goals: Goals
) -> list[str]:
    """The limit missed most, relative to what is allowed, a little above the highest rate; of a mean, its excess."""
    limits, missed = [(name, limit, share) for group, share in goals for name, limit in group.items()], []
    for name, limit, share in limits:
        seconds = _seconds(beyond, demand, name)
        rows = (seconds / limit).mean(axis=1) if share is None else (seconds > limit).mean(axis=1) / (1 - share)
        missed.append(rows)
    binding = []
    for index, (candidate, most) in enumerate(zip(candidates, np.array(missed).argmax(axis=0), strict=True)):
        name, limit, _ = limits[most]
        if name in ("ttft", "e2el") and beyond.slot_wait[index, 0] > _MUCH * limit.mean():
            name = "max_num_seqs" if service.slots[index, 0] >= candidate.max_num_seqs else "KV cache"
        elif name in ("ttft", "e2el"):
            waits = [float(wait[index, 0]) for wait in beyond.station_waits]
            if waits and max(waits) > _MUCH * limit.mean():
                name = service.stations[waits.index(max(waits))][0]
        binding.append(name)
    return binding
