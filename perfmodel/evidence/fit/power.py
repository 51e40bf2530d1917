"""Power of servers and energy of their tokens, from a step at the measured mean batch; and the fit of power to them.

A row's batch decodes, in the middle of its answers, and as many prompts begin as answers end: `itl`, a median, is a
step that only decodes unless most have prompts, `tokens_per_s` the batch over the mean step, `power` what that draws on
all devices, `energy_per_token` their ratio.

The fit (`perfmodel.cost.power`) takes the shares of the peaks of the mean step as predicted, over the time that it was
measured to take; steps that are predicted badly say nothing of power and are left out."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from perfmodel.cost import step_costs
from perfmodel.cost.kernel_models.device import tdp_w
from perfmodel.cost.power import PowerFit, energy_j
from perfmodel.cost.steps.tables import PS_PER_S, Usage
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.fit.kernels import ends_of, residuals_of, rounded
from perfmodel.evidence.observation import Floats, Observation, Prediction, Progress, predictions_of
from perfmodel.planning.typical_step import mean_length, mean_prompt, typical_step
from perfmodel.sim.traffic.workload import ImagePlan

_START = PowerFit(active_share=0.2, compute=1.0, exponent=0.5)
_MAX_OFF = 1.4  # times: of predicted and measured steps
_LOSS_SCALE = 0.1


class MeanStep(NamedTuple):
    """A row's steps on one device: seconds of the median and of the mean one, and the mean one's totals."""

    median_s: float
    mean_s: float
    usage: Usage


def steps_of(row: Observation) -> MeanStep:
    """The steps of a full batch, whose sequences end one by one and are followed by new prompts. Raises SpecError for a
    deployment that cannot be priced."""
    costs, traffic = step_costs(row.scenario), row.scenario.traffic
    decodes = typical_step(row.scenario, lambda shape: costs.estimate(shape).duration_s).shape
    prompt = round(mean_prompt(row.scenario))
    answer = round(mean_length(traffic.output_tokens)) if traffic.output_tokens else 1
    begun = decodes.num_decodes / answer  # prompts per step
    count = max(1, round(begun))
    num_tokens, num_samples = decodes.num_tokens + count * prompt, decodes.num_samples + count
    images = ImagePlan(row.scenario).grids * count if traffic.images is not None else ()
    mixed = decodes._replace(
        num_tokens=num_tokens, num_samples=num_samples, prefills=((prompt, 0),) * count, images=images
    )
    ranks = row.scenario.engine.data_parallel_size  # all wait for the one with the prompt
    share, usage, seconds = 1 - (1 - min(1.0, begun / count)) ** ranks, Usage(), []
    for shape, times in ((decodes, 1.0 - share), (mixed, share)):
        model = costs.cost_model()
        seconds.append(model.duration_ps(shape) / PS_PER_S)
        usage.add(model.usage(), times)
    return MeanStep(seconds[share > 0.5], seconds[0] + share * (seconds[1] - seconds[0]), usage)


def predict_energy(row: Observation, fit: PowerFit | None = None) -> Prediction:
    """The metrics of a row. fit: of power, default: the committed one"""
    steps = steps_of(row)
    joules, tokens = _joules(row, steps, fit)
    metrics = {
        "itl": 1e3 * steps.median_s,
        "tokens_per_s": tokens / steps.mean_s,
        "power": joules / steps.mean_s,
        "energy_per_token": joules / tokens,
    }
    return Prediction(row, metrics, scenario=row.scenario)


def predict_all(
    rows: Sequence[Observation], progress: Progress | None = None, fit: PowerFit | None = None
) -> list[Prediction]:
    """`predict_energy` of all rows, on all cores."""
    return predictions_of(rows, partial(predict_energy, fit=fit), lambda row: row.name, lambda row: row.name, progress)


def fit_power(rows: Sequence[Observation], is_crossed: bool = True) -> PowerFit:
    """The fit to rows of text with `power`, `tokens_per_s` and `energy_per_token`: sizes of images are assumed.
    is_crossed: with residuals. Raises SpecError without a row whose step is predicted."""
    steps = []
    for row in (row for row in rows if row.scenario.traffic.images is None):
        with suppress(PerfmodelError):
            steps.append((row, steps_of(row)))
    fit = _fitted(steps)
    if not is_crossed:
        return fit
    errors: list[float] = []
    for model in {row.scenario.model.name for row, _ in steps}:
        other = _fitted([(row, step) for row, step in steps if row.scenario.model.name != model])
        errors += (_log_error(row, step, other) for row, step in steps if row.scenario.model.name == model)
    return fit.model_copy(update={"residuals": residuals_of(np.exp(errors), np.ones(len(errors)))})


def _joules(row: Observation, steps: MeanStep, fit: PowerFit | None) -> tuple[float, int]:
    """Joules of all devices for a mean step, and its output tokens."""
    joules = float(row.labels["devices"]) * energy_j(row.scenario.hardware, steps.usage, steps.mean_s, fit)
    return joules, row.scenario.traffic.arrivals.concurrency or 1


def _log_error(row: Observation, steps: MeanStep, fit: PowerFit) -> float:
    """log(predicted / measured) joules per token."""
    joules, tokens = _joules(row, steps, fit)
    return float(np.log(joules / tokens / row.metrics["energy_per_token"]))


def _fitted(steps: Sequence[tuple[Observation, MeanStep]]) -> PowerFit:
    from scipy.optimize import least_squares

    points = [point for row, step in steps if (point := _point(row, step)) is not None]
    if not points:
        raise SpecError("no row whose step is predicted within 1.4 times of the measured one: nothing to fit power to.")
    compute, memory, measured = np.array(points).T
    fields = [name for name in PowerFit.model_fields if name in _START.model_fields_set]
    ends = [tuple(ends_of(_START, name)[end] for end in ("ge", "le")) for name in fields]

    def errors(values: Floats) -> Floats:
        fit = _START.model_copy(update=dict(zip(fields, values, strict=True)))
        drawn = fit.active_share + (1 - fit.active_share) * np.minimum(1.0, sum(fit.wanted(compute, memory)))
        return np.asarray(np.log(drawn / measured))

    begin = [getattr(_START, name) for name in fields]
    search = least_squares(errors, begin, bounds=tuple(zip(*ends, strict=True)), loss="soft_l1", f_scale=_LOSS_SCALE)
    return PowerFit(**rounded(dict(zip(fields, search.x.tolist(), strict=True))))


def _point(row: Observation, steps: MeanStep) -> tuple[float, float, float] | None:
    """Shares of compute and memory, and power as a share of TDP; None where the step is predicted badly."""
    hardware, measured = row.scenario.hardware, row.metrics
    seconds = (row.scenario.traffic.arrivals.concurrency or 1) / measured["tokens_per_s"]
    if not 1 / _MAX_OFF < steps.mean_s / seconds < _MAX_OFF:
        return None
    compute, memory = steps.usage.peak_compute_s, steps.usage.hbm_bytes / hardware.memory_bandwidth
    share = measured["power"] / float(row.labels["devices"]) / tdp_w(hardware)
    return min(compute / seconds, 1.0), min(memory / seconds, 1.0), share
