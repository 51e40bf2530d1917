"""Published setups beside predictions: each as the steps that one of its instances takes.

A saturated engine has B sequences that decode, as many as its KV blocks hold, and for each that ends a prompt that
comes: with o tokens an answer, p a prompt and T a step, on average

    tokens/s = B / T( B decodes, B / o prompts of p tokens )          B' < B where the token budget is full

All other loads are simulated, for as long as it takes to reach the steady state.
"""

__all__ = ["ServedPair", "predict_row", "predict_served"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from perfmodel.calibrate.local.devices import DeviceTable
from perfmodel.calibrate.over_cores import over_cores
from perfmodel.calibrate.served.scenarios import ServedModel, layouts, scenario_of, served_device
from perfmodel.calibrate.served.setups import ServedRow, Setup
from perfmodel.cost import (
    Calibration,
    EngineProfile,
    HostFit,
    ServerFit,
    load_calibration,
    load_engine_profile,
    plan_memory,
    step_costs,
)
from perfmodel.cost.calibrations.backends import engine_calibration
from perfmodel.cost.calibrations.whole_runs import WholeRunFits, whole_run_calibration
from perfmodel.cost.steps.pricer import StepPricer
from perfmodel.cost.steps.tables import PS_PER_S
from perfmodel.errors import PerfmodelError
from perfmodel.ops.work import BatchShape, windowed_contexts
from perfmodel.sim import RequestColumns, simulate
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Lengths

Progress = Callable[[int, int], None]
_MOST_REQUESTS = 4000
_MOST_LOAD = 0.95  # of what is predicted to be the capacity: a result that counts had finite queues
_STATES = 40  # sizes of batches that are looked at
_MEAN_OF_P99 = 0.85  # mean TPOT over its 99th percentile, on a server at its limit
_CAPACITY_DOUBT = 1.15  # of what is predicted to be the highest rate
_MOST_BUSY = 0.95  # of the time, with prompts, of a server that keeps its limits
_P99_SCORES = 2.3  # standard deviations


@dataclass(frozen=True)
class ServedPair:
    """A result and what was predicted for it, by metric as in the row; a reason where it could not be.

    is_known: the model has a card; basis: how the device's steps are known
    """

    row: ServedRow
    predicted: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    is_known: bool = False
    basis: str = ""
    scenario: Scenario | None = None


@dataclass(frozen=True)
class _Work:
    """A setting that several rows share."""

    setup: Setup
    folder: Path
    fits: WholeRunFits | None = None


def predict_served(
    rows: Sequence[ServedRow], folder: Path, progress: Progress | None = None, fits: WholeRunFits | None = None
) -> list[ServedPair]:
    """A prediction for each row; setups that several rows share are predicted once.

    rows, progress: what to predict; called with (setups done, of how many)
    folder:         where `devices.csv` is
    fits:           of makers without kernel tables, in place of the committed ones
    """
    setups = list(dict.fromkeys(row.setup for row in rows))
    found = over_cores(_predicted, [_Work(setup, folder, fits) for setup in setups], _alike, progress)
    by_setup = dict(zip(setups, found, strict=True))
    return [replace(by_setup[row.setup], row=row) for row in rows]


def predict_row(row: ServedRow, folder: Path, fits: WholeRunFits | None = None) -> ServedPair:
    """The prediction for one row; folder, fits: as of `predict_served`"""
    return replace(_predicted(_Work(row.setup, folder, fits)), row=row)


def _alike(work: _Work) -> tuple[str, ...]:
    setup = work.setup
    return setup.device, setup.engine, setup.model, setup.precision, str(setup.tp)


_NO_ROW = ServedRow("", Setup("", "", 1, "", "", "", "", "", "burst", 1, 1), {}, {}, "")


def _predicted(work: _Work) -> ServedPair:
    try:
        return _of(work.setup, DeviceTable(work.folder), work.fits)
    except PerfmodelError as error:
        return ServedPair(_NO_ROW, reason=str(error))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return ServedPair(_NO_ROW, reason=f"it cannot be priced: {type(error).__name__}: {str(error).splitlines()[0]}")


def _of(setup: Setup, table: DeviceTable, fits: WholeRunFits | None = None) -> ServedPair:
    hardware = served_device(setup, table)
    scenario, model, steps = _laid_out(setup, table, layouts(setup, hardware), fits)
    instances = setup.instances if setup.tp else max(1, setup.num_devices // scenario.engine.num_devices)
    if setup.load == "saturated":
        predicted = {"tokens_per_s": instances * steps.saturated()}
    elif setup.tpot_limit_s or setup.beams > 1:
        predicted = _at_limits(steps, setup, instances)
    else:
        predicted = _simulated(setup, scenario, steps, instances)
    return ServedPair(_NO_ROW, predicted, "", model.is_known, steps.calibration.source, scenario)


def _laid_out(
    setup: Setup, table: DeviceTable, counts: Sequence[int], fits: WholeRunFits | None
) -> tuple[Scenario, ServedModel, "_Steps"]:
    """The layout that a submitter would choose: the first that keeps the limit on TPOT, or that serves most."""
    found: list[tuple[float, Scenario, ServedModel, _Steps]] = []
    reason: PerfmodelError | None = None
    for count in counts:
        try:
            scenario, model = scenario_of("", setup, table, count)
            steps = _Steps(setup, scenario, fits)
        except PerfmodelError as error:
            reason = reason or error
            continue
        if len(counts) == 1:
            return scenario, model, steps
        if setup.load == "open":
            found.append((steps.rate_at_limits() / count, scenario, model, steps))
        else:
            found.append((steps.saturated() / count, scenario, model, steps))
    if not found:
        assert reason is not None
        raise reason
    _, scenario, model, steps = max(found, key=lambda each: each[0])
    return scenario, model, steps


class _Steps:
    """Mean steps of an instance. Raises PerfmodelError where the model does not fit its devices."""

    def __init__(self, setup: Setup, scenario: Scenario, fits: WholeRunFits | None = None) -> None:
        self.setup, self.scenario = setup, scenario
        self.given = _given(scenario, fits)
        known = self.given or engine_calibration(scenario.hardware, scenario.engine)
        self.profile = _profile_of(setup, known)
        costs = step_costs(scenario, self.given, self.profile)
        self.calibration: Calibration = costs.calibration
        self._pricer: StepPricer = costs.pricer()
        self._spans = scenario.model.attention_spans
        engine = scenario.engine
        spread = _spread(scenario.traffic.output_tokens)
        self._context = max(1, round(setup.prompt + setup.answer / 2 * (1 + spread**2)))
        plan = plan_memory(scenario.model, scenario.hardware, engine)
        held = setup.prompt + setup.beams * (self._context - setup.prompt)
        self._slots = max(1, min(plan.max_batch(held), engine.max_num_seqs))
        self._exclusive = describe_prefill(scenario)

    def seconds(self, slots: float, arriving: float) -> float:
        """Of a mean step with `slots` requests that decode and so many prompts that arrive; between whole numbers of
        prompts, so many steps have one more."""
        decodes = max(1, round(slots * self.setup.beams))
        size, parts = self._part(decodes)
        prompts = arriving * parts
        if self._exclusive:
            return self._price(decodes, 0, 0) + prompts * self._price(0, 1, size)
        fewer = int(prompts)
        more = prompts - fewer
        return (1 - more) * self._price(decodes, fewer, size) + (more and more * self._price(decodes, fewer + 1, size))

    def _part(self, decodes: int) -> tuple[int, int]:
        """(tokens of a prompt that one step computes, steps that the prompt takes)"""
        budget = self.scenario.engine.max_num_batched_tokens
        room = max(budget if self._exclusive else budget - decodes, 1)
        parts = -(-self.setup.prompt // room)
        return max(2, -(-self.setup.prompt // parts)), parts

    def _price(self, decodes: int, prompts: int, size: int) -> float:
        """Seconds of a step with so many decodes, and prompts or parts of them of `size` tokens."""
        cached = (self.setup.prompt - size) // 2 if size else 0
        summed = decodes * self._context
        windowed = windowed_contexts(decodes, summed, self._spans) if decodes else ()
        tokens, samples = decodes + prompts * size, decodes + prompts
        shape = BatchShape(tokens, samples, ((size, cached),) * prompts, decodes, summed, windowed)
        return self._pricer.price(shape) / PS_PER_S

    def saturated(self) -> float:
        """Tokens of answers per second of an instance that always has requests waiting."""
        return self._served(self.most_slots) * max(self.setup.answer, 1)

    @property
    def most_slots(self) -> float:
        """Requests that decode at once at most: by KV blocks, the engine's arguments and a full token budget."""
        if self._exclusive:
            return self._slots
        answer, room = max(self.setup.answer, 1), self.scenario.engine.max_num_batched_tokens
        return max(min(self._slots, room * answer / (self.setup.prompt + answer * self.setup.beams)), 1.0)

    def _step(self, slots: float) -> float:
        """Seconds of a mean step in which so many requests decode; as many prompts come as answers end."""
        return self.seconds(slots, slots / max(self.setup.answer, 1))

    def _served(self, slots: float) -> float:
        """Requests per second."""
        return slots / (max(self.setup.answer, 1) * self._step(slots))

    @cached_property
    def _states(self) -> list[tuple[float, float, float]]:
        """(requests per second, seconds of a mean step, requests that decode) of ever larger batches, as far as they
        serve more."""
        found: list[tuple[float, float, float]] = []
        for slots in np.geomspace(min(0.05, self.most_slots), self.most_slots, _STATES):
            step_s = self._step(slots)
            rate = slots / (max(self.setup.answer, 1) * step_s)
            if not found or rate > found[-1][0]:
                found.append((rate, step_s, slots))
        return found

    def open(self, rate: float) -> float:
        """Seconds of a mean step at so many requests per second, or at as many as the instance serves."""
        rates, steps, _ = zip(*self._states, strict=True)
        if rate < rates[-1]:
            return float(np.interp(rate, rates, steps))
        full = self._step(self.most_slots)  # as full as the limit on TPOT allows
        most = self.setup.tpot_limit_s * _MEAN_OF_P99 or full
        return max(min(full, most), steps[-1])

    def rate_at_limits(self) -> float:
        """The highest rate at which the limits on TPOT and TTFT are kept, requests per second."""
        most_tpot = self.setup.tpot_limit_s * _MEAN_OF_P99 or 1e9
        most_ttft = self.setup.ttft_limit_s or 1e9
        kept = [
            rate
            for rate, step_s, _ in self._states
            if step_s <= most_tpot and self.ttft(rate, step_s)[1] <= most_ttft
        ]
        return max(kept, default=self._states[0][0])

    def ttft(self, rate: float, step_s: float) -> tuple[float, float]:
        """(mean, 99th percentile) of TTFT at so many requests per second, with steps of `step_s` on average.

        Half a step until the next begins, one more where it was planned ahead, and the prompt's own. Prompts that take
        several steps wait for each other: an M/G/1 queue (Pollaczek and Khinchine; its tail taken as exponential).
        """
        decodes = max(1, round(rate * self.setup.answer * step_s * self.setup.beams))
        size, parts = self._part(decodes)
        own = self._price(0 if self._exclusive else decodes, 1, size)
        planned = float(self.scenario.engine.async_scheduling) + (self.setup.steps_at_once - 1) / 2
        begin, last = (0.5 + planned) * step_s, (1.0 + planned) * step_s
        if parts == 1:
            return begin + max(own, step_s), last + max(own, step_s)
        spread = _spread(self.scenario.traffic.input_tokens)
        busy = min(rate * own * parts, _MOST_BUSY)
        waiting = busy * own * parts * (1 + spread**2) / (2 * (1 - busy))
        late = waiting / busy * max(float(np.log(busy / 0.01)), 0.0)
        return begin + parts * own + waiting, last + parts * own * (1 + _P99_SCORES * spread) + late

    def offered(self, rate: float) -> float:
        """The rate at which a submission at `rate` is predicted: as high as the limits allow, unless it is far below.

        Submitters raise the rate until a limit binds. What is predicted of steps near capacity hangs on a few per
        cent of it, which no prediction has; so the prediction is made as near to its own capacity.
        """
        return min(max(self.rate_at_limits(), rate / _CAPACITY_DOUBT), rate * _CAPACITY_DOUBT)


def _at_limits(steps: _Steps, setup: Setup, instances: int) -> dict[str, float]:
    """Latencies of a submission in ms."""
    rate = steps.offered(setup.rate / instances)
    step_s = steps.open(rate)
    ttft, late = steps.ttft(rate, step_s)
    found = {"tpot_mean": step_s, "tpot_p99": step_s / _MEAN_OF_P99, "ttft_mean": ttft, "ttft_p99": late}
    found["e2el_mean"] = ttft + step_s * (setup.answer - 1)
    return {name: 1e3 * value for name, value in found.items()}


def describe_prefill(scenario: Scenario) -> bool:
    """Whether steps compute prompts or decode, never both."""
    engine = scenario.engine
    own = engine.prefill_exclusive
    return engine.described.facts.batching.prefill_exclusive if own is None else own


def _spread(lengths: Lengths | None) -> float:
    """Standard deviation over mean."""
    return (lengths.std or 0.0) / lengths.mean if lengths is not None and lengths.mean else 0.0


def _given(scenario: Scenario, fits: WholeRunFits | None) -> Calibration | None:
    """The calibration by `fits`, where they stand in for what is known of the device."""
    if fits is None or load_calibration(scenario.hardware, scenario.engine.profile).families.keys() - {"collective"}:
        return None
    return whole_run_calibration(scenario.hardware, scenario.engine.profile, fits)


def _profile_of(setup: Setup, calibration: Calibration) -> EngineProfile:
    """The engine's profile; without a server in front, or launches of a step that was compiled ahead. The host's time
    is the calibration's where whole runs have it."""
    profile = load_engine_profile(setup.engine)
    if calibration.host != HostFit():
        profile = profile.model_copy(update={"host": HostFit()})
    if setup.is_in_process:
        profile = profile.model_copy(update={"server": ServerFit()})
    if setup.is_compiled:
        none = {name: 0.0 for name in HostFit.model_fields if "prompt" in name}
        profile = profile.model_copy(update={"host": profile.host.model_copy(update=none)})
    return profile


def _simulated(setup: Setup, scenario: Scenario, steps: _Steps, instances: int) -> dict[str, float]:
    traffic = scenario.traffic
    if setup.load == "open":
        traffic = traffic.model_copy(update={"num_requests": min(traffic.num_requests or 1, _MOST_REQUESTS)})
    elif setup.load == "first_token":
        traffic = traffic.model_copy(update={"num_requests": 1})
    elif setup.load == "closed":
        slots = traffic.arrivals.concurrency or 1
        rounds = min(max((traffic.num_requests or 1) // slots, 2), 4 if slots > 2 else 2)
        traffic = traffic.model_copy(update={"num_requests": rounds * slots})
    else:
        traffic = traffic.model_copy(update={"num_requests": min(traffic.num_requests or 1, _MOST_REQUESTS)})
    result = simulate(scenario.model_copy(update={"traffic": traffic}), calibration=steps.given, profile=steps.profile, keep_steps=False)
    assert result.requests is not None
    return _metrics(result.requests, instances)


def _metrics(requests: RequestColumns, instances: int) -> dict[str, float]:
    """Means of the requests, ms; output tokens per second of all instances."""
    ttft, tpot, e2el = requests.ttft_s, requests.tpot_s, requests.e2el_s
    tpot = tpot[np.isfinite(tpot)]
    found = {"ttft_mean": float(ttft.mean()), "e2el_mean": float(e2el.mean())}
    if len(tpot):
        found["tpot_mean"] = float(tpot.mean())
    found = {name: 1e3 * value for name, value in found.items()}
    span = float(requests.finished_s.max() - requests.arrival_s.min())
    found["output_tokens_per_s"] = instances * float(requests.num_output_tokens.sum()) / max(span, 1e-9)
    return found
