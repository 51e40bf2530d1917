"""Predicts published results: saturated engines and benchmark submissions by mean steps, single batches and
single-machine tests by their steps, all others by simulation to the steady state.

`MeanSteps`: a saturated engine decodes B requests, as many as its KV blocks hold, and admits a prompt for each that
ends: with o tokens an answer, p a prompt and T a step, on average

    requests/s = B / (o T),    T = T( B decodes, B / o prompts of p tokens )

(fewer than B if the token budget is full); a server below that rate has the batch that serves just its rate.

Beams share their prompt's blocks. The kernel reads a prompt once per beam, and the beams' thread blocks run
concurrently: the first read comes from HBM, the others hit L2. With b beams, p prompt tokens, and a tokens behind it in
each beam, a step takes as long as one that reads from HBM

    p (1 + (b - 1) / s) + b a    tokens per request,

with s the speed of L2 over HBM reads: from kernel tables whose repeats keep KV in L2 (`FlashDecodeFit.cache_speedup`),
else the median over kernels.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from perfmodel.cost import (
    Calibration,
    EngineProfile,
    HostFit,
    OperatorTimer,
    Residuals,
    ServerFit,
    load_calibration,
    load_engine_profile,
    plan_memory,
    step_costs,
)
from perfmodel.cost.calibrations.backends import BackendFits, backend_calibration, engine_calibration
from perfmodel.cost.calibrations.draws import LogNormal
from perfmodel.cost.calibrations.files import calibrated_kernels
from perfmodel.cost.calibrations.whole_runs import WholeRunFits, load_whole_runs, whole_run_calibration
from perfmodel.cost.kernel_models.attention.decode import FlashDecodeFit
from perfmodel.cost.steps.cost_model import StepCostModel
from perfmodel.cost.steps.tables import PS_PER_S
from perfmodel.errors import DoesNotFitError, PerfmodelError
from perfmodel.evidence.observation import NO_INTERVAL, Interval, Observation, Prediction, Progress, predictions_of
from perfmodel.evidence.predict.recorded import requests_of, weighted_means, with_traffic
from perfmodel.evidence.sources.local import DeviceTable, LocalModel, LocalSetup, local_scenario, row_tests
from perfmodel.evidence.sources.setups import Setup, layouts, quantization_of, scenario_of, served_device
from perfmodel.ops.work import BatchShape, Work, windowed_contexts
from perfmodel.sim import RequestColumns, simulate
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_hardware
from perfmodel.specs.traffic import Lengths


def tokens_read(prompt: float, behind: float, beams: int, speedup: float) -> float:
    """KV tokens per beam and step as if all came from HBM, averaged over `beams`. prompt, behind: tokens of the prompt,
    and of each beam's answer; speedup: of L2 over HBM reads"""
    return prompt * (1 + (beams - 1) / speedup) / beams + behind


def cached_read_speedup(work: Work, hardware: HardwareSpec, calibration: Calibration) -> float:
    """L2 over HBM read speed of the decode attention kernel of `work`."""
    fit = OperatorTimer(hardware, calibration).fit(work)
    is_known = isinstance(fit, FlashDecodeFit) and "cache_speedup" in fit.model_fields_set
    return fit.cache_speedup if isinstance(fit, FlashDecodeFit) and is_known else _usual_speedup()


@lru_cache(maxsize=1)
def _usual_speedup() -> float:
    """Median over measured kernels faster from L2; 1 without any."""
    result = []
    for device, engine, _ in calibrated_kernels():
        fits = load_calibration(load_hardware(device), engine).families.values()
        result += [fit.cache_speedup for fit in fits if isinstance(fit, FlashDecodeFit) and fit.cache_speedup > 1.05]
    return float(np.median(result)) if result else 1.0


_STATES = 40  # sizes of batches that are looked at
_CAPACITY_DOUBT = 1.15  # of what is predicted to be the highest rate
_MAX_BUSY = 0.95  # of the time, with prompts, of a server that keeps its limits


class MeanSteps:
    """Mean steps of an instance. Raises PerfmodelError if the model does not fit."""

    def __init__(self, setup: Setup, scenario: Scenario, fits: WholeRunFits | None = None) -> None:
        self.setup, self.scenario = setup, scenario
        engine, hardware = scenario.engine, scenario.hardware
        # Calibrations by whole runs are of devices without kernel tables, under engines without fitted backends.
        self.given: Calibration | None = None
        if not (engine.described.facts.backends or has_kernel_tables(hardware, engine.profile)):
            self.given = whole_run_calibration(hardware, engine.profile, fits, or_others=True)
        self.profile = _profile_of(setup, self.given or engine_calibration(hardware, engine))
        costs = step_costs(scenario, self.given, self.profile)
        self.calibration: Calibration = costs.calibration
        self._cost_model: StepCostModel = costs.cost_model()
        self._spans = scenario.model.attention_spans
        spread = _spread(scenario.traffic.output_tokens)
        behind = setup.answer / 2 * (1 + spread**2)  # mean tokens of the answer that a sequence has, over its life
        self._context = self._read(setup.prompt, behind)
        plan = plan_memory(scenario.model, hardware, engine)
        self._slots = max(1, min(plan.max_batch(round(setup.prompt + setup.beams * behind)), engine.max_num_seqs))
        # Whether steps compute prompts or decode, never both.
        own = engine.prefill_exclusive
        self._exclusive = engine.described.facts.batching.prefill_exclusive if own is None else own
        committed = fits or load_whole_runs()
        self._tails = committed.tpot_tail, committed.ttft_tail
        self._answer = max(setup.answer, 1)

    def _read(self, prompt: int, behind: float) -> int:
        """Mean KV tokens that a decode's attention reads, with `behind` tokens after the prompt."""
        alone = max(1, round(prompt + behind))
        if self.setup.beams == 1:
            return alone
        step = self._cost_model.explain(BatchShape(1, 1, (), 1, alone, windowed_contexts(1, alone, self._spans)))
        attention = next((row.work for row in step.rows if row.work.family == "attention_decode"), None)
        if attention is None:
            return alone
        speedup = cached_read_speedup(attention, self.scenario.hardware, self.calibration)
        return max(1, round(tokens_read(prompt, behind, self.setup.beams, speedup)))

    def _part(self, decodes: int) -> tuple[int, int]:
        """(prompt tokens per step, steps per prompt)"""
        budget = self.scenario.engine.max_num_batched_tokens
        parts = -(-self.setup.prompt // max(budget if self._exclusive else budget - decodes, 1))
        return max(2, -(-self.setup.prompt // parts)), parts

    def _price(self, decodes: int, prompts: int, size: int) -> float:
        """Seconds of a step with `decodes` and `prompts` of (or cut to) `size` tokens."""
        cached = (self.setup.prompt - size) // 2 if size else 0
        summed = decodes * self._context
        windowed = windowed_contexts(decodes, summed, self._spans) if decodes else ()
        tokens, samples = decodes + prompts * size, decodes + prompts
        shape = BatchShape(tokens, samples, ((size, cached),) * prompts, decodes, summed, windowed)
        return float(self._cost_model.duration_ps(shape)) / PS_PER_S

    def _step(self, slots: float) -> float:
        """Seconds of a mean step with `slots` decodes and one prompt per finished answer, interpolated between
        prompts."""
        decodes, arriving = max(1, round(slots * self.setup.beams)), slots / self._answer
        size, parts = self._part(decodes)
        prompts = arriving * parts
        if self._exclusive:
            together = max(1, round(arriving)) if parts == 1 else 1
            return self._price(decodes, 0, 0) + prompts / together * self._price(0, together, size)
        fewer = int(prompts)
        more = prompts - fewer
        result = (1 - more) * self._price(decodes, fewer, size)
        return result + more * self._price(decodes, fewer + 1, size) if more else result

    @property
    def max_batch(self) -> float:
        """Most decoding requests, by KV blocks, engine arguments and token budget."""
        if self._exclusive:
            return self._slots
        room = self.scenario.engine.max_num_batched_tokens
        return max(min(self._slots, room * self._answer / (self.setup.prompt + self._answer * self.setup.beams)), 1.0)

    def _served(self, slots: float) -> float:
        """Requests/s."""
        return slots / (self._answer * self._step(slots))

    def saturated(self) -> float:
        """Output tokens/s of a saturated instance."""
        return self._served(self.max_batch) * self._answer

    @property
    def is_one_batch(self) -> bool:
        """Whether a burst's requests, alike in length, run as one batch throughout."""
        count = self.scenario.traffic.num_requests or 1
        has_backends = bool(self.scenario.engine.described.facts.backends)
        return not (self.setup.is_varied or has_backends) and count <= self._slots

    def batch(self, instances: int) -> dict[str, float]:
        """Latencies in ms, and output tokens/s over all instances, of one batch each."""
        count = self.scenario.traffic.num_requests or 1
        size, parts = self._part(0)
        together = max(1, self.scenario.engine.max_num_batched_tokens // size)
        steps = -(-count * parts // together)
        item = self._price(0, max(1, round(count * parts / steps)), size)
        step_s, later = self._price(count, 0, 0), max(self.setup.answer - 1, 0)
        whole = steps * item + later * step_s
        result = {"ttft_mean": (steps + 1) / 2 * item, "tpot_mean": step_s, "e2el_mean": whole}
        result = {name: 1e3 * value for name, value in result.items()}
        return result | {"output_tokens_per_s": instances * count * self.setup.answer / max(whole, 1e-9)}

    @cached_property
    def _states(self) -> list[tuple[float, float, float]]:
        """(requests/s, seconds of a mean step, decoding requests) for growing batches while throughput rises."""
        result: list[tuple[float, float, float]] = []
        for slots in np.geomspace(min(0.05, self.max_batch), self.max_batch, _STATES).tolist():
            step_s = self._step(slots)
            rate = slots / (self._answer * step_s)
            if not result or rate > result[-1][0]:
                result.append((rate, step_s, slots))
        return result

    def open(self, rate: float) -> float:
        """Seconds of a mean step at `rate` requests/s, capped at capacity."""
        rates, steps, _ = zip(*self._states, strict=True)
        if rate < rates[-1]:
            return float(np.interp(rate, rates, steps))
        full = self._step(self.max_batch)  # as full as the limit on TPOT allows
        most = self.setup.tpot_limit_s / self._tails[0] or full
        return max(min(full, most), float(steps[-1]))

    def rate_at_limits(self) -> float:
        """The highest rate within the TPOT and TTFT limits, requests/s."""
        most_tpot = self.setup.tpot_limit_s / self._tails[0] or 1e9
        most_ttft = self.setup.ttft_limit_s / self._tails[1] or 1e9
        kept = [
            rate for rate, step_s, _ in self._states if step_s <= most_tpot and self.ttft(rate, step_s) <= most_ttft
        ]
        return max(kept, default=self._states[0][0])

    def ttft(self, rate: float, step_s: float) -> float:
        """Mean TTFT in seconds at `rate` requests/s, with mean steps of `step_s`. Half a step until the next begins,
        one more if that was planned ahead, and the prompt's own. Prompts of several steps queue as M/G/1 (Pollaczek and
        Khinchine)."""
        decodes = max(1, round(rate * self.setup.answer * step_s * self.setup.beams))
        size, parts = self._part(decodes)
        own = self._price(0 if self._exclusive else decodes, 1, size)
        planned = float(self.scenario.engine.async_scheduling) + (self.setup.steps_at_once - 1) / 2
        begin = (0.5 + planned) * step_s
        if parts == 1:
            return begin + max(own, step_s)
        spread = _spread(self.scenario.traffic.input_tokens)
        busy = min(rate * own * parts, _MAX_BUSY)
        return begin + own * parts * (1 + busy * (1 + spread**2) / (2 * (1 - busy)))

    def at_limits(self, rate: float) -> dict[str, float]:
        """Latencies in ms of a submission served at `rate` requests/s."""
        rate = self.offered(rate)
        step_s = self.open(rate)
        ttft, (tpot_tail, ttft_tail) = self.ttft(rate, step_s), self._tails
        result = {"tpot_mean": step_s, "tpot_p99": step_s * tpot_tail, "ttft_mean": ttft, "ttft_p99": ttft * ttft_tail}
        result["e2el_mean"] = ttft + step_s * (self.setup.answer - 1)
        return {name: 1e3 * value for name, value in result.items()}

    def offered(self, rate: float) -> float:
        """The rate at which to predict a submission at `rate`: the highest that keeps its limits.

        Submitters raise the rate until a limit binds. Steps near capacity depend on a few per cent of it, beyond any
        prediction's accuracy; so predictions are made equally near the predicted capacity. Capacity is known better
        than waiting times, so the rate stays close to the served one.
        """
        if not self.setup.tpot_limit_s:
            return rate
        return max(self.rate_at_limits(), rate / _CAPACITY_DOUBT)


def _spread(lengths: Lengths | None) -> float:
    """Standard deviation / mean."""
    return (lengths.std or 0.0) / lengths.mean if lengths is not None and lengths.mean else 0.0


def has_kernel_tables(hardware: HardwareSpec, engine: str) -> bool:
    """Whether kernel tables exist for the device, or a related one, under `engine` (a name)."""
    return bool(load_calibration(hardware, engine).families.keys() - {"collective"})


def _profile_of(setup: Setup, calibration: Calibration) -> EngineProfile:
    """The engine's profile, without front end or launches of a step compiled ahead; host time of whole runs, if any."""
    profile = load_engine_profile(setup.engine)
    if calibration.host != HostFit():
        profile = profile.model_copy(update={"host": HostFit()})
    if setup.is_in_process:
        profile = profile.model_copy(update={"server": ServerFit()})
    if setup.is_compiled:
        none = {name: 0.0 for name in HostFit.model_fields if "prompt" in name}
        profile = profile.model_copy(update={"host": profile.host.model_copy(update=none)})
    return profile


_MAX_REQUESTS = 4000
_UNKNOWN_SHAPE = 1.3  # how much wider the interval of a model without a card is
_LEAST = 0.02  # half of an interval at least, in logarithms
_P90 = 1.2816  # of a standard normal: the half-width of an 80 % interval


# ---------------------------------------------------------------- single machines


def predict_rows(
    rows: Sequence[Observation], folder: Path, progress: Progress | None = None, fits: BackendFits | None = None
) -> list[Prediction]:
    """A prediction per single-machine figure; shared settings are priced once. folder: of `devices.csv`; fits: replace
    the engines' own; progress: called with rows done"""
    table = DeviceTable(folder)
    known: dict[Hashable, Prediction] = {}
    pairs = []
    for number, row in enumerate(rows):
        if row.setup not in known:
            known[row.setup] = _priced(row, table, fits)
        pairs.append(replace(known[row.setup], row=row))
        if progress is not None:
            progress(number + 1, len(rows))
    return pairs


def _priced(row: Observation, table: DeviceTable, fits: BackendFits | None) -> Prediction:
    setup: LocalSetup = row.setup
    try:
        hardware, model = table.device(setup.device, setup.device_class), setup.stored_model()
        scenario = local_scenario(setup, model, hardware)
        calibration = backend_calibration(hardware, scenario.engine, fits)
        cost_model = step_costs(scenario, calibration).cost_model()
        tests = row_tests(setup, scenario.model.attention_spans, scenario.engine.max_num_batched_tokens)
        rates = [test.tokens * PS_PER_S / sum(cost_model.duration_ps(shape) for shape in test.shapes) for test in tests]
    except PerfmodelError as error:
        return Prediction(row, reason=str(error))
    residuals = calibration.prompt_residuals if setup.test == "pp" else calibration.step_residuals
    seconds = LogNormal.of(residuals, calibration.spread * (1.0 if model.is_known else _UNKNOWN_SHAPE))
    interval = 1.0 / seconds.at(_P90), 1.0 / seconds.at(-_P90)  # a rate is low where the seconds are high
    metrics, ends = {setup.metric: sum(rates) / len(rates)}, {setup.metric: interval}
    return Prediction(row, metrics, "", ends, scenario=scenario, is_known=model.is_known)


# ---------------------------------------------------------------- servers and offline jobs


def predict_served(
    rows: Sequence[Observation], folder: Path, progress: Progress | None = None, fits: WholeRunFits | None = None
) -> list[Prediction]:
    """A prediction per row; shared setups are predicted once. progress: called with (setups done, of how many); folder:
    of `devices.csv`; fits: of vendors without kernel tables, replacing the committed ones"""

    def alike(row: Observation) -> tuple[str, ...]:
        setup: Setup = row.setup
        return setup.device, setup.engine, setup.model, setup.precision, str(setup.tp)

    work = partial(predict_row, folder=folder, fits=fits)
    return predictions_of(rows, work, lambda row: row.setup, alike, progress)


def predict_row(row: Observation, folder: Path, fits: WholeRunFits | None = None) -> Prediction:
    """The prediction for one row, as of `predict_served`; 16-bit weights that do not fit are retried in 8 bits."""
    setup, table = row.setup, DeviceTable(folder)
    try:
        try:
            return _predicted(row, setup, table, fits)
        except DoesNotFitError:
            if setup.gguf_type or quantization_of(setup.precision or setup.model) is not None:
                raise
            return _predicted(row, replace(setup, precision="fp8"), table, fits)
    except PerfmodelError as error:
        return Prediction(row, reason=str(error))
    except ValidationError as error:  # the row has what no scenario can have
        first = error.errors()[0]
        return Prediction(row, reason=f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


def _predicted(row: Observation, setup: Setup, table: DeviceTable, fits: WholeRunFits | None) -> Prediction:
    scenario, model, steps = _laid_out(setup, table, fits)
    if setup.is_static and not setup.kv_dtype and not steps.is_one_batch and scenario.model.quantization.weights:
        # It was one batch, so its KV was held in 8 bits, too.
        return _predicted(row, replace(setup, kv_dtype="fp8"), table, fits)
    instances = setup.instances_of(scenario.engine.num_devices)
    if setup.load == "saturated":
        metrics = {"tokens_per_s": instances * steps.saturated()}
    elif setup.load == "burst" and steps.is_one_batch:
        metrics = steps.batch(instances)
    elif setup.tpot_limit_s or setup.beams > 1:
        metrics = steps.at_limits(setup.rate / instances)
    else:
        metrics = _simulated(setup, scenario, steps, instances)
    wider = 1.0 if model.is_known else _UNKNOWN_SHAPE
    widths = (fits or load_whole_runs()).widths
    intervals = {metric: _interval(metric, setup, widths, wider) for metric in metrics}
    return Prediction(row, metrics, "", intervals, scenario=scenario, is_known=model.is_known)


def width_key(metric: str, setup: Setup) -> str:
    """Key by which errors are pooled: the metric, and whether it is at a submission's limits."""
    return f"{metric} at limits" if setup.tpot_limit_s else metric


def _interval(metric: str, setup: Setup, widths: Mapping[str, Residuals], wider: float) -> Interval:
    """80 % interval as factors of the prediction; nan without widths."""
    result = widths.get(width_key(metric, setup))
    if result is None:
        return NO_INTERVAL
    low, high = result.p50 + wider * (result.p10 - result.p50), result.p50 + wider * (result.p90 - result.p50)
    return float(np.exp(min(low, -_LEAST))), float(np.exp(max(high, _LEAST)))


def _laid_out(setup: Setup, table: DeviceTable, fits: WholeRunFits | None) -> tuple[Scenario, LocalModel, MeanSteps]:
    """The submitter's likely layout: the first that keeps the TPOT limit, else the one that serves most."""
    counts = layouts(setup, served_device(setup, table))
    result: list[tuple[float, Scenario, LocalModel, MeanSteps]] = []
    reason: PerfmodelError | None = None
    for count in counts:
        try:
            scenario, model = scenario_of("", setup, table, count)
            steps = MeanSteps(setup, scenario, fits)
        except PerfmodelError as error:
            reason = reason or error
            continue
        if len(counts) == 1:
            return scenario, model, steps
        rate = steps.rate_at_limits() if setup.load == "open" else steps.saturated()
        result.append((rate / count, scenario, model, steps))
    if not result:
        assert reason is not None
        raise reason
    return max(result, key=lambda item: item[0])[1:]


def _simulated(setup: Setup, scenario: Scenario, steps: MeanSteps, instances: int) -> dict[str, float]:
    sent, slots = scenario.traffic.num_requests or 1, scenario.traffic.arrivals.concurrency or 1
    count = 1 if setup.load == "first_token" else min(sent, _MAX_REQUESTS)
    if setup.load == "closed":
        count = slots * min(max(sent // slots, 2), 4 if slots > 2 else 2)
    whole = with_traffic(scenario, num_requests=count)
    requests = requests_of(simulate(whole, calibration=steps.given, profile=steps.profile, keep_steps=False))
    result = _metrics(requests, instances)
    if setup.load == "closed":
        ttft, tpot = weighted_means(requests, slots, max(sent, len(requests)) // slots * slots)
        whole_s = ttft + tpot * (setup.answer - 1)
        result |= {"ttft_mean": 1e3 * ttft, "tpot_mean": 1e3 * tpot, "e2el_mean": 1e3 * whole_s}
        result["output_tokens_per_s"] = instances * (slots * setup.answer / whole_s)
    return result


def _metrics(requests: RequestColumns, instances: int) -> dict[str, float]:
    """Means in ms; output tokens/s over all instances."""
    tpot_s = requests.tpot_s[np.isfinite(requests.tpot_s)]
    seconds = {"ttft_mean": requests.ttft_s, "e2el_mean": requests.e2el_s, "tpot_mean": tpot_s}
    result = {name: 1e3 * float(values.mean()) for name, values in seconds.items() if len(values)}
    span = float(requests.finished_s.max() - requests.arrival_s.min())
    result["output_tokens_per_s"] = instances * float(requests.num_output_tokens.sum()) / max(span, 1e-9)
    return result
