"""Predicts published results: saturated engines and beams by mean steps, single-machine tests by their steps, all
others by simulation; submissions to a benchmark at the submitted rate, over a whole run.

`MeanSteps`: a saturated engine decodes B requests, as many as its KV blocks hold, and admits a prompt for each that
ends: with o tokens an answer, p a prompt and T a step, on average

    requests/s = B / (o T),    T = T( B decodes, B / o prompts of p tokens )

(fewer than B if the token budget is full); a server below that rate has the batch that serves just its rate.

Near its capacity a server's batch follows small errors of the capacity: 10 % of it can be a factor of three in TPOT. So
the 80 % interval at a rate is simulated, with steps as much shorter and longer as capacities of other devices turned
out (`widths` of saturated engines). Steps f times as long under arrivals at a rate are the predicted steps under f
times the rate, with all times multiplied by f.

Beams share their prompt's blocks. The kernel reads a prompt once per beam, and the beams' thread blocks run
concurrently: the first read comes from HBM, the others hit L2. With b beams, p prompt tokens, and a tokens behind it in
each beam, a step takes as long as one that reads from HBM

    p (1 + (b - 1) / s) + b a    tokens per request,

with s the speed of L2 over HBM reads: from kernel tables whose repeats keep KV in L2 (`FlashDecodeFit.cache_speedup`),
else the median over kernels."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from perfmodel import cost
from perfmodel.cost.calibrations.backends import BackendFits, backend_calibration, engine_calibration
from perfmodel.cost.calibrations.draws import Z_P90, LogNormal
from perfmodel.cost.calibrations.files import calibrated_kernels
from perfmodel.cost.calibrations.whole_runs import WholeRunFits, load_whole_runs, whole_run_calibration
from perfmodel.cost.kernel_models.attention.decode import FlashDecodeFit
from perfmodel.cost.steps.cost_model import StepCostModel
from perfmodel.cost.steps.tables import PS_PER_S
from perfmodel.errors import DoesNotFitError, PerfmodelError
from perfmodel.evidence.observation import (
    NO_INTERVAL,
    Interval,
    Observation,
    Prediction,
    Progress,
    first_problem,
    predictions_of,
    reported,
)
from perfmodel.evidence.predict.recorded import requests_of, weighted_means, with_traffic
from perfmodel.evidence.sources.local import DeviceTable, LocalModel, LocalSetup, local_scenario, row_tests
from perfmodel.evidence.sources.setups import Setup, layouts, scenario_of, served_device
from perfmodel.ops.work import BatchShape, Work, windowed_contexts
from perfmodel.sim import RequestColumns, simulate
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_hardware


def tokens_read(prompt: float, behind: float, beams: int, speedup: float) -> float:
    """KV tokens per beam and step as if all came from HBM, averaged over `beams`. prompt, behind: tokens of the prompt,
    and of each beam's answer; speedup: of L2 over HBM reads"""
    return prompt * (1 + (beams - 1) / speedup) / beams + behind


def cached_read_speedup(work: Work, hardware: HardwareSpec, calibration: cost.Calibration) -> float:
    """L2 over HBM read speed of the decode attention kernel of `work`."""
    fit = cost.OperatorTimer(hardware, calibration).fit(work)
    is_known = isinstance(fit, FlashDecodeFit) and "cache_speedup" in fit.model_fields_set
    return fit.cache_speedup if isinstance(fit, FlashDecodeFit) and is_known else _usual_speedup()


@lru_cache(maxsize=1)
def _usual_speedup() -> float:
    """Median over measured kernels faster from L2; 1 without any."""
    result = []
    for device, engine, _ in calibrated_kernels():
        fits = cost.load_calibration(load_hardware(device), engine).families.values()
        result += [fit.cache_speedup for fit in fits if isinstance(fit, FlashDecodeFit) and fit.cache_speedup > 1.05]
    return float(np.median(result)) if result else 1.0


_STATES = 40  # sizes of batches that are looked at


class MeanSteps:
    """Mean steps of an instance. Raises PerfmodelError if the model does not fit."""

    def __init__(self, setup: Setup, scenario: Scenario, fits: WholeRunFits | None = None) -> None:
        self.setup, self.scenario, engine, hardware = setup, scenario, scenario.engine, scenario.hardware
        # Calibrations by whole runs are of devices without kernel tables, under engines without fitted backends.
        self.given: cost.Calibration | None = None
        if not (engine.described.facts.backends or has_kernel_tables(hardware, engine.profile)):
            self.given = whole_run_calibration(hardware, engine.profile, fits, or_others=True, version=engine.version)
        self.profile = _profile_of(setup, scenario, self.given or engine_calibration(hardware, engine))
        costs = cost.step_costs(scenario, self.given, self.profile)
        self.calibration: cost.Calibration = costs.calibration
        self._cost_model: StepCostModel = costs.cost_model()
        self._spans = scenario.model.attention_spans
        answers = scenario.traffic.output_tokens
        spread = (answers.std or 0.0) / answers.mean if answers is not None and answers.mean else 0.0  # over the mean
        behind = setup.answer / 2 * (1 + spread**2)  # mean tokens of the answer that a sequence has, over its life
        self._context = self._read(setup.prompt, behind)
        plan = cost.plan_memory(scenario.model, hardware, engine)
        self._slots = max(1, min(plan.max_batch(round(setup.prompt + setup.beams * behind)), engine.max_num_seqs))
        most = plan.max_batch(setup.prompt + setup.answer)
        if setup.is_static and (scenario.traffic.num_requests or 1) > most:
            raise DoesNotFitError(
                f"got a static batch of {scenario.traffic.num_requests} sequences of {setup.prompt + setup.answer} "
                f"tokens; expected at most {most}, as many as the KV cache of {engine.num_devices} x {hardware.name} "
                f"holds with kv_cache_dtype={engine.kv_cache_dtype}."
            )
        # Whether steps compute prompts or decode, never both.
        self._exclusive = engine.rules.prefill_exclusive
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
        """Seconds of a mean step with `slots` decodes and a prompt per finished answer, interpolated in prompts."""
        decodes, arriving = max(self.setup.beams, round(slots * self.setup.beams)), slots / self._answer
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

    def step_at(self, rate: float) -> float:
        """Seconds of a mean step at `rate` requests/s, capped at capacity: of the smallest batch that serves it."""
        for slots in np.geomspace(min(0.05, self.max_batch), self.max_batch, _STATES).tolist():
            step_s = self._step(slots)
            if slots >= rate * self._answer * step_s:
                break
        return step_s

    def keeps_limit(self, rate: float) -> bool:
        """Whether mean steps at `rate` requests/s are within the limit on TPOT, and the rate within the capacity."""
        return rate <= self._served(self.max_batch) and self.step_at(rate) <= (self.setup.tpot_limit_s or np.inf)

    def latencies(self, rate: float) -> dict[str, float]:
        """Mean latencies in ms at `rate` requests/s, of prompts that take one step each."""
        step_s = self.step_at(rate)
        decodes = max(self.setup.beams, round(rate * self.setup.answer * step_s * self.setup.beams))
        own = self._price(0 if self._exclusive else decodes, 1, self._part(decodes)[0])
        ahead = 0.5 + float(self.scenario.engine.async_scheduling)  # the step that runs, and one planned behind it
        ttft = ahead * step_s + max(own, step_s)
        result = {"tpot_mean": step_s, "ttft_mean": ttft, "e2el_mean": ttft + step_s * (self.setup.answer - 1)}
        return {name: 1e3 * value for name, value in result.items()}


def has_kernel_tables(hardware: HardwareSpec, engine: str) -> bool:
    """Whether kernel tables exist for the device, or a related one, under `engine` (a name)."""
    return bool(cost.load_calibration(hardware, engine).families.keys() - {"collective"})


def _profile_of(setup: Setup, scenario: Scenario, calibration: cost.Calibration) -> cost.EngineProfile:
    """The engine's profile, without front end or launches of a step compiled ahead; host time of whole runs, if any."""
    profile = cost.profile_of(scenario.engine)
    if calibration.host != cost.HostFit():
        profile = profile.model_copy(update={"host": cost.HostFit()})
    if setup.is_in_process:
        profile = profile.model_copy(update={"server": cost.ServerFit()})
    if setup.is_compiled:
        none = {name: 0.0 for name in cost.HostFit.model_fields if "prompt" in name}
        profile = profile.model_copy(update={"host": profile.host.model_copy(update=none)})
    return profile


_MAX_REQUESTS = 4000  # of a burst
_UNKNOWN_SHAPE = 1.3  # how much wider the interval of a model without a card is
_LEAST = 0.02  # half of an interval at least, in logarithms


# ---------------------------------------------------------------- single machines


def predict_rows(
    rows: Sequence[Observation], folder: Path, progress: Progress | None = None, fits: BackendFits | None = None
) -> list[Prediction]:
    """A prediction per single-machine figure; shared settings are priced once. folder: of `devices.csv`; fits: replace
    the engines' own; progress: called with rows done"""
    table = DeviceTable(folder)
    known: dict[Hashable, Prediction] = {}
    pairs = []
    for row in reported(rows, len(rows), progress):
        if row.setup not in known:
            known[row.setup] = _priced(row, table, fits)
        pairs.append(replace(known[row.setup], row=row))
    return pairs


def _priced(row: Observation, table: DeviceTable, fits: BackendFits | None) -> Prediction:
    setup: LocalSetup = row.setup
    try:
        hardware, model = table.device(setup.device, setup.device_class), setup.stored_model()
        scenario = local_scenario(setup, model, hardware)
        calibration = backend_calibration(hardware, scenario.engine, fits)
        cost_model = cost.step_costs(scenario, calibration).cost_model()
        tests = row_tests(setup, scenario.model.attention_spans, scenario.engine.max_num_batched_tokens)
        rates = [test.tokens * PS_PER_S / sum(cost_model.duration_ps(shape) for shape in test.shapes) for test in tests]
    except PerfmodelError as error:
        return Prediction(row, reason=str(error))
    residuals = calibration.prompt_residuals if setup.test == "pp" else calibration.step_residuals
    seconds = LogNormal.of(residuals, calibration.spread * (1.0 if model.is_known else _UNKNOWN_SHAPE))
    interval = 1.0 / seconds.at(Z_P90), 1.0 / seconds.at(-Z_P90)  # a rate is low where the seconds are high
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
    """The prediction for one row, as of `predict_served`."""
    try:
        return _predicted(row, row.setup, DeviceTable(folder), fits)
    except PerfmodelError as error:
        return Prediction(row, reason=str(error))
    except ValidationError as error:  # the row has what no scenario can have
        return Prediction(row, reason=first_problem(error))


def _predicted(row: Observation, setup: Setup, table: DeviceTable, fits: WholeRunFits | None) -> Prediction:
    scenario, model, steps = _laid_out(setup, table, fits)
    instances = setup.instances_of(scenario.engine.num_devices)
    widths = (fits or load_whole_runs()).widths
    if setup.load == "saturated":
        metrics = {"tokens_per_s": instances * steps.saturated()}
    else:
        metrics = _served(setup, scenario, steps, instances)
    wider = 1.0 if model.is_known else _UNKNOWN_SHAPE
    if setup.load == "open" and "tokens_per_s" in widths:
        factors = _interval(widths["tokens_per_s"], wider)
        slow, fast = (_served(setup, scenario, steps, instances, 1 / factor) for factor in factors)
        intervals = {
            name: (min(slow[name], fast[name]) / value, max(slow[name], fast[name]) / value)
            for name, value in metrics.items()
        }
    else:
        intervals = {name: _interval(widths.get(name), wider) for name in metrics}
    return Prediction(row, metrics, "", intervals, scenario=scenario, is_known=model.is_known)


def _interval(width: cost.Residuals | None, wider: float) -> Interval:
    """80 % interval as factors of the prediction; nan without a width."""
    if width is None:
        return NO_INTERVAL
    low, high = width.p50 + wider * (width.p10 - width.p50), width.p50 + wider * (width.p90 - width.p50)
    return float(np.exp(min(low, -_LEAST))), float(np.exp(max(high, _LEAST)))


def _laid_out(setup: Setup, table: DeviceTable, fits: WholeRunFits | None) -> tuple[Scenario, LocalModel, MeanSteps]:
    """The submitter's likely layout: of those that keep the limit on TPOT at the stated rate (all, if none does) the
    one that serves most with its devices."""
    counts = layouts(setup, served_device(setup, table))
    result: list[tuple[tuple[bool, float], Scenario, LocalModel, MeanSteps]] = []
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
        keeps_limit = steps.keeps_limit(setup.rate / setup.instances_of(count))
        result.append(((keeps_limit, steps.saturated() / count), scenario, model, steps))
    if not result:
        assert reason is not None
        raise reason
    return max(result, key=lambda item: item[0])[1:]


def _served(
    setup: Setup, scenario: Scenario, steps: MeanSteps, instances: int, longer: float = 1.0
) -> dict[str, float]:
    """Latencies in ms and output tokens/s of all instances, simulated; of beams by mean steps. longer: factor on the
    duration of every step, of arrivals at a rate"""
    if setup.beams > 1:
        return {name: longer * value for name, value in steps.latencies(setup.rate / instances * longer).items()}
    sent, slots = scenario.traffic.num_requests or 1, scenario.traffic.arrivals.concurrency or 1
    count = 1 if setup.load == "first_token" else sent if setup.load == "open" else min(sent, _MAX_REQUESTS)
    if setup.load == "closed":
        count = slots * min(max(sent // slots, 2), 4 if slots > 2 else 2)
    rate = scenario.traffic.arrivals.rate
    faster = {} if rate is None else {"rate": rate * longer}
    whole = with_traffic(scenario, faster, num_requests=count)
    run = simulate(whole, calibration=steps.given, profile=steps.profile, keep_steps=False)
    requests = requests_of(run)
    result = _metrics(requests, instances, longer) | {"mean_power_w": float(run.summary["mean_power_w"] or 0.0)}
    if setup.load == "closed":
        ttft, tpot = weighted_means(requests, slots, max(sent, len(requests)) // slots * slots)
        whole_s = ttft + tpot * (setup.answer - 1)
        result |= {"ttft_mean": 1e3 * ttft, "tpot_mean": 1e3 * tpot, "e2el_mean": 1e3 * whole_s}
        result["output_tokens_per_s"] = instances * (slots * setup.answer / whole_s)
    return result


def _metrics(requests: RequestColumns, instances: int, longer: float) -> dict[str, float]:
    """Means and 99th percentiles in ms; output tokens/s over all instances."""
    columns = {"ttft": requests.ttft_s, "e2el": requests.e2el_s, "tpot": requests.tpot_s}
    finite = {name: values[np.isfinite(values)] for name, values in columns.items()}
    result = {f"{name}_mean": 1e3 * longer * float(values.mean()) for name, values in finite.items() if len(values)}
    result |= {f"{name}_p99": 1e3 * longer * float(np.quantile(row, 0.99)) for name, row in finite.items() if len(row)}
    span = longer * float(requests.finished_s.max() - requests.arrival_s.min())
    result |= {"batch_latency": 1e3 * span, "batch_ttft": 1e3 * longer * float(columns["ttft"].max())}
    result["output_tokens_per_s"] = instances * float(requests.num_output_tokens.sum()) / max(span, 1e-9)
    return result
