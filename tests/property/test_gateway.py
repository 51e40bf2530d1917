"""Laws of the gateway: each request that is sent ends in one of three ways, nothing is lost, leaps change nothing."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine_integrity import check_idle, check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st
from test_leaps import ScriptedBackend

from perfmodel.engine import Request, StepRecord
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment
from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
from perfmodel.sim.fleet.gateway import Gateway, LostRequest
from perfmodel.sim.fleet.kv_transfer import Fabric, KvTransfers, TransferCost
from perfmodel.sim.fleet.pool import FleetRouter
from perfmodel.sim.fleet.routing import ROUTERS
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank, Replica
from perfmodel.sim.traffic.clients import ClosedLoopClient, OpenLoopClient
from perfmodel.specs.cluster import GatewaySpec, RateLimit, Retries
from workloads import BLOCK_SIZE, Case, cases

TICK = 1e-12

specs = st.builds(
    GatewaySpec,
    rate_limit=st.none() | st.builds(RateLimit, requests_per_s=st.sampled_from([1 / (40 * TICK)]), burst=st.just(2)),
    max_outstanding=st.none() | st.integers(1, 8),
    max_queue=st.sampled_from([0, 2, 100]),
    timeout_s=st.none() | st.sampled_from([50 * TICK, 400 * TICK, 3000 * TICK]),
    retries=st.none() | st.builds(Retries, max=st.integers(1, 3), backoff_s=st.sampled_from([0.0, 30 * TICK])),
)


@dataclass(frozen=True)
class Wires:
    """How KV moves, where there are prefill and decode engines; ticks per token."""

    is_layerwise: bool
    is_shared: bool
    per_token: int


Losses = tuple[tuple[int, int], ...]  # (number of an engine, tick): all that it has is lost


@dataclass
class Ended:
    """What became of the requests of a run."""

    done: list[tuple[int, int | None, int | None]] = field(default_factory=list)
    lost: list[tuple[int, str, int]] = field(default_factory=list)


def serve(
    case: Case,
    spec: GatewaySpec,
    counts: tuple[int, int],
    concurrency: int | None,
    losses: Losses,
    wires: Wires,
    can_leap: bool,
) -> Ended:
    """Through a gateway to unified engines, or to prefill and decode ones; at each of `losses` one loses all."""
    env, ended, backend = TickEnvironment(), Ended(), ScriptedBackend()
    client: Any = None

    def on_finished(_: EngineRank, request: Request) -> None:
        if gateway.answer(request):
            ended.done.append((request.request_id, request.first_token_at, request.finished_at))
            client.on_finished(request)
        gateway.reschedule()

    def on_lost(lost: LostRequest) -> None:
        ended.lost.append((lost.request.request_id, lost.fate, lost.at))
        client.on_finished(lost.request)

    def on_step(replica: EngineRank, _: StepRecord) -> None:
        check_integrity(replica.loop.scheduler)

    def on_prefilled(replica: EngineRank, request: Request) -> None:
        assert server is not None
        server.on_prefilled(replica, request)

    def on_decoded(replica: EngineRank, request: Request) -> None:
        on_finished(replica, request) if server is None else server.on_decoded(replica, request)

    num_prefill, _ = counts
    clocks = [Lockstep(env, backend, backend if can_leap else None) for _ in range(sum(counts))]
    first = [
        EngineRank(clock, i, case.loop(), on_prefilled, lambda _, r: None)
        for i, clock in enumerate(clocks[:num_prefill])
    ]
    second = [
        EngineRank(clock, i, case.loop(), on_decoded, on_step)
        for i, clock in enumerate(clocks[num_prefill:], num_prefill)
    ]
    decode = ROUTERS["least_outstanding"](second)
    server: DisaggregatedServer | None = None
    if first:
        cost = TransferCost(30 * TICK, 1.0, wires.per_token * TICK, 0.0, 1.0, BLOCK_SIZE, num_layers=4)
        to_prefill = FleetRouter("random", [Replica([replica]) for replica in first])
        to_decode = FleetRouter("least_outstanding", [Replica([replica]) for replica in second])
        transfers = KvTransfers(env, wires.is_layerwise, Fabric(env, 1 / TICK) if wires.is_shared else None)
        server = DisaggregatedServer(env, to_prefill, to_decode, lambda a, b: cost, on_finished, transfers=transfers)
    gateway = Gateway(env, spec, 7, (lambda _: server) if server is not None else decode, on_lost)

    def lose(replica: EngineRank) -> None:
        gateway.fail(gateway.outstanding_at([replica]) if server is None else server.fail([replica]))
        replica.loop.scheduler.forget_all()  # raises if a request still holds one

    for which, tick in losses:
        hit = (first + second)[which % sum(counts)]
        Alarm(env, tick, lambda _, r=hit: lose(r), ARRIVAL_PRIORITY)  # type: ignore[misc]
    requests = case.requests()
    if concurrency is None:
        client = OpenLoopClient(env, iter(requests), lambda _: gateway)
    else:
        client = ClosedLoopClient(env, iter(requests), lambda _: gateway, concurrency)
    env.run()
    assert gateway.num_sent == len(requests)
    assert gateway.num_outstanding == gateway.num_queued == 0
    assert not gateway.has_requests
    for engine in first + second:
        assert engine.num_outstanding == engine.num_prompt_blocks == 0
        assert not engine.loop.has_requests
        assert engine.loop.scheduler.blocks.num_free == case.num_blocks
    if server is not None:
        check_idle(server, [*first, *second])
    return ended


fleets = st.sampled_from([(0, 1), (0, 2), (0, 3), (1, 1), (2, 2)])
all_losses = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000)), max_size=6).map(tuple)
all_wires = st.builds(Wires, st.booleans(), st.booleans(), st.sampled_from([0, 1, 30]))


@given(cases(max_requests=15), specs, fleets, st.sampled_from([None, 1, 4]), all_losses, all_wires)
@settings(max_examples=150, deadline=None)
def test_each_request_ends_once_and_leaps_change_nothing(
    case: Case, spec: GatewaySpec, counts: tuple[int, int], concurrency: int | None, losses: Losses, wires: Wires
) -> None:
    stepped = serve(case, spec, counts, concurrency, losses, wires, False)
    fates = Counter([number for number, *_ in stepped.done] + [number for number, *_ in stepped.lost])
    assert fates == Counter(range(len(case.rows)))
    assert serve(case, spec, counts, concurrency, losses, wires, True) == stepped
    if spec.timeout_s is None:
        assert all(fate == "failed" for _, fate, _ in stepped.lost)
        if spec.max_outstanding is None and spec.rate_limit is None and not losses:
            assert not stepped.lost
    elif concurrency is None:
        arrivals = {request.request_id: request.arrival for request in case.requests()}
        patience = round(spec.timeout_s / TICK)
        assert all((end or 0) <= arrivals[number] + patience for number, _, end in stepped.done)
        assert all(at == arrivals[n] + patience for n, fate, at in stepped.lost if fate == "timed_out")


class Sink:
    """Takes whatever comes, and never answers."""

    def __init__(self) -> None:
        self.taken: list[Request] = []

    def add(self, request: Request) -> None:
        self.taken.append(request)

    def abort(self, request: Request) -> bool:
        return True


def test_a_token_bucket_lets_its_burst_pass_at_once_and_its_rate_in_the_long_run() -> None:
    """Of 100 requests at once a burst of 5 passes. One each 10 ticks at a rate of one in 20: half, and the burst."""
    for gap, passed in ((0, 5), (10, 50 + 4)):
        env, sink, lost = TickEnvironment(), Sink(), list[LostRequest]()
        limit = RateLimit(requests_per_s=1 / (20 * TICK), burst=5)
        gateway = Gateway(env, GatewaySpec(rate_limit=limit), 0, lambda _, sink=sink: sink, lost.append)  # type: ignore[misc]
        OpenLoopClient(env, (Request(i, i * gap, 1, 1) for i in range(100)), lambda _, g=gateway: g)  # type: ignore[misc]
        env.run()
        assert len(sink.taken) == passed
        assert len(lost) == gateway.num_rejected == 100 - passed


def test_retries_wait_ever_longer_and_never_longer_than_without_jitter() -> None:
    """Refused at 0, tried again after at most 10, 20, 40 ticks more, and then failed."""
    env, lost = TickEnvironment(), list[LostRequest]()
    limit = RateLimit(requests_per_s=1e-6)  # one request in eleven days
    retries = Retries(max=3, backoff_s=10 * TICK, factor=2, jitter=0.5)
    gateway = Gateway(env, GatewaySpec(rate_limit=limit, retries=retries), 0, lambda _: Sink(), lost.append)
    OpenLoopClient(env, (Request(i, 0, 1, 1) for i in range(200)), lambda _: gateway)
    env.run()
    assert gateway.num_retries == 3 * 199
    ends = [each.at for each in lost]
    assert len(ends) == 199
    assert all(35 <= end <= 70 for end in ends)
    assert 50 < sum(ends) / len(ends) < 55  # 70 x (1 - 0.5 / 2)
