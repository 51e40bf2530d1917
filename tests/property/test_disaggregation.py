"""Laws of disaggregated serving: requests, tokens and KV blocks are conserved; leaps change nothing."""

from dataclasses import dataclass
from typing import Any

from engine_integrity import check_idle, check_integrity
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_leaps import ScriptedBackend

from perfmodel.engine import Request, SchedulerConfig, StepRecord
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
from perfmodel.sim.fleet.kv_transfer import TransferCost
from perfmodel.sim.fleet.pool import FleetRouter
from perfmodel.sim.fleet.routing import ROUTERS
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank, Replica
from perfmodel.sim.traffic.clients import ClosedLoopClient, OpenLoopClient
from workloads import BLOCK_SIZE, MAX_MODEL_LEN, Case, cases

PICOSECOND = 1e-12


@dataclass(frozen=True)
class Link:
    """Ticks before the first byte, and per token."""

    latency: int
    per_token: int

    @property
    def cost(self) -> TransferCost:
        return TransferCost(self.latency * PICOSECOND, 1.0, self.per_token * PICOSECOND, 0.0, 1.0, BLOCK_SIZE)


Row = tuple[int, ...]


def serve(
    prefill: Case, decode: Case, link: Link, counts: tuple[int, int], router: str, concurrency: int | None, leaps: bool
) -> list[Row]:
    """The requests of `prefill` through both kinds of engine; what became of each, by number."""
    env, done = TickEnvironment(), []
    client: OpenLoopClient | ClosedLoopClient

    def on_finished(_: EngineRank, request: Request) -> None:
        done.append(request)
        client.on_finished(request)

    def checked(replica: EngineRank, _: StepRecord) -> None:
        check_integrity(replica.loop.scheduler)

    def on_prefilled(replica: EngineRank, request: Request) -> None:
        server.on_prefilled(replica, request)

    def on_decoded(replica: EngineRank, request: Request) -> None:
        server.on_decoded(replica, request)

    backend = ScriptedBackend()
    clocks = [Lockstep(env, backend, backend if leaps else None) for _ in range(sum(counts))]
    sources = [
        EngineRank(clock, i, prefill.loop(), on_prefilled, checked) for i, clock in enumerate(clocks[: counts[0]])
    ]
    targets = [
        EngineRank(clock, i, decode.loop(), on_decoded, checked)
        for i, clock in enumerate(clocks[counts[0] :], counts[0])
    ]
    to_prefill, to_decode = (
        FleetRouter(router, [Replica([engine]) for engine in engines]) for engines in (sources, targets)
    )
    server = DisaggregatedServer(env, to_prefill, to_decode, lambda source, target: link.cost, on_finished)
    requests = prefill.requests()
    if concurrency is None:
        client = OpenLoopClient(env, iter(requests), lambda _: server)
    else:
        client = ClosedLoopClient(env, iter(requests), lambda _: server, concurrency)
    env.run()
    check_idle(server, [*sources, *targets])
    assert sorted(r.request_id for r in done) == [r.request_id for r in requests]
    for request in done:
        assert request.num_output_tokens == request.max_output_tokens
        assert request.first_scheduled_at is not None
        assert request.first_token_at is not None
        assert request.finished_at is not None
        assert request.arrival <= request.first_scheduled_at < request.first_token_at <= request.finished_at
        is_moved = request.max_output_tokens > 1 and not decode.has_prefix_cache
        least = link.latency + link.per_token * request.num_prompt_tokens if is_moved else 0
        assert request.first_token_at - request.first_scheduled_at >= least
    moved = sum(r.max_output_tokens > 1 for r in requests)
    assert server.transfers.num_transfers <= moved
    assert decode.has_prefix_cache or server.transfers.num_transfers == moved
    rows = [(r.request_id, r.first_token_at, r.finished_at, r.num_preemptions) for r in done]
    return sorted(rows)  # type: ignore[arg-type]


links = st.builds(Link, st.sampled_from([0, 1, 50]), st.sampled_from([0, 1, 3]))


def _crowded(rows: tuple[tuple[int, int, int], ...], policy: str, link: Link) -> dict[str, Any]:
    """(arrival, prompt, answer) each, on their way to decode engines of one slot and forty blocks, without async."""
    prefill = SchedulerConfig(2, 16, MAX_MODEL_LEN, BLOCK_SIZE)
    decode = SchedulerConfig(1, 64, MAX_MODEL_LEN, BLOCK_SIZE, scheduling_policy=policy, spans=(8,))
    return {
        "prefill": Case(prefill, 1000, False, True, tuple((*row, (), 0) for row in rows)),
        "decode": Case(decode, 40, False, False, ((1, 1, 1, (), 0),)),
        "link": link,
        "counts": (2, 2),
        "router": "least_outstanding",
        "concurrency": None,
    }


# The running request lacks a block and gives way to itself, while those that hold the blocks wait for its slot: it goes
# to them, though nothing else happens.
_GIVES_WAY = ((1000, 45, 67), (1000, 11, 54), (1100, 56, 35), (1210, 26, 17), (1210, 46, 74), (1210, 57, 49))
# The prompts of the last two take blocks of the decode engines in the middle of long leaps, and are long on their way.
_TAKES_FROM_A_LEAP = ((0, 4, 150), (0, 4, 150), (200, 130, 20), (200, 130, 20))

# A request of a static batch is fetched before the batch has ended.
_FETCHED_EARLY = {
    "prefill": Case(
        SchedulerConfig(
            2,
            8,
            MAX_MODEL_LEN,
            BLOCK_SIZE,
            long_prefill_token_threshold=12,
            scheduler_reserve_full_isl=False,
            batching="dynamic",
        ),
        100,
        False,
        False,
        tuple((0, prompt, answer, (), 0) for prompt, answer in ((13, 1), (1, 2), (1, 1), (1, 1), (1, 1))),
    ),
    "decode": Case(SchedulerConfig(1, 8, MAX_MODEL_LEN, BLOCK_SIZE), 40, False, False, ((0, 1, 1, (), 0),)),
    "link": Link(0, 0),
    "counts": (1, 1),
    "router": "least_outstanding",
    "concurrency": None,
}


@example(**_FETCHED_EARLY)
@example(**_crowded(_GIVES_WAY, "shortest-first", Link(1, 0)))
@example(**_crowded(_TAKES_FROM_A_LEAP, "fcfs", Link(50, 3)))
@settings(deadline=None, max_examples=100)
@given(
    cases(max_requests=15),
    cases(max_requests=1),
    links,
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.sampled_from(sorted(ROUTERS)),
    st.sampled_from([None, 1, 4]),
)
def test_requests_and_blocks_are_conserved_and_leaps_change_nothing(
    prefill: Case, decode: Case, link: Link, counts: tuple[int, int], router: str, concurrency: int | None
) -> None:
    stepped = serve(prefill, decode, link, counts, router, concurrency, leaps=False)
    assert serve(prefill, decode, link, counts, router, concurrency, leaps=True) == stepped
