"""Fits what a device draws at a load (`perfmodel.cost.power`) to measured power of servers.

Shares of the peaks are those of the mean step as predicted, over the time that it was measured to take; steps that are
predicted badly say nothing of power and are left out.
"""

from collections.abc import Sequence

import numpy as np

from perfmodel.cost.kernel_models.device import tdp_w
from perfmodel.cost.power import PowerFit, energy_j
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.fit.kernels import ends_of, residuals_of, rounded
from perfmodel.evidence.observation import Floats, Observation
from perfmodel.evidence.predict.energy import MeanStep, steps_of

_START = PowerFit(active_share=0.2, memory=0.6, memory_exponent=0.5, compute=1.0, compute_exponent=0.6)
_MAX_OFF = 1.4  # times: of predicted and measured steps
_LOSS_SCALE = 0.1


def fit_power(rows: Sequence[Observation], is_crossed: bool = True) -> PowerFit:
    """The fit to rows with `power`, `tokens_per_s` and `energy_per_token`. is_crossed: with residuals. Raises SpecError
    without a row whose step is predicted."""
    steps = [(row, step) for row in rows if (step := _steps(row)) is not None]
    fit = _fitted(steps)
    if not is_crossed:
        return fit
    errors: list[float] = []
    for model in {row.scenario.model.name for row, _ in steps}:
        other = _fitted([(row, step) for row, step in steps if row.scenario.model.name != model])
        errors += (_log_error(row, step, other) for row, step in steps if row.scenario.model.name == model)
    return fit.model_copy(update={"residuals": residuals_of(np.exp(errors), np.ones(len(errors)))})


def _log_error(row: Observation, step: MeanStep, fit: PowerFit) -> float:
    """log(predicted / measured) joules per token."""
    joules = float(row.labels["devices"]) * energy_j(row.scenario.hardware, step.usage, step.mean_s, fit)
    tokens = row.scenario.traffic.arrivals.concurrency or 1
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
        active, m, p, c, q = values
        drawn: Floats = active + (1 - active) * np.minimum(1.0, m * memory**p + c * compute**q)
        return np.asarray(np.log(drawn / measured))

    begin = [getattr(_START, name) for name in fields]
    search = least_squares(errors, begin, bounds=tuple(zip(*ends, strict=True)), loss="soft_l1", f_scale=_LOSS_SCALE)
    return PowerFit(**rounded(dict(zip(fields, search.x.tolist(), strict=True))))


def _steps(row: Observation) -> MeanStep | None:
    try:
        return steps_of(row)
    except PerfmodelError:
        return None


def _point(row: Observation, steps: MeanStep) -> tuple[float, float, float] | None:
    """Shares of compute and memory, and power as a share of TDP; None where the step is predicted badly."""
    hardware, measured = row.scenario.hardware, row.metrics
    seconds = (row.scenario.traffic.arrivals.concurrency or 1) / measured["tokens_per_s"]
    if not 1 / _MAX_OFF < steps.mean_s / seconds < _MAX_OFF:
        return None
    compute, memory = steps.usage.peak_compute_s, steps.usage.hbm_bytes / hardware.memory_bandwidth
    share = measured["power"] / float(row.labels["devices"]) / tdp_w(hardware)
    return min(compute / seconds, 1.0), min(memory / seconds, 1.0), share
