"""Prefill and decode as stages of a queueing network, and as a system of two parts that fail.

Each stage serves one request at a time unless said otherwise, transfers take no time, and times are in mean services S.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from test_queueing import SERVICE, OneStepBackend, constant, exponential

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.driver import simulate
from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
from perfmodel.sim.fleet.kv_transfer import TransferCost
from perfmodel.sim.fleet.pool import FleetRouter
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank, Replica
from perfmodel.sim.traffic.clients import OpenLoopClient
from perfmodel.specs import load_scenario

Times = NDArray[np.float64]
RELEASE = pytest.mark.release
FREE = TransferCost(0.0, 1.0, 0.0, 0.0, 1.0, 1)


def scaled(draws: Iterator[int], factor: float) -> Iterator[int]:
    return (max(round(factor * draw), 1) for draw in draws)


def tandem(
    arrivals: Times, prefill: Iterator[int], decode: Iterator[int], num_decode: int = 1, num_blocks: int = 1_000_000
) -> tuple[Times, Times]:
    """Requests of one token of prompt and two of answer: when each came to the end, and how long it was there.

    num_blocks: of each engine; a request holds one while its prompt is computed and until its KV has been fetched, and
    two while it decodes
    """
    env, done = TickEnvironment(), list[Request]()

    def replica(index: int, draws: Iterator[int], is_prefill: bool) -> EngineRank:
        blocks = KVBlockManager(num_blocks if is_prefill else 2 * num_blocks, 1)
        loop = ServeLoop(Scheduler(SchedulerConfig(max_num_seqs=1, block_size=1), blocks), False)
        clock = Lockstep(env, OneStepBackend(draws))
        if is_prefill:
            return EngineRank(clock, index, loop, lambda r, q: server.on_prefilled(r, q), lambda r, _: None)
        return EngineRank(clock, index, loop, lambda r, q: server.on_decoded(r, q), lambda r, _: None)

    first = FleetRouter("round_robin", [Replica([replica(0, prefill, True)])])
    second = FleetRouter("random", [Replica([replica(1 + i, decode, False)]) for i in range(num_decode)])
    server = DisaggregatedServer(env, first, second, lambda *_: FREE, lambda _, request: done.append(request))
    ticks = np.asarray(arrivals).astype(np.int64).tolist()
    OpenLoopClient(env, (Request(i, tick, 1, 2) for i, tick in enumerate(ticks)), lambda _: server)
    env.run()
    ends = np.array([request.finished_at or 0 for request in done]) / SERVICE
    return ends, ends - np.array([request.arrival for request in done]) / SERVICE


def poisson(rho: float, seed: int, count: int) -> Times:
    return np.cumsum(np.random.default_rng(seed).exponential(SERVICE / rho, count))


@pytest.mark.parametrize(("num_decode", "mean"), [pytest.param(1, 0.8, marks=RELEASE), (2, 1.6)])
def test_exponential_stages_are_queues_of_their_own(num_decode: int, mean: float) -> None:
    """Burke (1956): what leaves an M/M/1 queue is a Poisson stream, so each stage is M/M/1 (Jackson 1957), and so is
    each of several decode replicas that it is split over at random."""
    rho = 0.5
    _, spent = tandem(poisson(rho, 1, 40_000), exponential(21), scaled(exponential(22), mean), num_decode)
    expected = 1 / (1 - rho) + mean / (1 - rho * mean / num_decode)
    assert spent.mean() == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("decode", [pytest.param(0.6, marks=RELEASE), 1.4])
def test_of_constant_stages_only_the_slowest_is_waited_for(decode: float) -> None:
    """Friedman (1965): the time in a tandem of constant stages is theirs, and the wait of M/D/1 before the slowest."""
    rho = 0.5
    _, spent = tandem(poisson(rho, 2, 30_000), constant(), scaled(constant(), decode))
    slowest = max(1.0, decode)
    wait = rho * slowest / (2 * (1 - rho * slowest)) * slowest
    assert spent.mean() == pytest.approx(1 + decode + wait, rel=0.03)


@pytest.mark.parametrize(
    ("draws", "decode"),
    [pytest.param(exponential, 1.0, marks=RELEASE), pytest.param(exponential, 0.5, marks=RELEASE), (constant, 0.5)],
)
def test_a_decode_engine_without_room_blocks_the_prefill_engine(
    draws: Callable[..., Iterator[int]], decode: float
) -> None:
    """Blocks for one request on either side and ever more that wait: a prompt is computed while the one before it
    decodes, and the slower of the two ends the cycle (Hunt 1956: two thirds of the rate for equal exponential stages).
    For means 1 and d the longer takes 1 + d - 1 / (1 + 1 / d) on average, of constants the larger."""
    seeds = (31, 32) if draws is exponential else ()
    prefill, second = (draws(*seeds[i : i + 1]) for i in range(2))
    ends, _ = tandem(np.zeros(20_000), prefill, scaled(second, decode), num_blocks=1)
    cycle = 1 + decode - 1 / (1 + 1 / decode) if draws is exponential else max(1.0, decode)
    assert ends.max() / 20_000 == pytest.approx(cycle, rel=0.03)


@RELEASE
def test_a_pair_is_there_when_both_its_parts_are() -> None:
    """Two alternating renewal processes: a request that comes at any time (PASTA) finds both up with the chance
    (mtbf / (mtbf + repair + start))^2, and is then answered at once; else it waits, or is lost."""
    mtbf, repair, start = 20, 6, 4
    settings = (
        "cluster.pools=[{role: prefill}, {role: decode}]",
        f"cluster.failures={{mtbf_s: {mtbf}, repair_s: {repair}, start_s: {start}}}",
        "traffic.num_requests=12000",
        "traffic.arrivals.rate=0.1",
        "engine.num_gpu_blocks_override=1000",
        "traffic.input_tokens={distribution: fixed, value: 16}",
        "traffic.output_tokens={distribution: fixed, value: 2}",
    )
    result = simulate(load_scenario("llama-3.1-8b-h100-2048-256", settings), keep_steps=False)
    assert result.requests is not None
    ttft = result.requests.ttft_s
    at_once = (ttft < 2 * ttft.min()).sum() / 12_000
    assert at_once == pytest.approx((mtbf / (mtbf + repair + start)) ** 2, rel=0.03)
