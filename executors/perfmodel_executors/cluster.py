"""`ExecutedCluster`: executes the steps and KV transfers of a scenario's engines on the simulated calendar. One engine
takes the ranks that it asks for; several are processes that step together on the calendar, in turns on this machine."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perfmodel.cost import StageTicks
from perfmodel.engine import Backend, Outcome, Request, StepPlan, StepRecord
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.fleet.cluster import Cluster
from perfmodel.sim.fleet.kv_transfer import Copies, KvTransfers, TransferCost
from perfmodel.sim.replica.lockstep import Lockstep, PromptBalance
from perfmodel.sim.replica.pipeline import Pipeline
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.backend import ExecutedBackend, ExecutedGroup, StepStopwatch
from perfmodel_executors.clocks import PS_PER_NS, LiveBackend, WallClock
from perfmodel_executors.device import StepClock
from perfmodel_executors.measure.calibrate import Progress
from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.parallel.ranks import EngineRunner, RankCall, Ranks, RunnersTogether
from perfmodel_executors.runner import RunnerSetup, StepTaker

# Whatever stands in front of a Backend that executes the steps of a pool's engine, or a GroupBackend of its ranks.
Wrap = Callable[[Any, Scenario], Any]


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


class TimeIsUpError(Exception):
    """Ends the serving of an executed run; the records so far are its result."""


class RunMonitor:
    """Watches a run. on_answer: called with each answered request; progress: with each step's (tokens computed, in
    all); max_seconds: of wall time, after which no step begins; is_cut: that ended the run; cut_short: what else did"""

    def __init__(
        self,
        on_answer: Callable[[Request], None] = lambda _: None,
        progress: Progress | None = None,
        num_tokens: int = 0,
        max_seconds: float | None = None,
    ) -> None:
        self.max_seconds, self.is_cut, self.cut_short, self.on_answer = max_seconds, False, "", on_answer
        self._progress, self._num_computed, self._num_tokens = progress, 0, num_tokens
        self.begin()

    def begin(self) -> None:
        """Seconds count from now on."""
        self._begun = time.monotonic()

    def before_step(self) -> None:
        """Raises TimeIsUpError once the time is up."""
        if self.max_seconds is not None and time.monotonic() - self._begun > self.max_seconds:
            self.is_cut = True
            raise TimeIsUpError

    def on_step(self, record: StepRecord) -> None:
        self._num_computed += record.num_tokens
        if self._progress is not None:
            self._progress(self._num_computed, max(self._num_tokens, self._num_computed))


class _Monitored:
    """A Backend or GroupBackend that asks the monitor before each step."""

    def __init__(self, backend: Any, monitor: RunMonitor) -> None:
        self._backend, self._monitor = backend, monitor

    def execute(self, plan: StepPlan) -> Any:
        self._monitor.before_step()
        return self._backend.execute(plan)

    def execute_together(self, plans: Mapping[int, StepPlan]) -> Any:
        self._monitor.before_step()
        return self._backend.execute_together(plans)


class ExecutedTransfers(KvTransfers):
    """KV goes between engines' caches by the ranks' messages, and takes wall time: from the call to the last block."""

    def __init__(
        self, env: TickEnvironment, ranks: Ranks, runners: dict[int, EngineRunner], backends: list[ExecutedBackend]
    ) -> None:
        super().__init__(env)
        self._ranks, self._runners, self._backends = ranks, runners, backends

    def take(self, cost: TransferCost, left_bytes: float, ends: tuple[int, int], of: Copies | None) -> int:
        assert of is not None
        (there, here), (source, target) = of, (self._runners[end] for end in ends)
        moved = slice(here.num_hashed_blocks, -(-here.num_computed_tokens // cost.block_size))
        received = list(here.block_ids[moved])
        target.reserve_for([TokenSegment([], 0, received)])
        began = time.monotonic_ns()
        calls = {
            source.rank: RankCall(source.number, "send_blocks", (list(there.block_ids[moved]), target.rank)),
            target.rank: RankCall(target.number, "receive_blocks", (received, source.rank)),
        }
        ended: int = self._ranks.ask(calls)[target.rank].result
        self._backends[ends[0]].forget(there)
        return max(1, (ended - began) * PS_PER_NS)


class ExecutedCluster:
    """The engines, which are made when the simulator's cluster asks for them.

    runner_of:  makes the runner of an engine, given its pool's scenario and its number
    backend_of: makes the backend that executes with a runner
    setup_of:   what the ranks of a pool's engine have to know
    wrap:       makes what stands in front of each backend
    live:       the calendar follows the wall's clock
    cluster:    the cluster that runs; clock: what measures its steps"""

    cluster: Cluster
    clock: StepClock

    def __init__(
        self,
        ranks: Ranks,
        runner_of: Callable[[Scenario, int], StepTaker],
        backend_of: Callable[[StepTaker], ExecutedBackend],
        setup_of: Callable[[Scenario], RunnerSetup],
        wrap: Wrap,
        monitor: RunMonitor,
        live: bool = False,
    ) -> None:
        self._wall = WallClock() if live else None
        self.env = TickEnvironment() if self._wall is None else self._wall.env
        self.backends: list[ExecutedBackend] = []
        self._runners: dict[int, EngineRunner] = {}
        self.transfers: KvTransfers = ExecutedTransfers(self.env, ranks, self._runners, self.backends)
        self._ranks, self._runner_of, self._backend_of, self._setup_of = ranks, runner_of, backend_of, setup_of
        self._wrap, self._monitor = wrap, monitor
        # By engine, what ended with its last step: the plan that it made before may compute tokens of them.
        self._ended: defaultdict[int, list[Request]] = defaultdict(list)

    def run(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._monitor.begin()
        if self._wall is None:
            self.env.run_until_idle()
        else:
            self._wall.begin()
            self._wall.run()
        for engine in tuple(self._ended):
            self._release(engine)

    def on_finished(self, engine: int, request: Request) -> None:
        self._ended[engine].append(request)
        self.backends[engine].tokens.finish(request)
        self._monitor.on_answer(request)

    def on_step(self, engine: int, record: StepRecord) -> None:
        self._release(engine)
        self._monitor.on_step(record)

    def _release(self, engine: int) -> None:
        for request in self._ended.pop(engine, ()):
            self.backends[engine].release(request)

    def locksteps(self, pool: Scenario, engines: range, num_ranks: int) -> Sequence[Lockstep]:
        if num_ranks == 1:
            return [self._lockstep(pool, index) for index in engines]
        runners = self._ranks.together(self._setup_of(pool))
        self.backends += map(self._backend_of, runners)
        together, timeout = RunnersTogether(runners, self._ranks), pool.engine.attention_dp_timeout_iters
        self.clock, balance = together.clock, PromptBalance(timeout) if timeout else None
        group = ExecutedGroup(self.backends, together, StepStopwatch(together.clock, self.backends[0].timer.drift))
        monitored = _Monitored(self._wrap(group, pool), self._monitor)
        return [Lockstep(self.env, self.backends[0], balance=balance, group=monitored)] * num_ranks

    def _lockstep(self, pool: Scenario, index: int) -> Lockstep:
        runner, num_stages = self._runner_of(pool, index), pool.engine.pipeline_parallel_size
        if isinstance(runner, EngineRunner):
            self._runners[index] = runner
        executed, self.clock = self._backend_of(runner), runner.new_clock()
        self.backends.append(executed)
        backend: Backend = _Monitored(self._wrap(executed, pool), self._monitor)
        if self._wall is not None:
            backend = LiveBackend(backend, self._wall)
        if num_stages > 1:
            return Pipeline(self.env, _InStages(backend, executed, num_stages))
        return Lockstep(self.env, backend)
