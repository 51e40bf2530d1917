"""Prefill and decode replicas: times computed by hand, links that are waited for, blocks that are held."""

from collections.abc import Callable

import pytest
from engine_integrity import check_idle

from perfmodel.cost import ServerFit
from perfmodel.engine import KVBlockManager, Outcome, Request, Scheduler, SchedulerConfig, ServeLoop, StepPlan
from perfmodel.errors import WorkloadError
from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment
from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
from perfmodel.sim.fleet.kv_transfer import TransferCost
from perfmodel.sim.fleet.pool import FleetRouter
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank, FrontEnd, Replica

S = TICKS_PER_S
PREFILL, DECODE = 3 * S, S  # a step with prompts, a step of decodes


class TwoSpeeds:
    def execute(self, plan: StepPlan) -> Outcome:
        return Outcome(PREFILL if plan.chunks else DECODE)


class System:
    """Prefill replicas, in turn, and one to decode, of made-up speed; `done` has the requests in order of finishing."""

    def __init__(
        self,
        cost: TransferCost,
        *,
        num_prefill: int = 1,
        decode_blocks: int = 1000,
        prefill_blocks: int = 1000,
        decode_seqs: int = 16,
        prefill_seqs: int = 16,
        policy: str = "fcfs",
        router: str = "round_robin",
        front_end: FrontEnd | None = None,
        on_step: Callable[[EngineRank], None] = lambda replica: None,
        resamples_first: bool = False,
        loads_need_slot: bool = False,
    ) -> None:
        self.env = env = TickEnvironment()
        self.done: list[Request] = []

        def loop(num_blocks: int, num_seqs: int) -> ServeLoop:
            config = SchedulerConfig(
                num_seqs, 8192, block_size=4, scheduling_policy=policy, loads_need_slot=loads_need_slot
            )
            return ServeLoop(Scheduler(config, KVBlockManager(num_blocks, 4)), async_scheduling=False)

        self.prefills = [
            EngineRank(
                Lockstep(env, TwoSpeeds()),
                index,
                loop(prefill_blocks, prefill_seqs),
                lambda r, q: self.server.on_prefilled(r, q),
                lambda r, _: on_step(r),
            )
            for index in range(num_prefill)
        ]
        self.decode = EngineRank(
            Lockstep(env, TwoSpeeds()),
            num_prefill,
            loop(decode_blocks, decode_seqs),
            lambda r, q: self.server.on_decoded(r, q),
            lambda r, _: on_step(r),
        )
        self.server = DisaggregatedServer(
            env,
            FleetRouter(router, [Replica([prefill]) for prefill in self.prefills]),
            FleetRouter("round_robin", [Replica([self.decode])]),
            lambda source, target: cost,
            lambda _, request: self.done.append(request),
            front_end,
            resamples_first=resamples_first,
        )

    def serve(self, *shapes: tuple[int, int]) -> list[Request]:
        self.send(*shapes)
        return self.run()

    def send(self, *shapes: tuple[int, int]) -> list[Request]:
        """Requests of (prompt, answer) arrive now."""
        requests = [Request(number, 0, prompt, output) for number, (prompt, output) in enumerate(shapes)]
        for request in requests:
            self.server.add(request)
        return requests

    def at(self, second: float, call: Callable[[], object]) -> None:
        Alarm(self.env, round(second * S), lambda _: call(), ARRIVAL_PRIORITY)

    def run(self) -> list[Request]:
        self.env.run()
        check_idle(self.server, [*self.prefills, self.decode])
        return self.done


def link(latency_s: float = 0.0, s_per_token: float = 0.0) -> TransferCost:
    return TransferCost(latency_s, 1.0, s_per_token, 0.0, 1.0, 1)


def times(request: Request) -> tuple[float, float]:
    assert request.first_token_at is not None
    assert request.finished_at is not None
    return request.first_token_at / S, request.finished_at / S


def test_one_request_over_an_infinitely_fast_link():
    """Prefill 3 s, then tokens 2 to 5 in steps of 1 s; the client has token 1 with token 2."""
    (request,) = System(link()).serve((100, 5))
    assert times(request) == (3 + 1, 3 + 4)
    assert request.num_output_tokens == 5


def test_a_decode_engine_that_samples_the_first_token_again_takes_a_step_more():
    """vLLM computes the prompt's last token again: tokens 1 to 5 in steps of 1 s."""
    (request,) = System(link(), resamples_first=True).serve((100, 5))
    assert times(request) == (3 + 1, 3 + 5)
    assert request.num_output_tokens == 5


@pytest.mark.parametrize(("loads_need_slot", "second"), [(False, (9, 11)), (True, (11, 13))])
def test_kv_comes_while_others_decode_unless_it_waits_for_a_slot(loads_need_slot: bool, second: tuple[int, int]):
    """One slot, transfers of 2 s: the first request decodes from 5 to 8; the second's KV sets out at 6, or at 8."""
    system = System(link(latency_s=2), decode_seqs=1, loads_need_slot=loads_need_slot)
    for number, arrival in enumerate((0, 3)):
        system.at(arrival, lambda n=number, s=arrival: system.server.add(Request(n, s * S, 10, 4)))
    assert [times(request) for request in system.run()] == [(6, 8), second]


def test_what_the_decode_engine_has_cached_is_not_fetched_again():
    """0.1 s a token, blocks of 4: of the second prompt of 14 three blocks are there; of the third, of 12, all."""
    system, shared = System(link(s_per_token=0.1)), ("a", "b", "c")
    for number, (second, prompt) in enumerate(((0, 12), (20, 14), (40, 12))):
        arriving = Request(number, second * S, prompt, 2, shared)
        system.at(second, lambda request=arriving: system.server.add(request))
    ends = [times(request)[1] for request in system.run()]
    assert ends == pytest.approx([3 + 1.2 + 1, 20 + 3 + 0.2 + 1, 40 + 3 + 1])


def test_a_transfer_takes_its_latency_and_its_bytes():
    (request,) = System(link(latency_s=0.5, s_per_token=0.02)).serve((100, 5))
    assert times(request) == (3 + 0.5 + 2 + 1, 3 + 0.5 + 2 + 4)


def test_one_token_never_leaves_the_prefill_replica():
    system = System(link(latency_s=9))
    (request,) = system.serve((100, 1))
    assert times(request) == (3, 3)
    assert system.server.transfers.num_transfers == 0


def test_transfers_of_one_engine_wait_for_its_link():
    """Both are prefilled in one step. The second waits 2 s for the first; from then on they decode side by side."""
    first, second = System(link(latency_s=2)).serve((10, 3), (10, 4))
    assert times(first) == (3 + 2 + 1, 3 + 2 + 2)
    assert times(second) == (3 + 4 + 1, 3 + 4 + 3)


def test_a_request_waits_for_a_decode_slot():
    """One slot: the second request's first token comes a step after the first request's last."""
    first, second = System(link(), decode_seqs=1).serve((10, 4), (10, 4))
    assert times(first) == (4, 6)
    assert times(second) == (7, 9)


def test_prefill_blocks_are_held_until_decode_has_room():
    """Blocks for one request on either side: no prompt is computed before the KV of the last one has been fetched."""
    held: list[int] = []
    system = System(
        link(latency_s=1),
        decode_blocks=4,
        prefill_blocks=3,
        on_step=lambda r: held.append(r.loop.scheduler.blocks.num_used) if r.index == 0 else None,
    )
    first, second, third = system.serve((12, 3), (12, 3), (12, 3))
    assert times(first) == (3 + 1 + 1, 3 + 1 + 2)
    # Computed from 4 on, done at 7; the first one's blocks are free since 6.
    assert times(second) == (7 + 1 + 1, 7 + 1 + 2)
    assert times(third) == (11 + 1 + 1, 11 + 1 + 2)
    assert held == [3, 3, 3]


def test_the_front_end_is_paid_once():
    plain = times(System(link()).serve((100, 5))[0])
    server = ServerFit(in_s=0.01, out_s=0.02)
    behind = times(System(link(), front_end=FrontEnd(server)).serve((100, 5))[0])
    assert behind == pytest.approx([t + 0.03 for t in plain], abs=1e-12)


def test_a_request_too_long_for_the_decode_replica_is_refused():
    with pytest.raises(WorkloadError, match="the pool has 4 blocks"):
        System(link(), decode_blocks=4).serve((12, 30))


def test_who_waits_for_blocks_gets_those_of_one_that_gave_up_on_its_way() -> None:
    """Decode blocks for one. The first gives up at 4 s; its transfer ends at 13, then the second's begins."""
    system = System(link(latency_s=10), decode_blocks=4)
    first, second = system.send((12, 3), (12, 3))
    system.at(4, lambda: system.server.abort(first))
    assert system.run() == [second]
    assert times(second) == (13 + 10 + 1, 13 + 10 + 2)
    assert system.server.transfers.num_transfers == 2


def test_a_prefill_replica_that_fails_abandons_its_transfers_and_frees_what_waits_for_them() -> None:
    """Its request is half-way at 4 s; the other replica's, which had no blocks to go to, goes then."""
    system = System(link(latency_s=10), num_prefill=2, decode_blocks=4)
    first, second = system.send((12, 3), (12, 3))
    system.at(4, lambda: system.done.extend(system.server.fail([system.prefills[0]])))
    assert system.run() == [first, second]
    assert times(second) == (4 + 10 + 1, 4 + 10 + 2)
    assert (system.server.transfers.num_transfers, system.server.transfers.num_abandoned) == (1, 1)


def test_a_decode_replica_that_fails_loses_what_decodes_what_is_on_its_way_and_what_waits_to_be() -> None:
    """One decodes since 5 s, one is on its way, one waits for blocks; the prompt of the last is being computed."""
    system = System(link(latency_s=2), decode_blocks=9, prefill_seqs=3)
    requests = system.send((12, 20), (12, 20), (12, 20), (12, 20))
    lost: list[Request] = []
    system.at(5.5, lambda: lost.extend(system.server.fail([system.decode])))
    assert system.run() == [requests[3]]
    assert lost == requests[:3]
    assert times(requests[3]) == (6 + 2 + 1, 6 + 2 + 19)


def test_a_prefill_replica_is_not_idle_before_its_kv_has_been_fetched() -> None:
    system = System(link(latency_s=2))
    idle_at: list[float] = []
    prefill = system.prefills[0]
    prefill.watch(lambda _: idle_at.append(system.env.ticks / S) if prefill.is_idle else None)
    system.serve((12, 3))
    assert idle_at == [3 + 2]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2]), ("priority", [0, 2, 1])])
@pytest.mark.parametrize("scarce", [{"decode_seqs": 1}, {"decode_blocks": 6}])
def test_priorities_count_where_decoding_is_waited_for(policy: str, order: list[int], scarce: dict[str, int]) -> None:
    """A slot, or blocks, for one at a time, which the first has until 14 s. The third is prefilled at 6 s, after the
    second, and is more urgent."""
    system = System(link(), policy=policy, **scarce)
    requests = [Request(number, 0, 12, 12, priority=priority) for number, priority in enumerate((0, 2, 1))]
    for request, second in zip(requests, (0, 0, 1), strict=True):
        system.at(second, lambda request=request: system.server.add(request))  # type: ignore[misc]
    assert [request.request_id for request in system.run()] == order
    assert times(requests[0]) == (4, 14)


def test_who_waits_for_blocks_waits_until_the_failure_that_keeps_them_is_noticed() -> None:
    """As above, but nobody knows before 9 s, when the transfer that failed at 4 s would have been half-way still."""
    system = System(link(latency_s=10), num_prefill=2, decode_blocks=4)
    first, second = system.send((12, 3), (12, 3))
    dead = system.prefills[0]
    system.at(4, dead.die)
    system.at(4, lambda: system.server.sever([dead]))
    system.at(9, lambda: system.done.extend(system.server.fail([dead])))
    assert system.run() == [first, second]
    assert times(second) == (9 + 10 + 1, 9 + 10 + 2)
    assert (system.server.transfers.num_transfers, system.server.transfers.num_abandoned) == (1, 1)


def test_a_session_stays_with_its_prefill_replica() -> None:
    """Twelve requests of three sessions: each replica has all of a session, or none."""
    system = System(link(), num_prefill=4, router="session_affinity")
    for number in range(12):
        request = Request(number, 0, 12, 3)
        request.session = f"user {number % 3}"
        system.server.add(request)
    assert sum(prefill.num_outstanding for prefill in system.prefills) == 12
    assert all(prefill.num_outstanding % 4 == 0 for prefill in system.prefills)
    assert len(system.run()) == 12


def test_a_request_with_one_output_token_pays_the_front_end_for_one_batch() -> None:
    """Three requests are sampled together at 3 s. Each adds 1 ms of output processing, once."""
    front_end = FrontEnd(ServerFit(out_s=0.05, out_per_sequence_s=0.001))
    requests = System(link(), front_end=front_end).serve((10, 1), (10, 1), (10, 1))
    assert [(r.first_token_batch, r.last_token_batch) for r in requests] == [(3, 3)] * 3
    assert [times(request) for request in requests] == [pytest.approx((3.053, 3.053))] * 3


@pytest.mark.parametrize("output", [1, 3])
def test_cached_tokens_and_the_start_of_a_request_come_from_its_prefill_replica(output: int) -> None:
    """The second prompt of 14 begins with three blocks of the first; it waits for the step that ends at 12 s."""
    system, shared = System(link()), ("a", "b", "c")
    for second, number, prompt, contents in ((0, 0, 12, shared), (9, 1, 20, ()), (10, 2, 14, shared)):
        arriving = Request(number, second * S, prompt, output, contents)
        system.at(second, lambda request=arriving: system.server.add(request))  # type: ignore[misc]
    served = sorted(system.run(), key=lambda request: request.request_id)
    assert [request.num_cached_tokens for request in served] == [0, 0, 12]
    assert [(request.first_scheduled_at or 0) / S for request in served] == [0, 9, 12]
    assert [request.num_preemptions for request in served] == [0, 0, 0]


def test_failed_prefill_ranks_lose_all_of_their_requests() -> None:
    """Three prefill replicas take turns; the first two, ranks of one, fail while they compute."""
    system = System(link(), num_prefill=3)
    requests = system.send(*[(12, 3)] * 6)
    lost: list[Request] = []
    system.at(1, lambda: lost.extend(system.server.fail(system.prefills[:2])))
    assert sorted(request.request_id for request in system.run()) == [2, 5]
    assert lost == [requests[number] for number in (0, 1, 3, 4)]


def test_an_undetected_failure_stops_the_transfers_of_all_ranks() -> None:
    system = System(link(latency_s=10), num_prefill=2, decode_blocks=40)
    system.send((12, 3), (12, 3))
    system.at(4, lambda: system.server.sever(system.prefills))
    system.at(5, lambda: system.server.fail(system.prefills))
    assert system.run() == []
    assert system.server.transfers.num_abandoned == 2


@pytest.mark.parametrize("output", [1, 3])
def test_a_request_keeps_the_preemptions_of_its_prefill_replica(output: int) -> None:
    system = System(link())
    system.send((12, output))

    def preempt() -> None:
        (prefill,) = system.prefills[0].loop.scheduler.running
        prefill.num_preemptions = 2

    system.at(1, preempt)
    (request,) = system.run()
    assert request.num_preemptions == 2
