"""`Pool`: equal replicas of one role, their cost model and router."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perfmodel import cost as costs
from perfmodel.cost import Calibration, EngineProfile, MemoryPlan
from perfmodel.engine import Request, StepRecord
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.fleet.routing import ROUTERS, FrontEnds, Router
from perfmodel.sim.replica.backend import SimulatedBackend
from perfmodel.sim.replica.pipeline import Pipeline
from perfmodel.sim.replica.replica import EngineRank, Replica
from perfmodel.sim.traffic.distributions import hashed
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.scenario import Scenario

OnFinished = Callable[[EngineRank, Request], None]
OnStep = Callable[[EngineRank, StepRecord], None]


class PoolBasis(NamedTuple):
    """Calibration and profile that time steps, and the memory left by weights."""

    calibration: Calibration
    profile: EngineProfile
    memory: MemoryPlan


BasisOf = Callable[[Scenario], PoolBasis]  # of a pool's own scenario (`Scenario.of_pool`)


def remembered_basis(calibration: Calibration | None, profile: EngineProfile | None) -> BasisOf:
    """Cached bases by model, hardware and engine; `scenario_fits` has the defaults.

    Raises DoesNotFitError for a model too large for the devices."""
    known: list[tuple[Scenario, PoolBasis]] = []

    def basis_of(pool: Scenario) -> PoolBasis:
        for other, basis in known:
            # Shortened traffic leaves the very same objects in place: nothing has to be compared in depth.
            if other.model is pool.model and other.hardware is pool.hardware and other.engine == pool.engine:
                return basis
        fits = costs.scenario_fits(pool, calibration, profile)
        basis = PoolBasis(*fits, costs.plan_memory(pool.model, pool.hardware, pool.engine))
        known.append((pool, basis))
        return basis

    return basis_of


@dataclass(frozen=True)
class Pool:
    """Engines of one role; `scenario` is the pool's own (`Scenario.of_pool`).

    replicas:  one engine per data-parallel rank each
    pipelines: clocks of engines with several stages"""

    spec: PoolSpec
    scenario: Scenario
    memory: MemoryPlan
    cost_model: costs.StepCostModel
    replicas: tuple[Replica, ...]
    route: "FleetRouter"
    backend: SimulatedBackend
    pipelines: tuple[Pipeline, ...] = ()

    @property
    def engines(self) -> list[EngineRank]:
        return [rank for replica in self.replicas for rank in replica.ranks]

    @property
    def num_devices(self) -> int:
        return round(len(self.engines) * self.devices_per_engine)

    @property
    def devices_per_engine(self) -> float:
        """Whole, but where ranks share feed-forward devices."""
        return self.spec.engine.num_devices / self.spec.engine.data_parallel_size

    @property
    def weight_bytes_per_replica(self) -> float:
        """Bytes loaded at a replica's start, on all its devices."""
        return self.memory.weight_bytes * self.devices_per_engine * len(self.replicas[0].ranks)

    def usage(self) -> costs.Usage:
        """Usage of one device per engine, summed; of split layers the mean one."""
        usage = costs.Usage()
        usage.add(self.cost_model.usage(), 1 / self.spec.engine.layer_split)
        return usage

    @property
    def under_way_s(self) -> float:
        """Device-seconds in which multi-stage engines had plans in flight."""
        ticks = sum(clock.ticks_under_way * clock.num_ranks for clock in self.pipelines)
        return ticks / TICKS_PER_S * self.devices_per_engine

    @property
    def bubble_s(self) -> float:
        """Device-seconds of pipeline bubbles: stages idle with plans in flight in others."""
        return self.under_way_s - self.usage().busy_s * self.devices_per_engine

    def energy_j(self, engine_s: float) -> float:
        """Joules of all devices; `engine_s`: engine-seconds in use."""
        return costs.energy_j(self.scenario.hardware, self.usage(), engine_s) * self.devices_per_engine

    def energy_split_j(self, engine_s: float) -> dict[str, float]:
        """The same by component: idle, memory, compute."""
        one_of_each = costs.energy_split_j(self.scenario.hardware, self.usage(), engine_s)
        return {name: joules * self.devices_per_engine for name, joules in one_of_each.items()}


class FleetRouter:
    """Router `name` over replicas that come and go; seed: of what it draws.

    within:     how a replica's rank is chosen: vLLM's data-parallel load balancer and TensorRT-LLM's attention-DP
                balance take the one with fewest requests
    samples:    answers of a prompt, which are one request at a router and so on one replica
    front_ends: that have a router each"""

    def __init__(
        self,
        name: str,
        replicas: Sequence[Replica],
        seed: int = 0,
        samples: int = 1,
        within: str = "least_outstanding",
        front_ends: int = 1,
    ) -> None:
        self._samples = samples
        self._chosen: dict[int, tuple[Any, int]] = {}  # by prompt: the target, and how many answers are still to come
        shared = replicas if any(len(replica.ranks) > 1 for replica in replicas) else ()
        self._within: dict[int, Router[EngineRank]] = {
            replica.index: ROUTERS[within](replica.ranks, seed=hashed(seed, replica.index)) for replica in shared
        }
        # Over replicas, or where each is one rank, over these.
        make = ROUTERS[name]
        self._router: Router[Any] = make(seed=seed) if front_ends == 1 else FrontEnds(make, front_ends, seed)
        for replica in replicas:
            self.join(replica)

    @classmethod
    def over(cls, pools: Sequence[Pool], scenario: Scenario) -> "FleetRouter":
        """Router over `pools` of `scenario`; a single pool uses its own."""
        if len(pools) == 1:
            return pools[0].route
        replicas = [replica for pool in pools for replica in pool.replicas]
        return cls.of(scenario.cluster.router, replicas, scenario, pools[0].spec)

    @classmethod
    def of(cls, name: str, replicas: Sequence[Replica], scenario: Scenario, spec: PoolSpec) -> "FleetRouter":
        """Router `name` over `replicas` of pools of `scenario` like `spec`."""
        within = spec.engine.described.facts.ranks_by.get(spec.role, "least_outstanding")
        samples, front_ends = scenario.traffic.samples_per_request, scenario.cluster.front_ends
        return cls(name, replicas, scenario.seed, samples, within, front_ends)

    def __call__(self, request: Request) -> EngineRank:
        """Engine for `request`; some replica must be up."""
        target = self._router(request) if self._samples == 1 else self._with_others(request)
        engine: EngineRank = self._within[target.index](request) if self._within else target
        return engine

    def _with_others(self, request: Request) -> Any:
        """Where the first answer to the same prompt went, unless that has left."""
        prompt = request.request_id // self._samples
        target, left = self._chosen.pop(prompt, (None, self._samples))
        if target not in self._router.targets:
            target = self._router(request)
        if left > 1:
            self._chosen[prompt] = target, left - 1
        return target

    def __len__(self) -> int:
        return len(self._router.targets)

    def join(self, replica: Replica) -> None:
        """Add `replica`, known from the start, to the routing."""
        self._router.join(replica if self._within else replica.ranks[0])

    def leave(self, replica: Replica) -> None:
        """Remove `replica` from the routing until it joins again."""
        self._router.leave(replica if self._within else replica.ranks[0])
