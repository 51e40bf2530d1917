"""What the prediction of a pool rests on whatever its traffic is, worked out once for a run and the draws about it."""

__all__ = ["BasisOf", "PoolBasis", "remembered_basis"]

from collections.abc import Callable
from typing import NamedTuple

from perfmodel.cost import Calibration, EngineProfile, MemoryPlan, plan_memory, scenario_fits
from perfmodel.specs.scenario import Scenario


class PoolBasis(NamedTuple):
    """What steps are timed with, and the room that the weights leave."""

    calibration: Calibration
    profile: EngineProfile
    memory: MemoryPlan


BasisOf = Callable[[Scenario], PoolBasis]  # of a pool's own scenario (`Scenario.of_pool`)


def remembered_basis(calibration: Calibration | None, profile: EngineProfile | None) -> BasisOf:
    """The basis of pools by their model, hardware and engine; see `scenario_fits` for the defaults.

    Raises DoesNotFitError for a model too large for the devices.
    """
    known: list[tuple[Scenario, PoolBasis]] = []

    def basis_of(pool: Scenario) -> PoolBasis:
        for other, basis in known:
            # Shortened traffic leaves the very same objects in place: nothing has to be compared in depth.
            if other.model is pool.model and other.hardware is pool.hardware and other.engine == pool.engine:
                return basis
        fits = scenario_fits(pool, calibration, profile)
        basis = PoolBasis(*fits, plan_memory(pool.model, pool.hardware, pool.engine))
        known.append((pool, basis))
        return basis

    return basis_of
