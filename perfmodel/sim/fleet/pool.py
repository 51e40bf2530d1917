"""`Pool`: equal replicas with one role, their cost model, and the router in front of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from perfmodel.cost import (
    Calibration,
    EngineProfile,
    MemoryPlan,
    SpeculativePricer,
    StepPricer,
    Usage,
    energy_j,
    energy_split_j,
    plan_memory,
    scenario_fits,
)
from perfmodel.cost.calibrations.draws import Draw
from perfmodel.engine import Request, StepRecord
from perfmodel.errors import SpecError
from perfmodel.sim.clock import TICKS_PER_S, TickEnvironment
from perfmodel.sim.fleet.routing import ROUTERS, LeastOutstanding, Router
from perfmodel.sim.replica.acceptance import SimulatedAcceptance
from perfmodel.sim.replica.backend import SimulatedBackend
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.pipeline import Pipeline
from perfmodel.sim.replica.replica import EngineRank, FrontEnd, Replica
from perfmodel.sim.replica.serving import build_locksteps, build_serve_loop, scheduler_config, second_tier
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.scenario import Scenario

OnFinished = Callable[[EngineRank, Request], None]
OnStep = Callable[[EngineRank, StepRecord], None]


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


@dataclass(frozen=True)
class Pool:
    """Engines of one role on the simulated clock; `scenario` is theirs alone (`Scenario.of_pool`).

    replicas:  of one engine per data-parallel rank each
    pipelines: the clocks of the engines, where they have several stages
    """

    spec: PoolSpec
    scenario: Scenario
    memory: MemoryPlan
    pricer: StepPricer
    replicas: tuple[Replica, ...]
    route: "FleetRouter"
    backend: SimulatedBackend
    pipelines: tuple[Pipeline, ...] = ()

    @property
    def engines(self) -> list[EngineRank]:
        return [rank for replica in self.replicas for rank in replica.ranks]

    @property
    def num_devices(self) -> int:
        return len(self.engines) * self.devices_per_engine

    @property
    def devices_per_engine(self) -> int:
        return self.spec.engine.tensor_parallel_size * self.spec.engine.pipeline_parallel_size

    @property
    def weight_bytes_per_replica(self) -> float:
        """Bytes that a replica loads when it starts, on all its devices."""
        return self.memory.weight_bytes * self.devices_per_engine * len(self.replicas[0].ranks)

    @property
    def restored_bytes_per_block(self) -> float:
        """Bytes of a KV block on the link of one device to the second tier; 0 without one."""
        cost = self.backend.restore
        return 0.0 if cost is None else cost.block_bytes

    def usage(self) -> Usage:
        """What one device of each engine did, summed: the pricer counts one device per engine."""
        return self.pricer.usage()

    @property
    def under_way_s(self) -> float:
        """Device seconds, summed, in which engines with several stages had plans under way."""
        ticks = sum(clock.ticks_under_way * clock.num_ranks for clock in self.pipelines)
        return ticks / TICKS_PER_S * self.devices_per_engine

    @property
    def bubble_s(self) -> float:
        """Device seconds, summed, in which pipeline stages were idle while plans were under way in others."""
        return self.under_way_s - self.usage().busy_s * self.devices_per_engine

    def energy_j(self, engine_s: float) -> float:
        """Joules of all devices, whose engines were there for `engine_s`, summed."""
        one_of_each = energy_j(self.scenario.hardware, self.usage(), engine_s)
        return one_of_each * self.devices_per_engine

    def energy_split_j(self, engine_s: float) -> dict[str, float]:
        """The same by what takes them: idle, memory, compute."""
        one_of_each = energy_split_j(self.scenario.hardware, self.usage(), engine_s)
        return {name: joules * self.devices_per_engine for name, joules in one_of_each.items()}


def build_pool(
    env: TickEnvironment,
    scenario: Scenario,
    spec: PoolSpec,
    memory: MemoryPlan,
    calibration: Calibration,
    profile: EngineProfile,
    first_index: int,
    on_finished: OnFinished,
    on_step: OnStep,
    can_leap: bool,
    one_of: int,
    front_end: Callable[[], FrontEnd | None] = lambda: None,
    draw: Draw | None = None,
) -> Pool:
    """The pool `spec` of `scenario` with idle replicas, numbered from `first_index`; each asks for its `front_end`.

    memory:               of one device
    calibration, profile: what step times come from
    on_finished, on_step: called with (replica, request) and (replica, record)
    can_leap:             whether runs of equal steps are advanced together
    one_of:               the pool has one of so many of its engines
    draw:                 factors on step times
    """
    mine = scenario.of_pool(spec)
    costs = shared_step_costs(mine, calibration, profile)
    pricer = costs.pricer(draw)
    backend = _backend(mine, pricer, is_split=draw is None)
    num_ranks = mine.engine.data_parallel_size

    num_engines = spec.most_replicas * num_ranks
    if num_engines % one_of:
        raise ValueError(f"{spec.most_replicas} x {num_ranks} engines cannot be cut in {one_of} equal slices")
    num_engines //= one_of
    together = gcd(num_ranks, num_engines)  # what is left of a replica in a slice
    locksteps = build_locksteps(mine.engine, num_engines, together, env, backend, costs.graph, can_leap)

    tier = second_tier(mine, costs)
    backend.restore = tier.cost if tier is not None else None
    config = scheduler_config(mine, pricer=pricer if isinstance(pricer, SpeculativePricer) else None)
    if spec.role != "unified":  # KV comes and goes by the rules of one scheduler, that of free blocks
        config = replace(config, defers_frees=mine.engine.defers_frees, estimates=None)

    def engine(index: int, lockstep: Lockstep) -> EngineRank:
        host = tier.blocks() if tier is not None else None
        loop = build_serve_loop(mine, memory.num_kv_blocks, host=host, config=config)
        return EngineRank(lockstep, index, loop, on_finished, on_step, front_end())

    engines = [engine(first_index + i, lockstep) for i, lockstep in enumerate(locksteps)]
    replicas = tuple(Replica(engines[i : i + together]) for i in range(0, len(engines), together))
    route = FleetRouter(spec.router or scenario.cluster.router, replicas, scenario.seed)
    pipelines = tuple(dict.fromkeys(clock for clock in locksteps if isinstance(clock, Pipeline)))
    return Pool(spec, mine, memory, pricer, replicas, route, backend, pipelines)


def _backend(scenario: Scenario, pricer: StepPricer, is_split: bool) -> SimulatedBackend:
    config = scenario.engine.speculative_config
    if config is None:
        return SimulatedBackend(pricer, is_split=is_split)
    if config.acceptance is None:
        raise SpecError(
            f"{scenario.name}: engine.speculative_config has no acceptance, which a simulation needs: give a rate, or "
            f"the file that `perfmodel execute` has measured."
        )
    acceptance = SimulatedAcceptance(config, scenario.seed)
    return SimulatedBackend(pricer, acceptance, config.ahead, is_split)


class FleetRouter:
    """The router `name` over replicas of one or more ranks each, which come and go.

    Inside a replica a request goes to the rank with the fewest: as with vLLM's data-parallel load balancer and the
    attention-DP balance of TensorRT-LLM.
    """

    def __init__(self, name: str, replicas: Sequence[Replica], seed: int = 0) -> None:
        self._has_ranks = any(len(replica.ranks) > 1 for replica in replicas)
        shared = replicas if self._has_ranks else ()
        self._within: dict[int, Router[EngineRank]] = {each.index: LeastOutstanding(each.ranks) for each in shared}
        self._singles: Router[EngineRank] = ROUTERS[name](seed=seed)
        self._replicas: Router[Replica] = ROUTERS[name](seed=seed)
        for replica in replicas:
            self.join(replica)

    @classmethod
    def over(cls, pools: Sequence[Pool], scenario: Scenario) -> "FleetRouter":
        """The router over the replicas of some pools of `scenario`: their own if there is but one pool."""
        if len(pools) == 1:
            return pools[0].route
        return cls(scenario.cluster.router, [replica for pool in pools for replica in pool.replicas], scenario.seed)

    def __call__(self, request: Request) -> EngineRank:
        """The engine that `request` goes to; some replica must be there."""
        if not self._has_ranks:
            return self._singles(request)
        return self._within[self._replicas(request).index](request)

    def __len__(self) -> int:
        """Replicas that take requests."""
        return len(self._replicas.targets if self._has_ranks else self._singles.targets)

    def join(self, replica: Replica) -> None:
        """`replica`, one of those known from the start, takes requests from now on."""
        if self._has_ranks:
            self._replicas.join(replica)
        else:
            self._singles.join(replica.ranks[0])

    def leave(self, replica: Replica) -> None:
        """`replica` takes no more requests, until it joins again."""
        if self._has_ranks:
            self._replicas.leave(replica)
        else:
            self._singles.leave(replica.ranks[0])
