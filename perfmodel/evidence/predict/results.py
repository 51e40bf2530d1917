"""Published results beside predictions: saturated engines and submissions to a benchmark by their mean steps, one batch
by its steps, tests of single machines by theirs, all others simulated, for as long as it takes to reach the steady
state.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from perfmodel.cost import Residuals
from perfmodel.cost.calibrations.backends import BackendFits, backend_calibration
from perfmodel.cost.calibrations.draws import LogNormal
from perfmodel.cost.calibrations.whole_runs import WholeRunFits, load_whole_runs
from perfmodel.cost.steps.pricer import StepPricer
from perfmodel.cost.steps.step_costs import step_costs
from perfmodel.cost.steps.tables import PS_PER_S
from perfmodel.errors import DoesNotFitError, PerfmodelError
from perfmodel.evidence.observation import NO_INTERVAL, Interval, Observation, Prediction, Progress, predictions_of
from perfmodel.evidence.predict.mean_steps import MeanSteps
from perfmodel.evidence.predict.recorded import requests_of, weighted_means, with_traffic
from perfmodel.evidence.sources.local import DeviceTable, LocalModel, LocalSetup, Test, local_scenario, row_tests
from perfmodel.evidence.sources.setups import Setup, layouts, quantization_of, scenario_of, served_device
from perfmodel.sim import RequestColumns, simulate
from perfmodel.specs.scenario import Scenario

_MOST_REQUESTS = 4000
_UNKNOWN_SHAPE = 1.3  # how much wider the interval of a model without a card is
_LEAST = 0.02  # half of an interval at least, in logarithms
_P90 = 1.2816  # of a standard normal: the half-width of an 80 % interval


# ---------------------------------------------------------------- single machines


def predict_rows(
    rows: Sequence[Observation], folder: Path, progress: Progress | None = None, fits: BackendFits | None = None
) -> list[Prediction]:
    """A prediction for each figure of a single machine; settings that several rows share are priced once.

    folder: where `devices.csv` is; fits: in place of those of the engines' files
    """
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
        hardware = table.device(setup.device, setup.device_class)
        model = setup.stored_model()
        scenario = local_scenario(setup, model, hardware)
        calibration = backend_calibration(hardware, scenario.engine, fits)
        pricer = step_costs(scenario, calibration).pricer()
        tests = row_tests(setup, scenario.model.attention_spans, scenario.engine.max_num_batched_tokens)
        rate = sum(map(partial(_rate, pricer), tests)) / len(tests)
    except PerfmodelError as error:
        return Prediction(row, reason=str(error))
    residuals = calibration.prompt_residuals if setup.test == "pp" else calibration.step_residuals
    seconds = LogNormal.of(residuals, calibration.spread * (1.0 if model.is_known else _UNKNOWN_SHAPE))
    interval = 1.0 / seconds.at(_P90), 1.0 / seconds.at(-_P90)  # a rate is low where the seconds are high
    metric = setup.metric
    return Prediction(row, {metric: rate}, "", {metric: interval}, scenario=scenario, is_known=model.is_known)


def _rate(pricer: StepPricer, test: Test) -> float:
    """Tokens per second."""
    return test.tokens * PS_PER_S / sum(pricer.price(shape) for shape in test.shapes)


# ---------------------------------------------------------------- servers and offline jobs


def predict_served(
    rows: Sequence[Observation], folder: Path, progress: Progress | None = None, fits: WholeRunFits | None = None
) -> list[Prediction]:
    """A prediction for each row; setups that several rows share are predicted once.

    rows, progress: what to predict; called with (setups done, of how many)
    folder:         where `devices.csv` is
    fits:           of makers without kernel tables, in place of the committed ones
    """
    work = partial(predict_row, folder=folder, fits=fits)
    return predictions_of(rows, work, lambda row: row.setup, _alike, progress)


def _alike(row: Observation) -> tuple[str, ...]:
    setup: Setup = row.setup
    return setup.device, setup.engine, setup.model, setup.precision, str(setup.tp)


def predict_row(row: Observation, folder: Path, fits: WholeRunFits | None = None) -> Prediction:
    """The prediction for one row; of a setup whose weights in 16 bits do not fit what served them, in 8.

    row, folder, fits: as of `predict_served`
    """
    try:
        return _fitting(row, row.setup, DeviceTable(folder), fits)
    except PerfmodelError as error:
        return Prediction(row, reason=str(error))


def _fitting(row: Observation, setup: Setup, table: DeviceTable, fits: WholeRunFits | None) -> Prediction:
    try:
        return _predicted(row, setup, table, fits)
    except DoesNotFitError:
        if setup.gguf_type or quantization_of(setup.precision or setup.model) is not None:
            raise
        return _predicted(row, replace(setup, precision="fp8"), table, fits)


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
        metrics = steps.at(setup.rate / instances)
    else:
        metrics = _simulated(setup, scenario, steps, instances)
    wider = 1.0 if model.is_known else _UNKNOWN_SHAPE
    widths = (fits or load_whole_runs()).widths
    intervals = {metric: _interval(metric, setup, widths, wider) for metric in metrics}
    return Prediction(row, metrics, "", intervals, scenario=scenario, is_known=model.is_known)


def width_key(metric: str, setup: Setup) -> str:
    """What errors are pooled by: the metric, and whether it is at a submission's limits."""
    return f"{metric} at limits" if setup.tpot_limit_s else metric


def _interval(metric: str, setup: Setup, widths: Mapping[str, Residuals], wider: float) -> Interval:
    """The 80 % interval of a metric as factors of what is predicted; nan without any widths."""
    found = widths.get(width_key(metric, setup))
    if found is None:
        return NO_INTERVAL
    low, high = found.p50 + wider * (found.p10 - found.p50), found.p50 + wider * (found.p90 - found.p50)
    return float(np.exp(min(low, -_LEAST))), float(np.exp(max(high, _LEAST)))


def _laid_out(setup: Setup, table: DeviceTable, fits: WholeRunFits | None) -> tuple[Scenario, LocalModel, MeanSteps]:
    """The layout that a submitter would choose: the first that keeps the limit on TPOT, or that serves most."""
    counts = layouts(setup, served_device(setup, table))
    found: list[tuple[float, Scenario, LocalModel, MeanSteps]] = []
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
        found.append((rate / count, scenario, model, steps))
    if not found:
        assert reason is not None
        raise reason
    return max(found, key=lambda each: each[0])[1:]


def _simulated(setup: Setup, scenario: Scenario, steps: MeanSteps, instances: int) -> dict[str, float]:
    sent, slots = scenario.traffic.num_requests or 1, scenario.traffic.arrivals.concurrency or 1
    count = 1 if setup.load == "first_token" else min(sent, _MOST_REQUESTS)
    if setup.load == "closed":
        count = slots * min(max(sent // slots, 2), 4 if slots > 2 else 2)
    whole = with_traffic(scenario, num_requests=count)
    requests = requests_of(simulate(whole, calibration=steps.given, profile=steps.profile, keep_steps=False))
    found = _metrics(requests, instances)
    if setup.load == "closed":
        ttft, tpot = weighted_means(requests, slots, max(sent, len(requests)) // slots * slots)
        whole_s = ttft + tpot * (setup.answer - 1)
        found |= {"ttft_mean": 1e3 * ttft, "tpot_mean": 1e3 * tpot, "e2el_mean": 1e3 * whole_s}
        found["output_tokens_per_s"] = instances * (slots * setup.answer / whole_s)
    return found


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
