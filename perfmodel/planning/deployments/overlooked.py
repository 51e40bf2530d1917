"""Candidates that the screen has cut, and that may be the best all the same.

The simulator finds other rates than the closed form. For each finalist the ratio of the two is known. A candidate that
was cut may have as high a ratio as any finalist. If it would then be better than the best finalist, it was cut by less
than the spread of the ratio, and has to be simulated, too.
"""

__all__ = ["Ratios", "overlooked", "ratios_of"]

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from perfmodel.planning.deployments.choice import Deployment, objective_key, pick_replicas
from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.deployments.judged import tightness
from perfmodel.planning.spec import PlanSpec
from perfmodel.specs.slo import SLO

_BETTER = 0.001  # of the best figure: what is as good is no better


@dataclass(frozen=True)
class Ratios:
    """The lowest and the highest simulated figure over that of the closed form, among finalists.

    rate:      of the highest rate
    tightness: of the limit that comes nearest, latency over limit
    """

    rate: tuple[float, float]
    tightness: tuple[float, float]


def ratios_of(done: Sequence[Finalist], slo: SLO, quantile: str) -> Ratios:
    """The ratios of `done`; 1 to 1 where nothing served."""
    rates = [
        finalist.rate / (finalist.replicas * finalist.deployment.screened.rate) for finalist in done if finalist.rate
    ]
    near = [
        tightness(finalist.records, slo, quantile) / finalist.deployment.tightness
        for finalist in done
        if finalist.records
        and finalist.deployment.replicas == finalist.replicas
        and isfinite(finalist.deployment.tightness)
    ]
    return Ratios(*((min(values, default=1.0), max(values, default=1.0)) for values in (rates, near)))


def overlooked(
    cut: Sequence[Deployment], best: float | None, ratios: Ratios, spec: PlanSpec, rate: float
) -> list[Deployment]:
    """Those of `cut` that may be better than `best`, the most promising one of each layout first.

    cut:   deployments at `rate` (requests per second), whether they serve it by the screen or not
    best:  of the simulated ones by `objective_key`, its first figure; None: nothing serves
    ratios: simulated figures over those of the screen; spec: the plan's objective and limits
    """
    best_of_kind: dict[Hashable, tuple[tuple[float, ...], Deployment]] = {}
    for deployment in cut:
        screened = deployment.screened
        likely = replace(screened, rate=screened.rate * ratios.rate[1])
        replicas = pick_replicas(likely, spec, rate)
        if replicas is None:
            continue
        near = ratios.tightness[0] * deployment.tightness
        key = objective_key(Deployment(likely, replicas, near), spec)
        kind = screened.candidate.kind
        if (best is None or key[0] < best - _BETTER * abs(best)) and (
            kind not in best_of_kind or key < best_of_kind[kind][0]
        ):
            best_of_kind[kind] = key, Deployment(screened, replicas, near)
    return [deployment for _, deployment in sorted(best_of_kind.values(), key=lambda pair: pair[0])]
