"""Candidates that the screen has cut, and that may be the best all the same.

The simulator finds other rates than the closed form: for each finalist the ratio of the two is known. A candidate that
was cut may have as high a ratio as any finalist. If it would then be better by the objective than the best that was
simulated, the screen has cut it by less than its own errors, and it has to be simulated, too.
"""

__all__ = ["Ratios", "overlooked", "ratios_of"]

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from perfmodel.planning.deployments.choice import Deployment, objective_key, pick_replicas
from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.deployments.judged import tightness
from perfmodel.planning.screening.screen import Screened
from perfmodel.planning.spec import PlanSpec
from perfmodel.specs.slo import SLO

_BETTER = 0.999  # of the best figure: what is as good is no better


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
    rates = [each.rate / (each.replicas * each.deployment.screened.rate) for each in done if each.rate]
    near = [
        tightness(each.records, slo, quantile) / each.deployment.tightness
        for each in done
        if each.records and each.deployment.replicas == each.replicas
    ]
    return Ratios(*((min(values, default=1.0), max(values, default=1.0)) for values in (rates, near)))


def overlooked(
    cut: Sequence[Deployment | Screened], best: Sequence[float] | None, ratios: Ratios, spec: PlanSpec, rate: float
) -> list[Deployment]:
    """Those of `cut` that may be better than `best`, the most promising one of each layout first.

    cut:   deployments that serve `rate` (requests per second) by the screen, and candidates that do not
    best:  `objective_key` of the best that was simulated; None: nothing serves
    """
    found: dict[Hashable, tuple[tuple[float, ...], Deployment]] = {}
    for each in cut:
        screened = each if isinstance(each, Screened) else each.screened
        likely = replace(screened, rate=screened.rate * ratios.rate[1])
        replicas = pick_replicas(likely, spec, rate)
        if replicas is None or not screened.rate:
            continue
        near = ratios.tightness[0] * (each.tightness if isinstance(each, Deployment) else 1.0)
        key = objective_key(Deployment(likely, replicas, near), spec)
        kind = screened.candidate.kind
        if (best is None or _is_better(key[0], best[0])) and (kind not in found or key < found[kind][0]):
            found[kind] = key, Deployment(screened, replicas, near)
    return [each for _, each in sorted(found.values(), key=lambda pair: pair[0])]


def _is_better(one: float, other: float) -> bool:
    return one < other - (1 - _BETTER) * abs(other)
