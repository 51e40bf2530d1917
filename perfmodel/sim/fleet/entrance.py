"""`Entrance`: the way to replicas that come and go, and the room where requests wait while there is none."""

__all__ = ["Entrance"]

from collections.abc import Callable

from perfmodel.engine import Request
from perfmodel.sim.fleet.gateway import RequestServer
from perfmodel.sim.fleet.pool import FleetRouter
from perfmodel.sim.replica.replica import EngineRank


class Entrance:
    """Who takes a request: one of the router's replicas, or the entrance itself until one is there.

    hand_over:  gives a request to a replica: one that waited, or was to be sent
    on_waiting: called when a request has to wait
    """

    def __init__(self, router: FleetRouter, hand_over: Callable[[Request, EngineRank], None]) -> None:
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
