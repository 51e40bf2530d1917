"""Clients: what sends the requests of a workload to the servers of a cluster on the simulated clock."""

__all__ = ["ClosedLoopClient", "OpenLoopClient", "Route", "Server"]

from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from simpy.events import URGENT, Event

from perfmodel.engine import Request
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment


class Server(Protocol):
    """What takes requests: a replica, or what passes them on to replicas."""

    def add(self, request: Request) -> None:
        """`request` arrives now."""
        ...


Route = Callable[[Request], Server]


class OpenLoopClient:
    """Sends each request at its own time, whatever becomes of the others."""

    def __init__(self, env: TickEnvironment, requests: Iterator[Request], route: Route) -> None:
        self._env, self._requests, self._route = env, requests, route
        self.is_done = False  # whether the last request is sent
        self._next: Request | None = None  # the one that is sent when the alarm goes off
        Alarm(env, 0, self._send, URGENT)

    def _send(self, _: Event) -> None:
        """Send what is due now, and come back for the next."""
        now, route = self._env.ticks, self._route
        request = self._next or next(self._requests, None)
        while request is not None and request.arrival <= now:
            route(request).add(request)
            request = next(self._requests, None)
        self._next = request
        if request is None:
            self.is_done = True
        else:
            Alarm(self._env, request.arrival - now, self._send, ARRIVAL_PRIORITY)

    def on_finished(self, request: Request) -> None:
        """Nothing to do: arrivals do not wait for answers."""


class ClosedLoopClient:
    """`concurrency` users; each sends the next of `requests` by `route`, `think_ticks` after its last was answered."""

    def __init__(
        self, env: TickEnvironment, requests: Iterator[Request], route: Route, concurrency: int, think_ticks: int = 0
    ) -> None:
        self._env, self._requests, self._route, self._think_ticks = env, requests, route, think_ticks
        self.is_done = False  # whether the last request is sent
        Alarm(env, 0, lambda _: self._begin(concurrency), URGENT)

    def _begin(self, concurrency: int) -> None:
        """The first request of each user, as far as there are requests."""
        for _ in range(concurrency):
            if self.is_done:
                break
            self._send()

    def _send_after(self, delay: int) -> Generator[Event, None, None]:
        yield self._env.timeout(delay)
        self._send()

    def _send(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self.is_done = True
        else:
            request.arrival = self._env.ticks
            self._route(request).add(request)

    def on_finished(self, request: Request) -> None:
        """The user whose request this was goes on."""
        if self._think_ticks:
            self._env.process(self._send_after(self._think_ticks))
        elif request.finished_at is not None and request.finished_at > self._env.ticks:
            self._env.process(self._send_after(request.finished_at - self._env.ticks))  # the answer is on its way
        else:
            self._send()
