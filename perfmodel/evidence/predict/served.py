"""Published setups beside predictions: saturated engines and submissions to a benchmark by their mean steps, one batch
by its steps, all others simulated, for as long as it takes to reach the steady state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from perfmodel.cost import Residuals
from perfmodel.cost.calibrations.whole_runs import WholeRunFits, load_whole_runs
from perfmodel.errors import DoesNotFitError, PerfmodelError
from perfmodel.evidence.observation import over_cores
from perfmodel.evidence.predict.mean_steps import MeanSteps
from perfmodel.evidence.predict.steady import weighted_means
from perfmodel.evidence.sources.local import DeviceTable
from perfmodel.evidence.sources.setups import (
    PublishedModel,
    ServedRow,
    Setup,
    layouts,
    quantization_of,
    scenario_of,
    served_device,
)
from perfmodel.sim import RequestColumns, simulate
from perfmodel.specs.scenario import Scenario

Progress = Callable[[int, int], None]
_MOST_REQUESTS = 4000
_UNKNOWN_SHAPE = 1.3  # how much wider the interval of a model without a card is
_LEAST = 0.02  # half of an interval at least, in logarithms
_MOST_LOAD = 0.95  # of what is predicted to be the capacity: a result that counts had finite queues


@dataclass(frozen=True)
class ServedPair:
    """A result and what was predicted for it, by metric as in the row; a reason where it could not be.

    intervals: 80 % of the figures, as factors of the prediction, by metric
    is_known:  the model has a card
    """

    row: ServedRow
    predicted: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    is_known: bool = False
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
        return _fitting(work.setup, DeviceTable(work.folder), work.fits)
    except PerfmodelError as error:
        return ServedPair(_NO_ROW, reason=str(error))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return ServedPair(_NO_ROW, reason=f"it cannot be priced: {type(error).__name__}: {str(error).splitlines()[0]}")


def _fitting(setup: Setup, table: DeviceTable, fits: WholeRunFits | None) -> ServedPair:
    """The prediction of `setup`; of one whose weights in 16 bits do not fit what served them, in 8."""
    try:
        return _of(setup, table, fits)
    except DoesNotFitError:
        if setup.gguf_type or quantization_of(setup.precision or setup.model) is not None:
            raise
        return _of(replace(setup, precision="fp8"), table, fits)


def _of(setup: Setup, table: DeviceTable, fits: WholeRunFits | None = None) -> ServedPair:
    hardware = served_device(setup, table)
    scenario, model, steps = _laid_out(setup, table, layouts(setup, hardware), fits)
    if setup.is_static and not setup.kv_dtype and not steps.is_one_batch and scenario.model.quantization.weights:
        # It was one batch, so its KV was held in 8 bits, too.
        return _of(replace(setup, kv_dtype="fp8"), table, fits)
    instances = setup.instances if setup.tp else max(1, setup.num_devices // scenario.engine.num_devices)
    if setup.load == "saturated":
        predicted = {"tokens_per_s": instances * steps.saturated()}
    elif setup.load == "burst" and steps.is_one_batch:
        predicted = steps.batch(instances)
    elif setup.tpot_limit_s or setup.beams > 1:
        predicted = steps.at_limits(setup.rate / instances)
    else:
        predicted = _simulated(setup, scenario, steps, instances)
    wider = 1.0 if model.is_known else _UNKNOWN_SHAPE
    widths = (fits or load_whole_runs()).widths
    intervals = {metric: _interval(metric, setup, widths, wider) for metric in predicted}
    return ServedPair(_NO_ROW, predicted, "", intervals, model.is_known, scenario)


def width_key(metric: str, setup: Setup) -> str:
    """What errors are pooled by: the metric, and whether it is at a submission's limits."""
    return f"{metric} at limits" if setup.tpot_limit_s else metric


def _interval(metric: str, setup: Setup, widths: Mapping[str, Residuals], wider: float) -> tuple[float, float]:
    """The 80 % interval of a metric as factors of what is predicted; nan without any widths."""
    found = widths.get(width_key(metric, setup))
    if found is None:
        return float("nan"), float("nan")
    low, high = found.p50 + wider * (found.p10 - found.p50), found.p50 + wider * (found.p90 - found.p50)
    return float(np.exp(min(low, -_LEAST))), float(np.exp(max(high, _LEAST)))


def _laid_out(
    setup: Setup, table: DeviceTable, counts: Sequence[int], fits: WholeRunFits | None
) -> tuple[Scenario, PublishedModel, "MeanSteps"]:
    """The layout that a submitter would choose: the first that keeps the limit on TPOT, or that serves most."""
    found: list[tuple[float, Scenario, PublishedModel, MeanSteps]] = []
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
        if setup.load == "open":
            found.append((steps.rate_at_limits() / count, scenario, model, steps))
        else:
            found.append((steps.saturated() / count, scenario, model, steps))
    if not found:
        assert reason is not None
        raise reason
    _, scenario, model, steps = max(found, key=lambda each: each[0])
    return scenario, model, steps


def _simulated(setup: Setup, scenario: Scenario, steps: MeanSteps, instances: int) -> dict[str, float]:
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
    whole = scenario.model_copy(update={"traffic": traffic})
    result = simulate(whole, calibration=steps.given, profile=steps.profile, keep_steps=False)
    assert result.requests is not None
    found = _metrics(result.requests, instances)
    if setup.load == "closed":
        slots = scenario.traffic.arrivals.concurrency or 1
        sent = max(scenario.traffic.num_requests or 1, len(result.requests)) // slots * slots
        ttft, tpot = weighted_means(result.requests, slots, sent)
        served = slots * setup.answer / (ttft + tpot * (setup.answer - 1))
        found |= {"ttft_mean": 1e3 * ttft, "tpot_mean": 1e3 * tpot, "output_tokens_per_s": instances * served}
        found["e2el_mean"] = 1e3 * (ttft + tpot * (setup.answer - 1))
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
