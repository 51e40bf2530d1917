"""`ExecutedCluster`: the engines of a scenario on the simulated calendar, whose steps and KV transfers are executed.
One engine takes the ranks that it asks for; of several each is a process of its own, and they step at the same time on
the calendar, one after another on this machine."""

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from simpy.events import Event

from perfmodel.cost import StageTicks
from perfmodel.engine import Backend, Outcome, Request, StepPlan, StepRecord
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.fleet.cluster import Cluster
from perfmodel.sim.fleet.kv_transfer import Copies, KvTransfers, TransferCost
from perfmodel.sim.replica.lockstep import Lockstep, PromptBalance
from perfmodel.sim.replica.pipeline import Pipeline
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.backend import PS_PER_NS, ExecutedBackend, ExecutedGroup, StepTimer
from perfmodel_executors.clocks import LiveBackend, WallClock
from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.parallel.ranks import Call, EngineRunner, Ranks, RunnersTogether
from perfmodel_executors.runner import EngineSteps, RunnerSetup

# Whatever stands in front of a backend that executes the steps of a pool's engine.
Wrap = Callable[[Backend, Scenario], Backend]


class Listener(Protocol):
    """Told of what ends in a run."""

    def on_answer(self, request: Request) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...


class _InStages:
    """A backend in pipeline stages: plans are executed when they are made, one after another, and end when they would
    be through: which tokens a plan has does not depend on those under way with it."""

    def __init__(self, backend: Backend, executed: ExecutedBackend, num_stages: int) -> None:
        self.num_stages, self._backend, self._executed = num_stages, backend, executed

    def execute(self, plan: StepPlan) -> Outcome:
        return self._backend.execute(plan)

    def pass_through(self, plan: StepPlan) -> StageTicks:
        self._backend.execute(plan)
        return self._executed.stage_ticks


class ExecutedTransfers(KvTransfers):
    """KV goes from one engine's cache to another's, by way of the ranks' messages, and takes what the wall says: from
    the call to the last block in its place."""

    def __init__(self, env: TickEnvironment, ranks: Ranks, runners: dict[int, EngineRunner]) -> None:
        super().__init__(env)
        self._ranks, self._runners = ranks, runners

    def carry(
        self, cost: TransferCost, left_bytes: float, ends: tuple[int, int], of: Copies | None
    ) -> Generator[Event, None, None]:
        assert of is not None
        there, here = of
        moved = slice(here.num_hashed_blocks, -(-here.num_computed_tokens // cost.block_size))
        yield self.env.timeout(self._move_blocks(*ends, there.block_ids[moved], here.block_ids[moved]))

    def _move_blocks(self, source: int, target: int, sent: Sequence[int], received: Sequence[int]) -> int:
        """The ticks it took."""
        runners = {self._runners[end].rank: self._runners[end] for end in (source, target)}
        origin, to = runners
        runners[to].reserve_for([TokenSegment([], 0, received)])
        began = time.monotonic_ns()
        calls = {
            origin: Call(runners[origin].number, "send_blocks", (sent, to)),
            to: Call(runners[to].number, "receive_blocks", (received, origin)),
        }
        ended: int = self._ranks.ask(calls)[to].result
        return max(1, (ended - began) * PS_PER_NS)


class ExecutedCluster:
    """The engines, made as the cluster is. runner_of: of a pool's engine, by its number; backend_of: of a runner;
    setup_of: of a pool; wrap: stands in front of each backend; live: on the wall's clock; cluster: that runs"""

    cluster: Cluster

    def __init__(
        self,
        ranks: Ranks,
        runner_of: Callable[[Scenario, int], EngineSteps],
        backend_of: Callable[[EngineSteps], ExecutedBackend],
        setup_of: Callable[[Scenario], RunnerSetup],
        wrap: Wrap,
        listener: Listener,
        live: bool = False,
    ) -> None:
        self._wall = WallClock() if live else None
        self.env = TickEnvironment() if self._wall is None else self._wall.env
        self.backends: list[ExecutedBackend] = []
        self._runners: dict[int, EngineRunner] = {}
        self.transfers: KvTransfers = ExecutedTransfers(self.env, ranks, self._runners)
        self._ranks, self._runner_of, self._backend_of, self._setup_of = ranks, runner_of, backend_of, setup_of
        self._wrap, self.listener = wrap, listener
        # By engine, what ended with its last step: the plan that it made before may compute tokens of them.
        self._ended: defaultdict[int, list[Request]] = defaultdict(list)

    def run(self, cluster: Cluster) -> None:
        self.cluster = cluster
        if self._wall is None:
            self.env.run_until_idle()
        else:
            self._wall.run()

    def on_finished(self, engine: int, request: Request) -> None:
        self._ended[engine].append(request)
        self.listener.on_answer(request)

    def on_step(self, engine: int, record: StepRecord) -> None:
        for request in self._ended.pop(engine, ()):
            self.backends[engine].release(request)
        self.listener.on_step(record)

    def locksteps(self, pool: Scenario, engines: range, num_ranks: int) -> Sequence[Lockstep]:
        if num_ranks > 1:
            return [self._together(pool, engines)] * num_ranks
        return [self._lockstep(pool, index) for index in engines]

    def _lockstep(self, pool: Scenario, index: int) -> Lockstep:
        runner, num_stages = self._runner_of(pool, index), pool.engine.pipeline_parallel_size
        if isinstance(runner, EngineRunner):
            self._runners[index] = runner
        executed = self._backend_of(runner)
        self.backends.append(executed)
        backend = self._wrap(executed, pool)
        if self._wall is not None:
            backend = LiveBackend(backend, self._wall)
        if num_stages > 1:
            return Pipeline(self.env, _InStages(backend, executed, num_stages))
        return Lockstep(self.env, backend)

    def _together(self, pool: Scenario, engines: range) -> Lockstep:
        runners = self._ranks.together(self._setup_of(pool))
        self.backends += map(self._backend_of, runners)
        together, timeout = RunnersTogether(runners, self._ranks), pool.engine.attention_dp_timeout_iters
        group = ExecutedGroup(self.backends, together, StepTimer(lambda: together.path_ns))
        balance = PromptBalance(timeout) if timeout else None
        return Lockstep(self.env, self.backends[0], balance=balance, group=group)
