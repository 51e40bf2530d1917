"""Fits what a generation of devices leaves of the achieved tensor rate of the one before, to steady states on it.

Time to first token of long prompts is compute; with the engines' profiles fitted on all devices, what is left on a
generation's own rows is its kernels'. One number for all engines, models and number formats.
"""

__all__ = ["fit_generation"]

from collections.abc import Callable, Sequence

import numpy as np

from perfmodel.calibrate.steady.profile import log_errors
from perfmodel.calibrate.steady.simulation import simulate_steady_states
from perfmodel.calibrate.steady.states import SteadyState
from perfmodel.cost.calibrations.unmeasured import GenerationFit
from perfmodel.errors import SpecError

_MOST_CONCURRENCY = 16
_MOST_ROWS = 48
_EVALUATIONS = 8
_LOSS_SCALE = 0.1


def fit_generation(
    architecture: str, rows: Sequence[SteadyState], *, progress: Callable[[int, int], None] | None = None
) -> GenerationFit:
    """The fit of `architecture` from the rows on its devices that can be taken at face value.

    Raises SpecError where there are none.
    """
    from scipy.optimize import minimize_scalar

    mine = [row for row in rows if _is_clear(row) and row.scenario.hardware.declared.architecture == architecture]
    if not mine:
        raise SpecError(f"no rows on devices of architecture {architecture!r} to fit")
    mine = mine[:: max(1, len(mine) // _MOST_ROWS)]
    calls = 0

    def loss(log_compute: float) -> float:
        nonlocal calls
        calls += 1
        if progress is not None:
            progress(calls, _EVALUATIONS)
        generation = GenerationFit(architecture=architecture, compute=float(np.exp(log_compute)))
        errors = log_errors(simulate_steady_states(mine, generation=generation))
        return float(np.sum(np.sqrt(1 + (errors / _LOSS_SCALE) ** 2) - 1))

    found = minimize_scalar(
        loss, bounds=(np.log(0.25), np.log(1.2)), method="bounded", options={"maxiter": _EVALUATIONS, "xatol": 0.03}
    )
    return GenerationFit(architecture=architecture, compute=round(float(np.exp(found.x)), 4))


def _is_clear(row: SteadyState) -> bool:
    return row.is_clear and (row.scenario.traffic.arrivals.concurrency or 0) <= _MOST_CONCURRENCY
