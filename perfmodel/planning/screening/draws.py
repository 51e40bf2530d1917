"""Common draws of what calibrations leave unexplained, so that candidates are compared under equal errors.

Two candidates on one device err alike: if its kernels are slower than their fits say, both are slower. So each is
screened under the same draws of scores (`perfmodel.cost.calibrations.draws`), and their difference is read draw by
draw. Of two devices

    one device, one engine profile      have all scores in common
    of one architecture                 share what the fits' own errors are; what is passed on to a sibling adds errors
                                        of its own, so that the whole is as wide as its calibration's spread says:
                                        score = (z_fit + sqrt(s^2 - 1) z_device) / s, s the spread of a sibling
    of two architectures                have nothing in common (which overstates the doubt: the engine is the same)

Half of the draws are the others with the signs turned, so that their mean is that of the model.
"""

__all__ = ["NUM_DRAWS", "Drawn", "SharedScores", "drawn_surfaces"]

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import scenario_fits
from perfmodel.cost.calibrations.draws import NUM_SCORES, Uncertainty
from perfmodel.cost.calibrations.files import SPREAD_SIBLING
from perfmodel.planning.screening.surfaces import StepSurface, step_surface
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.specs.scenario import Scenario

Floats = NDArray[np.float64]
Grid = tuple[float, float, int, int, int]  # the arguments of `step_surface` beside the scenario

NUM_DRAWS = 256


@dataclass(frozen=True)
class Drawn:
    """A candidate under each draw; equal places are equal draws for all candidates.

    rate:      its highest rate under the SLO, over what it is without a draw
    latencies: metric -> the latency that the wanted share of requests keeps, likewise
    """

    rate: Floats
    latencies: Mapping[str, Floats]

    @classmethod
    def none(cls) -> "Drawn":
        """As if the calibration left nothing unexplained."""
        ones = np.ones(NUM_DRAWS)
        return cls(ones, dict.fromkeys(("ttft", "tpot", "itl", "e2el"), ones))


class SharedScores:
    """Scores of devices, a row for each draw: equal for equal devices, alike for those of one architecture."""

    def __init__(self) -> None:
        self._known: dict[str, Floats] = {}

    def of(self, scenario: Scenario) -> Floats:
        """Draws of the errors of a scenario's device and engine."""
        calibration, _ = scenario_fits(scenario)
        declared, profile = scenario.hardware.declared, scenario.engine.profile
        if declared.architecture is None:
            return self._normal(f"device {declared!r} {profile}")
        shared = self._normal(f"architecture {declared.architecture} {profile}")
        if not calibration.is_passed_on:
            return shared
        own = self._normal(f"device {declared!r} {profile}")
        scores: Floats = (shared + (SPREAD_SIBLING**2 - 1) ** 0.5 * own) / SPREAD_SIBLING
        return scores

    def _normal(self, name: str) -> Floats:
        """Standard normal scores that depend on nothing but `name`: of a device its facts, whatever it is called."""
        if name not in self._known:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
            half = np.random.default_rng(seed).standard_normal((NUM_DRAWS // 2, NUM_SCORES))
            self._known[name] = np.concatenate([half, -half])
        return self._known[name]


def drawn_surfaces(
    scenario: Scenario, grid: Grid, scores: Floats, is_disaggregated: bool
) -> tuple[list[StepSurface], Floats]:
    """The step surface of the layout of `scenario` on `grid` under each row of `scores`, and the front end's factors.

    is_disaggregated: whether its engines compute prompts or decode, and not both

    The simulator's own times at one standard deviation of each score; between and beyond, the times' logarithms are
    taken to be linear in each, up and down apart: exact for what all of a step has in common.
    """
    costs = shared_step_costs(scenario)
    uncertainty = Uncertainty.of(costs.calibration, costs.profile, is_disaggregated=is_disaggregated)

    def at(place: int, score: float) -> StepSurface:
        one = tuple(score if index == place else 0.0 for index in range(NUM_SCORES))
        return step_surface(scenario, *grid, uncertainty.draw(one), costs)

    centre = at(0, 0.0)
    up, down = ([_log_ratios(at(place, end), centre) for place in range(NUM_SCORES)] for end in (1.0, -1.0))
    logs = np.maximum(scores, 0.0) @ np.array(up) + np.maximum(-scores, 0.0) @ np.array(down)
    server = np.array([uncertainty.draw(tuple(row)).server for row in scores])
    return _scaled(centre, np.exp(logs)), server


def _flat(surface: StepSurface) -> Floats:
    return np.concatenate([surface.decode, surface.beside.ravel(), surface.cached, [surface.jump, surface.launched]])


def _log_ratios(one: StepSurface, centre: StepSurface) -> Floats:
    """Log ratios of all times of two surfaces; 0 where there is no time."""
    a, b = _flat(one), _flat(centre)
    is_there = (a > 0) & (b > 0)
    found: Floats = np.where(is_there, np.log(np.where(is_there, a, 1.0) / np.where(is_there, b, 1.0)), 0.0)
    return found


def _scaled(centre: StepSurface, factors: Floats) -> list[StepSurface]:
    """`centre` times each row of factors."""
    sizes: Sequence[int] = (centre.decode.size, centre.beside.size, centre.cached.size)
    ends = np.cumsum(sizes)
    return [
        replace(
            centre,
            decode=centre.decode * row[: ends[0]],
            beside=centre.beside * row[ends[0] : ends[1]].reshape(centre.beside.shape),
            cached=centre.cached * row[ends[1] : ends[2]],
            jump=centre.jump * float(row[-2]),
            launched=centre.launched * float(row[-1]),
        )
        for row in factors
    ]
