"""Clients: what sends the requests of a workload to the servers of a cluster on the simulated clock."""

__all__ = ["ClosedLoopClient", "OpenLoopClient", "Server"]

from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from simpy.events import Event

from perfmodel.engine import Request
from perfmodel.sim.clock import TickEnvironment


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
        env.process(self._send())

    def _send(self) -> Generator[Event, None, None]:
        env, route = self._env, self._route
        for request in self._requests:
            if request.arrival > env.ticks:
                yield env.timeout(request.arrival - env.ticks)
            route(request).add(request)
        self.is_done = True

    def on_finished(self, request: Request) -> None:
        """Nothing to do: arrivals do not wait for answers."""


class ClosedLoopClient:
    """`concurrency` users; each sends the next of `requests` by `route`, `think_ticks` after its last was answered."""

    def __init__(
        self, env: TickEnvironment, requests: Iterator[Request], route: Route, concurrency: int, think_ticks: int = 0
    ) -> None:
        self._env, self._requests, self._route, self._think_ticks = env, requests, route, think_ticks
        self.is_done = False  # whether the last request is sent
        for _ in range(concurrency):
            env.process(self._send_after(0))

    def _send_after(self, delay: int) -> Generator[Event, None, None]:
        if delay:
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
