"""The gateway's rules, request by request: queue, deadlines, retries, and arrival times."""

import pytest

from perfmodel.engine import Request
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment
from perfmodel.sim.fleet.gateway import Entrance, Gateway, LostRequest
from perfmodel.specs.cluster import GatewaySpec, RateLimit, Retries

TICK = 1e-12


class Server:
    """Records requests; the test triggers the answers."""

    def __init__(self, env: TickEnvironment) -> None:
        self.env, self.taken, self.aborted = env, [], []

    def add(self, request: Request) -> None:
        assert request.arrival == self.env.ticks
        self.taken.append((self.env.ticks, request))

    def abort(self, request: Request) -> bool:
        self.aborted.append((self.env.ticks, request.request_id))
        return True


class World:
    """A gateway before one server; a test schedules arrivals and answers at given ticks."""

    def __init__(self, **spec: object) -> None:
        self.env = TickEnvironment()
        self.server, self.lost, self.answered = Server(self.env), list[LostRequest](), []
        self.gateway = Gateway(self.env, GatewaySpec(**spec), 7, lambda _: self.server, self.lost.append)  # type: ignore[arg-type]

    def at(self, tick: int, call) -> None:
        Alarm(self.env, tick, lambda _: call(), ARRIVAL_PRIORITY)

    def send(self, tick: int, *rows: tuple[int, int]) -> None:
        """Requests of (number, priority), in this order."""
        for number, priority in rows:
            request = Request(number, tick, 1, 1, (), priority)
            self.at(tick, lambda request=request: self.gateway.add(request))

    def answer(self, tick: int, number: int) -> None:
        def reply() -> None:
            request = next(taken for _, taken in reversed(self.server.taken) if taken.request_id == number)
            request.finished_at = tick
            if self.gateway.answer(request):
                self.answered.append((tick, number, request.arrival))
            self.gateway.reschedule()

        self.at(tick, reply)

    def run(self) -> list[tuple[int, int]]:
        """(tick, number) of the requests the server received."""
        self.env.run()
        return [(tick, request.request_id) for tick, request in self.server.taken]


def test_a_full_queue_rejects_and_serves_by_priority_then_arrival() -> None:
    """One request at the server, three queued, two rejected. Then 4 (priority 0), and 1 before 2 (both 5)."""
    world = World(max_outstanding=1, max_queue=3)
    world.send(10, (0, 9), (1, 5), (2, 5), (4, 0), (5, 0), (6, 0))
    for tick, number in ((20, 0), (30, 4), (40, 1), (50, 2)):
        world.answer(tick, number)
    assert world.run() == [(10, 0), (20, 4), (30, 1), (40, 2)]
    assert [(loss.request.request_id, loss.fate, loss.at) for loss in world.lost] == [
        (5, "failed", 10),
        (6, "failed", 10),
    ]
    assert world.answered == [(20, 0, 10), (30, 4, 10), (40, 1, 10), (50, 2, 10)]  # arrivals are the client's again
    assert world.gateway.num_rejected == 2


def test_max_outstanding_limits_the_requests_at_the_servers() -> None:
    world = World(max_outstanding=2, max_queue=1)
    world.send(0, (0, 0), (1, 0), (2, 0))
    world.answer(5, 1)
    world.answer(9, 0)
    assert world.run() == [(0, 0), (0, 1), (5, 2)]


@pytest.mark.parametrize(("end", "is_answered"), [(39, True), (40, True), (41, False)])
def test_an_answer_counts_up_to_and_including_the_deadline(end: int, is_answered: bool) -> None:
    """The client sends at tick 10 and waits 30 ticks."""
    world = World(timeout_s=30 * TICK)
    world.send(10, (0, 0))
    if end == 40:  # it has ended by then, and its answer is on its way
        world.at(39, lambda: setattr(world.server.taken[0][1], "finished_at", 40))
        world.at(39, lambda: world.answered.append(world.gateway.answer(world.server.taken[0][1])))
    elif is_answered:
        world.answer(end, 0)
    world.run()
    assert bool(world.answered) is is_answered
    assert [(loss.fate, loss.at, loss.request.arrival) for loss in world.lost] == [("timed_out", 40, 10)] * (
        not is_answered
    )
    assert world.server.aborted == [(40, 0)] * (not is_answered)
    assert world.gateway.num_outstanding == 0


def test_an_answer_delivered_after_the_deadline_is_a_timeout() -> None:
    world = World(timeout_s=30 * TICK)
    world.send(10, (0, 0))
    world.at(35, lambda: setattr(world.server.taken[0][1], "finished_at", 41))
    world.at(35, lambda: world.answered.append(world.gateway.answer(world.server.taken[0][1])))
    world.run()
    assert world.answered == [False]
    assert [loss.fate for loss in world.lost] == ["timed_out"]


def test_a_timed_out_request_makes_way_for_the_next_in_the_queue() -> None:
    """One request at the server. Requests 1 and 2 time out 30 ticks after their arrivals; 2 follows 1."""
    world = World(max_outstanding=1, max_queue=2, timeout_s=30 * TICK)
    world.send(0, (0, 0))
    world.send(5, (1, 0))
    world.send(20, (2, 0))
    assert world.run() == [(0, 0), (30, 1), (35, 2)]
    assert [(loss.request.request_id, loss.at) for loss in world.lost] == [(0, 30), (1, 35), (2, 50)]


def test_retries_back_off_exponentially_up_to_their_maximum() -> None:
    """The bucket stays empty: sent at 5, retried 10, 20 and 40 ticks later, then failed after 3 retries."""
    world = World(
        rate_limit=RateLimit(requests_per_s=1e-6), retries=Retries(max=3, backoff_s=10 * TICK, factor=2, jitter=0)
    )
    world.send(5, (0, 0), (1, 0))
    assert world.run() == [(5, 0)]
    assert [(loss.request.request_id, loss.at, loss.request.arrival) for loss in world.lost] == [
        (1, 5 + 10 + 20 + 40, 5)
    ]
    assert (world.gateway.num_retries, world.gateway.num_rejected) == (3, 4)


def test_a_request_lost_by_its_server_is_retried_with_its_original_arrival() -> None:
    world = World(retries=Retries(max=1, backoff_s=10 * TICK, factor=2, jitter=0))
    world.send(5, (0, 3))
    world.at(20, lambda: world.gateway.fail(world.gateway.outstanding_at([world.server])))
    world.answer(50, 0)
    assert world.run() == [(5, 0), (30, 0)]
    assert world.answered == [(50, 0, 5)]
    assert (world.gateway.num_retries, world.gateway.num_outstanding) == (1, 0)
    first, second = (request for _, request in world.server.taken)
    assert first is not second
    assert first.priority == second.priority == 3


@pytest.mark.parametrize(("burst", "ticks"), [(1, [0, 20, 40, 60]), (3, [0, 0, 0, 20])])
def test_a_token_bucket_passes_its_burst_and_then_its_rate(burst: int, ticks: list[int]) -> None:
    world = World(rate_limit=RateLimit(requests_per_s=1 / (20 * TICK), burst=burst))
    seen: list[int] = []

    def poll() -> None:
        number = len(seen)
        if world.gateway.rate_limit_wait == 0 and number < 4:
            seen.append(world.env.ticks)
            world.gateway.add(Request(number, world.env.ticks, 1, 1))

    for tick in range(100):
        for _ in range(4):
            world.at(tick, poll)
    world.run()
    assert seen == ticks
    assert not world.lost


def test_idle_time_refills_the_bucket_up_to_its_burst() -> None:
    """After 1,000 ticks without a request a bucket of 2 lets 2 of 5 pass."""
    world = World(rate_limit=RateLimit(requests_per_s=1 / (20 * TICK), burst=2))
    world.send(1000, *((number, 0) for number in range(5)))
    assert world.run() == [(1000, 0), (1000, 1)]


def test_an_entrance_queues_requests_until_a_replica_is_up_and_drops_aborted_ones() -> None:
    """Three requests arrive without a replica; one is aborted; the others follow in order, later ones at once."""
    replicas, handed, calls = [], [], []
    router = type(
        "Router", (), {"__len__": lambda self: len(replicas), "__call__": lambda self, request: replicas[0]}
    )()
    entrance = Entrance(router, lambda request, rank: handed.append((request.request_id, rank)))  # type: ignore[arg-type]
    entrance.on_waiting.append(lambda: calls.append(entrance.num_waiting))
    requests = [Request(number, 0, 1, 1) for number in range(4)]
    for request in requests[:3]:
        assert entrance(request) is entrance
        entrance.send(request)
    entrance.reschedule()
    assert (entrance.num_waiting, calls, handed) == (3, [1, 2, 3], [])
    assert entrance.abort(requests[1])
    replicas.append("a replica")
    entrance.reschedule()
    entrance.send(requests[3])
    assert entrance(requests[3]) == "a replica"
    assert (entrance.num_waiting, handed) == (0, [(number, "a replica") for number in (0, 2, 3)])


def test_a_retried_request_keeps_the_fields_its_client_set() -> None:
    request = Request(7, 11, 13, 17, ("a", "b"), 3)
    request.num_source_tokens, request.session, request.turn = 99, "user", 2
    request.num_computed_tokens = request.num_output_tokens = request.num_preemptions = 5
    again = request.afresh()
    kept = ("request_id", "arrival", "num_prompt_tokens", "max_output_tokens", "block_hashes", "contents", "priority")
    kept += ("num_source_tokens", "session", "turn")
    assert [getattr(again, name) for name in kept] == [getattr(request, name) for name in kept]
    assert (again.num_computed_tokens, again.num_output_tokens, again.num_preemptions) == (0, 0, 0)
