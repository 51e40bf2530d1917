"""`Deployed`: the pools of one deployment on the simulated clock, and who takes its requests."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from perfmodel.engine import Request
from perfmodel.sim.fleet.pool import FleetRouter, Pool
from perfmodel.specs.cluster import PoolGroup

if TYPE_CHECKING:
    from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
    from perfmodel.sim.fleet.gateway import RequestServer


class Deployed(NamedTuple):
    """`pools` by their positions in the scenario; a `router` over unified ones, or the `server` between the others."""

    spec: PoolGroup
    pools: Mapping[int, Pool]
    router: FleetRouter | None
    server: "DisaggregatedServer | None"

    @property
    def route(self) -> "Callable[[Request], RequestServer]":
        """The router of a deployment whose replicas neither come nor go."""
        if self.server is not None:
            server = self.server
            return lambda _: server
        assert self.router is not None
        return self.router
