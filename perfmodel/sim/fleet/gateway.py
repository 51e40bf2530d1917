"""`Gateway`: rate limits, queueing, client timeouts and retries between clients and replicas.

Each request ends completed, failed (refused or lost once too often) or timed out. All clients have the same timeout,
so deadlines expire in order of arrival and one alarm suffices."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from simpy.events import Event

from perfmodel.engine import Request
from perfmodel.engine.admission import VirtualTokenCounters
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.fleet.pool import FleetRouter
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.distributions import hashed
from perfmodel.specs.cluster import GatewaySpec, RateLimit

Fate = Literal["failed", "timed_out"]
HandOver = Callable[[Request, EngineRank], None]
OnLost = Callable[["LostRequest"], None]


class RequestServer(Protocol):
    """Accepts requests and can abort them."""

    def add(self, request: Request) -> None:
        """Accept `request` now."""

    def abort(self, request: Request) -> bool:
        """Abort an unfinished `request` added before."""


class LostRequest(NamedTuple):
    """A request whose client got no answer, known at tick `at`; `is_over_rate`: finally refused by the rate limit."""

    request: Request
    fate: Fate
    at: int
    is_over_rate: bool = False


@dataclass(slots=True, eq=False)
class _Sent:
    request: Request
    arrival: int
    deadline: int | None
    is_queued: bool = False
    num_tries: int = 1
    server: RequestServer | None = None  # holds the latest try, if any


class _TokenBucket:
    """Generic cell rate algorithm in whole ticks: a bucket of `burst` tokens that refills at a rate."""

    def __init__(self, limit: RateLimit) -> None:
        self._gap = to_ticks(1 / limit.requests_per_s)
        self._slack = self._gap * (limit.burst - 1)
        self._due = 0  # when the next request is due at the rate itself

    def take(self, now: int) -> bool:
        if self._due - now > self._slack:
            return False
        self._due = max(self._due, now) + self._gap
        return True

    def wait(self, now: int) -> int:
        return max(self._due - self._slack - now, 0)


class Gateway:
    """Accepts requests like a replica and forwards them to `route` within the limits of `spec`.

    seed: of retry jitter; on_lost: callback for each request whose client gets no answer
    tenant_of: number of a request's tenant, by its id; `counters`: of tenants, where these decide whose turn it is"""

    def __init__(
        self,
        env: TickEnvironment,
        spec: GatewaySpec,
        seed: int,
        route: Callable[[Request], RequestServer],
        on_lost: OnLost,
        tenant_of: Callable[[int], int] = lambda _: 0,
        counters: VirtualTokenCounters | None = None,
    ) -> None:
        self.env, self.counters, self._tenant_of = env, counters, tenant_of
        self.num_sent = self.num_rejected = self.num_retries = 0
        self.num_outstanding = self.num_queued = 0  # with a replica now; here
        self._spec, self._seed, self._route, self._on_lost = spec, seed, route, on_lost
        self._most = spec.max_outstanding or float("inf")
        self._bucket = _TokenBucket(spec.rate_limit) if spec.rate_limit is not None else None
        self._patience = to_ticks(spec.timeout_s) if spec.timeout_s is not None else None
        self._live: dict[int, _Sent] = {}
        self._deadlines: deque[tuple[int, _Sent]] = deque()
        self._alarm: Alarm | None = None
        num_queues = 1 if counters is None else len(counters.counters)
        # Heaps by priority, then by turn, one of each tenant where these have counters; some may have given up.
        self._queues: list[list[tuple[int, int, _Sent]]] = [[] for _ in range(num_queues)]
        self._num_turns = 0

    @property
    def has_requests(self) -> bool:
        """Whether any client waits for an answer."""
        return bool(self._live)

    @property
    def rate_limit_wait(self) -> int:
        """Ticks until the rate limit admits a request."""
        return 0 if self._bucket is None else self._bucket.wait(self.env.ticks)

    def add(self, request: Request) -> None:
        """Accept a client's `request` now."""
        deadline = self.env.ticks + self._patience if self._patience is not None else None
        sent = self._live[request.request_id] = _Sent(request, request.arrival, deadline)
        self.num_sent += 1
        if deadline is not None:
            self._deadlines.append((deadline, sent))
            if self._alarm is None:
                self._watch_deadlines()
        self._try(sent)

    def _try(self, sent: _Sent) -> None:
        if self._bucket is not None and not self._bucket.take(self.env.ticks):
            self._refuse(sent, is_over_rate=True)
        elif self.num_outstanding < self._most:
            if self.counters is not None:
                self._enter(sent)
                self._leave(sent, is_admitted=True)
            self._pass_on(sent)
        elif self._num_before(sent) < self._spec.max_queue:
            self._num_turns += 1
            self._enter(sent)
            queue = self._queues[self._tenant_of(sent.request.request_id)]
            heapq.heappush(queue, (sent.request.priority, self._num_turns, sent))
        else:
            self._refuse(sent)

    def _num_before(self, sent: _Sent) -> int:
        if self.counters is None:
            return self.num_queued
        return self.counters.num_waiting[self._tenant_of(sent.request.request_id)]

    def _enter(self, sent: _Sent) -> None:
        self.num_queued += 1
        sent.is_queued = True
        if self.counters is not None:
            self.counters.enter(self._tenant_of(sent.request.request_id))

    def _leave(self, sent: _Sent, is_admitted: bool = False) -> None:
        """`sent` waits no more, if it did."""
        if sent.is_queued:
            sent.is_queued = False
            self.num_queued -= 1
            if self.counters is not None:
                num_prompt_tokens = sent.request.num_prompt_tokens if is_admitted else 0
                self.counters.leave(self._tenant_of(sent.request.request_id), num_prompt_tokens)

    def _pass_on(self, sent: _Sent) -> None:
        sent.server = server = self._route(sent.request)
        self.num_outstanding += 1
        sent.request.arrival = self.env.ticks  # as the engine sees it
        server.add(sent.request)

    def hand_over(self, request: Request, server: RequestServer) -> None:
        """Send a `request` that waited for a replica to `server`."""
        self._live[request.request_id].server = server
        request.arrival = self.env.ticks
        server.add(request)

    def reschedule(self) -> None:
        """Replicas have capacity again: dispatch queued requests."""
        while self.num_queued and self.num_outstanding < self._most:
            queue = self._queues[0 if self.counters is None else self.counters.next_tenant()]
            sent = heapq.heappop(queue)[2]
            if self._live.get(sent.request.request_id) is sent and sent.is_queued:
                self._leave(sent, is_admitted=True)
                self._pass_on(sent)

    def answer(self, request: Request) -> bool:
        """Finish `request`; return whether its client still waits. Restores the client's arrival time."""
        sent = self._live.pop(request.request_id, None)
        if sent is None or sent.request is not request:
            raise AssertionError(f"{request} was answered but is not on its way")
        self.num_outstanding -= 1
        self._charge(request, request.max_output_tokens)
        request.arrival = sent.arrival
        if sent.deadline is not None and (request.finished_at or 0) > sent.deadline:
            self._lose(sent, "timed_out")
            return False
        return True

    def abort(self, request_id: int) -> None:
        """Abort by client disconnect; a no-op for an answered request."""
        sent = self._live.pop(request_id, None)
        if sent is not None:
            self._withdraw(sent)
            self.reschedule()

    def fail(self, requests: Iterable[Request]) -> None:
        """Retry or fail requests lost with their replicas."""
        lost = [sent for r in requests if (sent := self._live.get(r.request_id)) is not None and sent.request is r]
        for sent in lost:
            self._withdraw(sent)
        for sent in lost:
            self._again(sent)
        self.reschedule()

    def outstanding_at(self, servers: Iterable[RequestServer]) -> list[Request]:
        """Requests held by any of `servers`. Scans all requests in flight."""
        wanted = {id(server) for server in servers}
        return [sent.request for sent in self._live.values() if id(sent.server) in wanted]

    def _withdraw(self, sent: _Sent) -> None:
        self._leave(sent)
        if sent.server is not None:
            sent.server.abort(sent.request)
            sent.server = None
            self.num_outstanding -= 1
            self._charge(sent.request, sent.request.num_output_tokens)

    def _charge(self, request: Request, num_output_tokens: int) -> None:
        if self.counters is not None:
            self.counters.charge(self._tenant_of(request.request_id), num_output_tokens)

    def _refuse(self, sent: _Sent, is_over_rate: bool = False) -> None:
        self.num_rejected += 1
        self._again(sent, is_over_rate)

    def _again(self, sent: _Sent, is_over_rate: bool = False) -> None:
        retries = self._spec.retries
        if retries is None or sent.num_tries > retries.max:
            del self._live[sent.request.request_id]
            self._lose(sent, "failed", is_over_rate)
            return
        number = sent.num_tries
        sent.num_tries += 1
        sent.request = sent.request.afresh()
        u = hashed(self._seed + number, sent.request.request_id) / 2**64
        delay = retries.backoff_s * retries.factor ** (number - 1) * (1 - retries.jitter * u)

        def retry(_: Event) -> None:
            if self._live.get(sent.request.request_id) is sent:  # the client has not timed out
                self.num_retries += 1
                self._try(sent)

        Alarm(self.env, to_ticks(delay), retry, ARRIVAL_PRIORITY)

    def _lose(self, sent: _Sent, fate: Fate, is_over_rate: bool = False) -> None:
        """Notify the client. It may send again at once, so this is deferred until the current request is done with."""
        sent.request.arrival = sent.arrival
        lost = LostRequest(sent.request, fate, self.env.ticks, is_over_rate)
        Alarm(self.env, 0, lambda _: self._on_lost(lost), ARRIVAL_PRIORITY)

    def _watch_deadlines(self) -> None:
        deadlines, live = self._deadlines, self._live
        while deadlines and live.get(deadlines[0][1].request.request_id) is not deadlines[0][1]:
            deadlines.popleft()
        self._alarm = None
        if deadlines:
            self._alarm = Alarm(self.env, deadlines[0][0] - self.env.ticks, self._give_up, ARRIVAL_PRIORITY)

    def _give_up(self, _: Event) -> None:
        deadlines, now = self._deadlines, self.env.ticks
        while deadlines and deadlines[0][0] <= now:
            sent = deadlines.popleft()[1]
            if self._live.get(sent.request.request_id) is not sent:
                continue
            del self._live[sent.request.request_id]
            self._withdraw(sent)
            self._lose(sent, "timed_out")
        self._watch_deadlines()
        self.reschedule()


class Entrance:
    """Queue in front of replicas that come and go.

    hand_over: sends a request to a replica; on_waiting: called when a request has to wait"""

    def __init__(self, router: FleetRouter, hand_over: HandOver) -> None:
        self.router = router
        self.on_waiting: list[Callable[[], None]] = []
        self._hand_over = hand_over
        self._room: dict[Request, None] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._room)

    def __call__(self, request: Request) -> RequestServer:
        """Server for `request`: a replica, or this queue."""
        return self.router(request) if len(self.router) else self

    def send(self, request: Request) -> None:
        """Dispatch `request` now, or once there is a replica."""
        if len(self.router):
            self._hand_over(request, self.router(request))
        else:
            self.add(request)

    def add(self, request: Request) -> None:
        """Queue `request`."""
        self._room[request] = None
        for call in self.on_waiting:
            call()

    def abort(self, request: Request) -> bool:
        """Remove `request` from the queue."""
        del self._room[request]
        return True

    def reschedule(self) -> None:
        """A replica has come up: dispatch queued requests in FIFO order."""
        if len(self.router):
            waiting, self._room = self._room, {}
            for request in waiting:
                self._hand_over(request, self.router(request))
