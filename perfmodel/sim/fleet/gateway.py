"""`Gateway`: what stands between the clients and the replicas on the simulated clock.

It limits the rate, holds back what the replicas should not have in hand yet, gives up when a client has, and sends
again what was refused or lost. Each request that a client sends ends in one of three ways: completed, failed (refused,
or lost with its replica, once too often) or timed out.

All clients are equally patient, so deadlines pass in the order of arrival: one alarm at a time will do for all.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from simpy.events import Event

from perfmodel.engine import Request
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.fleet.pool import FleetRouter
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.distributions import hashed
from perfmodel.specs.cluster import GatewaySpec, RateLimit

Fate = Literal["failed", "timed_out"]
HandOver = Callable[[Request, EngineRank], None]


class RequestServer(Protocol):
    """What takes requests, and can abort one that its client has given up."""

    def add(self, request: Request) -> None:
        """`request` arrives now."""

    def abort(self, request: Request) -> bool:
        """`request`, added before and not done, gives up."""


class LostRequest(NamedTuple):
    """A request whose client got no answer; `at`: the tick when that was certain; `is_over_rate`: refused, at the end,
    by the rate limit."""

    request: Request
    fate: Fate
    at: int
    is_over_rate: bool = False


@dataclass(slots=True, eq=False)
class _Sent:
    """What a client has sent and not been answered."""

    request: Request
    arrival: int
    deadline: int | None
    is_queued: bool = False
    num_tries: int = 1
    server: RequestServer | None = None  # has its newest try, if any does


class _TokenBucket:
    """The generic cell rate algorithm: a bucket of `burst` tokens that fills at a rate, in whole ticks."""

    def __init__(self, limit: RateLimit) -> None:
        self._gap = to_ticks(1 / limit.requests_per_s)
        self._slack = self._gap * (limit.burst - 1)
        self._due = 0  # when the next request is due at the rate itself

    def take(self, now: int) -> bool:
        """Take a token if there is one."""
        if self._due - now > self._slack:
            return False
        self._due = max(self._due, now) + self._gap
        return True

    def wait(self, now: int) -> int:
        """Ticks until there is one."""
        return max(self._due - self._slack - now, 0)


class Gateway:
    """Takes requests like a replica does and passes them on to those that `route` names, within the limits of `spec`.

    seed: of the jitter of retries; on_lost: called for each request whose client gets no answer
    """

    def __init__(
        self,
        env: TickEnvironment,
        spec: GatewaySpec,
        seed: int,
        route: Callable[[Request], RequestServer],
        on_lost: Callable[[LostRequest], None],
    ) -> None:
        self.env = env
        self.num_sent = self.num_rejected = self.num_retries = 0
        self.num_outstanding = self.num_queued = 0  # with a replica now; here
        self._spec, self._seed, self._route, self._on_lost = spec, seed, route, on_lost
        self._most = spec.max_outstanding or float("inf")
        self._bucket = _TokenBucket(spec.rate_limit) if spec.rate_limit is not None else None
        self._patience = to_ticks(spec.timeout_s) if spec.timeout_s is not None else None
        self._live: dict[int, _Sent] = {}
        self._deadlines: deque[tuple[int, _Sent]] = deque()
        self._alarm: Alarm | None = None
        self._queue: list[tuple[int, int, _Sent]] = []  # heap by priority, then by turn; some may have given up
        self._num_turns = 0

    @property
    def has_requests(self) -> bool:
        """Whether a client waits for an answer."""
        return bool(self._live)

    @property
    def rate_limit_wait(self) -> int:
        """Ticks until the rate limit would let a request in."""
        return 0 if self._bucket is None else self._bucket.wait(self.env.ticks)

    def add(self, request: Request) -> None:
        """A client sends `request` now."""
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
            self._pass_on(sent)
        elif self.num_queued < self._spec.max_queue:
            self._num_turns += 1
            self.num_queued += 1
            sent.is_queued = True
            heapq.heappush(self._queue, (sent.request.priority, self._num_turns, sent))
        else:
            self._refuse(sent)

    def _pass_on(self, sent: _Sent) -> None:
        sent.server = server = self._route(sent.request)
        self.num_outstanding += 1
        sent.request.arrival = self.env.ticks  # as the engine sees it
        server.add(sent.request)

    def hand_over(self, request: Request, server: RequestServer) -> None:
        """`request` has waited for a replica, and now `server` is there."""
        self._live[request.request_id].server = server
        request.arrival = self.env.ticks
        server.add(request)

    def look_again(self) -> None:
        """Replicas may take more than before: those that wait here go on."""
        queue = self._queue
        while queue and self.num_outstanding < self._most:
            sent = heapq.heappop(queue)[2]
            if self._live.get(sent.request.request_id) is sent and sent.is_queued:
                sent.is_queued = False
                self.num_queued -= 1
                self._pass_on(sent)

    def answer(self, request: Request) -> bool:
        """A replica has finished `request`: whether its client still waits. Its arrival is then the client's again."""
        sent = self._live.pop(request.request_id, None)
        if sent is None or sent.request is not request:
            raise AssertionError(f"{request} was answered but is not on its way")
        self.num_outstanding -= 1
        request.arrival = sent.arrival
        if sent.deadline is not None and (request.finished_at or 0) > sent.deadline:
            self._lose(sent, "timed_out")
            return False
        return True

    def abort(self, request_id: int) -> None:
        """The client of this request has gone; nothing happens where it has its answer."""
        sent = self._live.pop(request_id, None)
        if sent is not None:
            self._withdraw(sent)
            self.num_queued -= sent.is_queued
            self.look_again()

    def fail(self, requests: Iterable[Request]) -> None:
        """The replicas that had these have lost them."""
        lost = [sent for r in requests if (sent := self._live.get(r.request_id)) is not None and sent.request is r]
        for sent in lost:
            self._withdraw(sent)
        for sent in lost:
            self._again(sent)
        self.look_again()

    def outstanding_at(self, servers: Iterable[RequestServer]) -> list[Request]:
        """Requests that one of `servers` has in hand. A look at all that are on their way."""
        wanted = {id(server) for server in servers}
        return [sent.request for sent in self._live.values() if id(sent.server) in wanted]

    def _withdraw(self, sent: _Sent) -> None:
        """Take the newest try back from its replica."""
        if sent.server is not None:
            sent.server.abort(sent.request)
            sent.server = None
            self.num_outstanding -= 1

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
            if self._live.get(sent.request.request_id) is sent:  # the client has not given up
                self.num_retries += 1
                self._try(sent)

        Alarm(self.env, to_ticks(delay), retry, ARRIVAL_PRIORITY)

    def _lose(self, sent: _Sent, fate: Fate, is_over_rate: bool = False) -> None:
        """Notify the client, who may send something else at once: not while this one is being dealt with."""
        sent.request.arrival = sent.arrival
        lost = LostRequest(sent.request, fate, self.env.ticks, is_over_rate)
        Alarm(self.env, 0, lambda _: self._on_lost(lost), ARRIVAL_PRIORITY)

    def _watch_deadlines(self) -> None:
        deadlines, live = self._deadlines, self._live
        while deadlines and live.get(deadlines[0][1].request.request_id) is not deadlines[0][1]:
            deadlines.popleft()
        self._alarm = None
        if deadlines:
            delay = deadlines[0][0] - self.env.ticks
            self._alarm = Alarm(self.env, delay, self._give_up, ARRIVAL_PRIORITY)

    def _give_up(self, _: Event) -> None:
        deadlines, now = self._deadlines, self.env.ticks
        while deadlines and deadlines[0][0] <= now:
            sent = deadlines.popleft()[1]
            if self._live.get(sent.request.request_id) is not sent:
                continue
            del self._live[sent.request.request_id]
            self._withdraw(sent)
            self.num_queued -= sent.is_queued
            self._lose(sent, "timed_out")
        self._watch_deadlines()
        self.look_again()


class Entrance:
    """The way to replicas that come and go: one of the router's, or the entrance itself until one is there.

    hand_over:  gives a request to a replica: one that waited, or was to be sent
    on_waiting: called when a request has to wait
    """

    def __init__(self, router: FleetRouter, hand_over: HandOver) -> None:
        self.router = router
        self.on_waiting: list[Callable[[], None]] = []
        self._hand_over = hand_over
        self._room: dict[Request, None] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._room)

    def __call__(self, request: Request) -> RequestServer:
        """What to add `request` to."""
        return self.router(request) if len(self.router) else self

    def send(self, request: Request) -> None:
        """Hand `request` over to a replica, now or when there is one."""
        if len(self.router):
            self._hand_over(request, self.router(request))
        else:
            self.add(request)

    def add(self, request: Request) -> None:
        """`request` waits here."""
        self._room[request] = None
        for call in self.on_waiting:
            call()

    def abort(self, request: Request) -> bool:
        """`request` waits no longer."""
        del self._room[request]
        return True

    def look_again(self) -> None:
        """A replica has come: those that wait go on, in the order that they came."""
        if len(self.router):
            waiting, self._room = self._room, {}
            for request in waiting:
                self._hand_over(request, self.router(request))
