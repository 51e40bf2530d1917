"""What a plan wants of candidates: how many of each serve the rate, what that costs, who is best by the objective."""

__all__ = [
    "Deployment",
    "Preliminary",
    "deployed",
    "finalists",
    "may_have",
    "most_replicas",
    "objective_key",
    "pick_replicas",
    "shortfalls",
]

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

from perfmodel.planning.screening.screen import Screened
from perfmodel.planning.spec import PlanSpec


@dataclass(frozen=True)
class Deployment:
    """So many groups (replicas, unless disaggregated) of a candidate.

    tightness: the limit of the SLO that is nearest, as latency over limit at the rate; 1 is just met
    """

    screened: Screened
    replicas: int
    tightness: float = 1.0

    @property
    def num_devices(self) -> int:
        return self.replicas * self.screened.candidate.num_devices

    @property
    def usd_per_hour(self) -> float | None:
        price = self.screened.usd_per_hour
        return None if price is None else price * self.replicas

    @property
    def capacity(self) -> float:
        """Requests per second that all of it serves under the SLO."""
        return self.screened.rate * self.replicas


@dataclass(frozen=True)
class Preliminary:
    """What stage one of a plan has found in closed form: the answer until stage two has simulated it.

    rate:      requests per second to be served
    finalists: those that serve it and are about to be simulated, best first; none where nothing serves
    """

    rate: float
    spec: PlanSpec
    num_candidates: int
    finalists: tuple[Deployment, ...]


def pick_replicas(screened: Screened, spec: PlanSpec, rate: float, group_rate: float | None = None) -> int | None:
    """Number of groups of `screened` that serve `rate` (requests/s) within the limits of `spec`, if each serves
    `group_rate` (default: what the screen found).

    None if so many are not allowed, or none serves.
    """
    each = screened.rate if group_rate is None else group_rate
    if each <= 0:
        return None
    needed = max(1, ceil(rate / each - 1e-9))
    most = most_replicas(screened, spec)
    choices = [count for count in spec.space.replicas or range(1, most + 1) if needed <= count <= most]
    if not choices:
        return None
    return max(choices) if spec.objective == "lowest_latency" else min(choices)


def may_have(screened: Screened, spec: PlanSpec, replicas: int) -> bool:
    """Whether the plan allows so many groups."""
    return replicas <= most_replicas(screened, spec) and (not spec.space.replicas or replicas in spec.space.replicas)


def most_replicas(screened: Screened, spec: PlanSpec) -> int:
    """The most groups that the devices and the budget allow."""
    most = spec.max_gpus // screened.candidate.num_devices
    if spec.budget_usd_per_hour is not None and screened.usd_per_hour:
        most = min(most, int(spec.budget_usd_per_hour / screened.usd_per_hour))
    return most


def deployed(screened: Iterable[Screened], spec: PlanSpec, rate: float) -> list[Deployment]:
    """Deployments that serve the rate within what may be spent."""
    found = ((each, pick_replicas(each, spec, rate)) for each in screened)
    return [Deployment(each, replicas) for each, replicas in found if replicas is not None]


def shortfalls(screened: Iterable[Screened], spec: PlanSpec, rate: float) -> dict[str, int]:
    """How many candidates do not serve the rate, by reason."""
    found: Counter[str] = Counter()
    for each in screened:
        if each.rate <= 0:
            found["misses the SLO at any rate"] += 1
        elif pick_replicas(each, spec, rate) is None:
            needed = ceil(rate / each.rate - 1e-9)
            is_dear = needed * each.candidate.num_devices <= spec.max_gpus and spec.budget_usd_per_hour is not None
            found["over budget at the rate" if is_dear else "too slow for the rate with max_gpus"] += 1
    return dict(found.most_common())


def objective_key(deployment: Deployment, spec: PlanSpec) -> tuple[float, ...]:
    """Smaller is better; ties go to whoever has more in reserve."""
    reserve = -deployment.capacity
    usd = inf if deployment.usd_per_hour is None else deployment.usd_per_hour
    if spec.objective == "cheapest":
        return usd, reserve
    if spec.objective == "fewest_gpus":
        return float(deployment.num_devices), usd, reserve
    if spec.objective == "lowest_latency":
        return deployment.tightness, usd, reserve
    return -deployment.screened.rate_per_device, usd


def finalists(deployments: Sequence[Deployment], spec: PlanSpec) -> list[Deployment]:
    """The best by the objective of each layout (devices, parallelism, formats, split): what differs in scheduling only
    is one choice, of which the screen's best goes on.

    Where all of them are disaggregated, the best that is not takes the last place: what is usual is simulated, too.
    """
    best: dict[Hashable, Deployment] = {}
    for each in sorted(deployments, key=lambda deployment: objective_key(deployment, spec)):
        best.setdefault(each.screened.candidate.kind, each)
    chosen = list(best.values())[: spec.finalists]
    usual = [each for each in deployments if each.screened.candidate.ratio is None]
    if usual and len(chosen) > 1 and all(each.screened.candidate.ratio is not None for each in chosen):
        chosen[-1] = min(usual, key=lambda deployment: objective_key(deployment, spec))
    return chosen
