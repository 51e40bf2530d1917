"""Replicas behind a router against queueing theory; each serves one request at a time unless said otherwise.

Times are in mean services S, rho is the load of one replica.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq
from test_queueing import SERVICE, OneStepBackend, constant, exponential, poisson

from perfmodel.engine import KVBlockManager, Outcome, Request, Scheduler, SchedulerConfig, ServeLoop, StepPlan
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.driver import simulate
from perfmodel.sim.fleet.gateway import Gateway
from perfmodel.sim.fleet.routing import ROUTERS
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import OpenLoopClient
from perfmodel.specs import load_scenario
from perfmodel.specs.cluster import GatewaySpec

Times = NDArray[np.float64]


def waits(num_replicas: int, router: str, rho: float, count: int, draws: Iterator[int], seed: int) -> Times:
    """Waits of `count` Poisson requests, in order of finishing, the first tenth left out."""
    env, finished, backend = TickEnvironment(), [], OneStepBackend(draws)

    def replica(index: int) -> EngineRank:
        loop = ServeLoop(Scheduler(SchedulerConfig(max_num_seqs=1), KVBlockManager(8, 16)), False)
        return EngineRank(Lockstep(env, backend), index, loop, lambda _, r: finished.append(r), lambda _, record: None)

    route = ROUTERS[router]([replica(i) for i in range(num_replicas)], seed)
    OpenLoopClient(env, poisson(num_replicas * rho / SERVICE, count, seed), route)
    env.run()
    return np.array([(r.first_scheduled_at or 0) - r.arrival for r in finished][count // 10 :]) / SERVICE


@pytest.mark.parametrize(
    ("draws", "cv"), [pytest.param(lambda: exponential(11), 1.0, marks=pytest.mark.release), (constant, 0.0)]
)
def test_a_poisson_stream_split_at_random_makes_independent_queues(
    draws: Callable[[], Iterator[int]], cv: float
) -> None:
    """Thinned Poisson streams are Poisson: each replica is an M/G/1 queue (Pollaczek and Khinchine)."""
    rho = 0.5
    measured = waits(4, "random", rho, 70_000, draws(), seed=1).mean()
    assert measured == pytest.approx(rho * (1 + cv**2) / 2 / (1 - rho), rel=0.04)


def test_a_poisson_stream_split_in_turn_makes_queues_with_erlang_arrivals() -> None:
    """Every k-th of a Poisson stream: E_k/M/1. An arrival waits sigma / (1 - sigma), where sigma, the chance that it
    does, solves sigma = A*((1 - sigma) / S) with the gaps' transform A*(s) = (k rho / (k rho + s S))^k."""
    k, rho = 3, 0.7
    sigma = brentq(lambda x: (k * rho / (k * rho + 1 - x)) ** k - x, 0.0, 0.999)
    assert sigma < rho
    measured = waits(k, "round_robin", rho, 70_000, exponential(12), seed=2).mean()
    assert measured == pytest.approx(sigma / (1 - sigma), rel=0.04)


@pytest.mark.release
def test_two_choices_reach_the_fixed_point_of_many_servers() -> None:
    """Mitzenmacher (2001): of many servers a share rho^(2^i - 1) has at least i requests, so by Little a request spends
    sum over i of rho^(2^i - 2) in the system; one choice would cost 1 / (1 - rho)."""
    rho = 0.8
    measured = 1 + waits(100, "power_of_two", rho, 100_000, exponential(13), seed=3).mean()
    assert measured == pytest.approx(sum(rho ** (2**i - 2) for i in range(1, 12)), rel=0.03)


@pytest.mark.release
def test_the_shortest_queue_of_many_servers_is_empty() -> None:
    """With fixed rho < 1 and ever more servers nobody waits (Halfin and Whitt's subcritical regime)."""
    assert waits(200, "least_outstanding", 0.8, 60_000, exponential(14), seed=4).mean() < 0.03


def offered(servers: int, rho: float) -> tuple[float, float]:
    """Erlang's formulas for `servers` at load rho each: (B, who is turned away; C, who waits)."""
    load, blocked = servers * rho, 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked, blocked / (1 - rho * (1 - blocked))


@pytest.mark.parametrize("max_queue", [0, pytest.param(1_000_000, marks=pytest.mark.release)])
def test_a_gateway_that_admits_as_many_as_there_are_servers_is_erlangs_system(max_queue: int) -> None:
    """M/M/c/c and M/M/c: what is above `max_outstanding` is refused with chance B, or waits S C / (c (1 - rho))."""
    servers, rho, count = 4, 0.75, 80_000
    env, finished, lost = TickEnvironment(), [], []
    backend = OneStepBackend(exponential(15))

    def on_finished(_: EngineRank, request: Request) -> None:
        gateway.answer(request)
        gateway.reschedule()
        finished.append(request)

    def replica(index: int) -> EngineRank:
        loop = ServeLoop(Scheduler(SchedulerConfig(max_num_seqs=1), KVBlockManager(8, 16)), False)
        return EngineRank(Lockstep(env, backend), index, loop, on_finished, lambda _, record: None)

    route = ROUTERS["least_outstanding"]([replica(i) for i in range(servers)])
    spec = GatewaySpec(max_outstanding=servers, max_queue=max_queue)
    gateway = Gateway(env, spec, 0, route, lost.append)
    OpenLoopClient(env, poisson(servers * rho / SERVICE, count, 5), lambda _: gateway)
    env.run()
    blocked, waits_at_all = offered(servers, rho)
    if max_queue:
        measured = np.mean([(r.first_scheduled_at or 0) - r.arrival for r in finished]) / SERVICE
        assert measured == pytest.approx(waits_at_all / servers / (1 - rho), rel=0.03)
    else:
        assert len(lost) / count == pytest.approx(blocked, rel=0.03)


@dataclass
class _EqualSteps:
    """A run of steps that take `each`."""

    each: int
    num_steps: int

    @property
    def first_duration(self) -> int:
        return self.each

    def duration(self, num_steps: int) -> int:
        return num_steps * self.each

    def step_durations(self, num_steps: int) -> list[int]:
        return [self.each] * num_steps

    def steps_to_reach(self, elapsed: int) -> int:
        return min(max(-(-elapsed // self.each), 1), self.num_steps)


class SharingBackend:
    """A step takes a fixed time for each request in it: all share one processor evenly."""

    def __init__(self, per_token: int) -> None:
        self._per_token = per_token

    def execute(self, plan: StepPlan) -> Outcome:
        return Outcome(self._per_token * plan.num_tokens)

    def plan_leap(self, plan: StepPlan, growth: tuple[int, ...], num_steps: int) -> _EqualSteps:
        return _EqualSteps(self._per_token * plan.num_tokens, num_steps)

    def apply_leap(self, run: _EqualSteps, plan: StepPlan, num_steps: int) -> None:
        pass


MEAN_TOKENS = 500


def _exponential_lengths(rng: np.random.Generator, count: int) -> Times:
    return rng.exponential(MEAN_TOKENS, count)


def _two_lengths(rng: np.random.Generator, count: int) -> Times:
    """A tenth of the answers have half of all tokens."""
    return np.where(rng.random(count) < 0.1, MEAN_TOKENS * 5, MEAN_TOKENS * 5 / 9)


@pytest.mark.parametrize("lengths", [pytest.param(_exponential_lengths, marks=pytest.mark.release), _two_lengths])
def test_a_step_as_long_as_its_batch_shares_the_processor(
    lengths: Callable[[np.random.Generator, int], Times],
) -> None:
    """M/G/1-PS: an answer of x tokens takes x / (1 - rho), whatever the distribution of lengths (Kleinrock 1967)."""
    rho, count, rng = 0.6, 60_000, np.random.default_rng(5)
    tokens = np.maximum(lengths(rng, count), 1).round().astype(int)
    per_token = SERVICE // MEAN_TOKENS
    rate = rho / (per_token * tokens.mean())
    ticks = np.cumsum(rng.exponential(1 / rate, count)).astype(np.int64)
    config = SchedulerConfig(max_num_seqs=10_000, max_num_batched_tokens=10_000, max_model_len=20 * MEAN_TOKENS)
    env, finished, backend = TickEnvironment(), [], SharingBackend(per_token)
    loop = ServeLoop(Scheduler(config, KVBlockManager(100_000, 16)), False)
    clock = Lockstep(env, backend, leaper=backend)
    replica = EngineRank(clock, 0, loop, lambda _, r: finished.append(r), lambda _, record: None)
    requests = (Request(i, t, 1, n) for i, (t, n) in enumerate(zip(ticks.tolist(), tokens.tolist(), strict=True)))
    OpenLoopClient(env, requests, lambda _: replica)
    env.run()
    spent = np.array([(r.finished_at or 0) - r.arrival for r in finished]) / per_token
    sizes = np.array([r.max_output_tokens for r in finished])
    assert spent.mean() == pytest.approx(sizes.mean() / (1 - rho), rel=0.03)
    is_long = sizes > MEAN_TOKENS
    for some in (is_long, ~is_long):  # short and long answers are slowed down alike
        assert spent[some].mean() / sizes[some].mean() == pytest.approx(1 / (1 - rho), rel=0.05)


@pytest.mark.release
def test_replicas_behind_a_random_router_are_each_as_one_alone_at_the_split_rate() -> None:
    """Latencies of real costs: 20 batch means of either side; their difference is within 3 of its standard errors."""
    shared = ("traffic.input_tokens.distribution=exponential", "traffic.input_tokens.mean=1000")
    means: list[Times] = []
    for replicas, seed in ((1, 1), (4, 2)):
        settings = (f"cluster.replicas={replicas}", "cluster.router=random", f"seed={seed}")
        amount = (f"traffic.num_requests={5_000}", f"traffic.arrivals.rate={8 * replicas}")
        scenario = load_scenario("llama-3.1-8b-h100-2048-256", (*shared, *settings, *amount))
        requests = simulate(scenario, keep_steps=False).requests
        assert requests is not None
        order = np.lexsort((requests.arrival_s, requests.replica))  # a replica's batches follow each other
        means.append(np.array([batch.mean() for batch in np.array_split(requests.e2el_s[order], 20)]))
    error = np.sqrt(sum(batches.var(ddof=1) / len(batches) for batches in means))
    assert abs(means[0].mean() - means[1].mean()) < 3 * error
    assert error < 0.03 * means[0].mean()
