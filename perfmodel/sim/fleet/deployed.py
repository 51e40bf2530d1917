"""`Deployed`: the pools of one deployment and the router or server in front of them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from perfmodel.engine import Request
from perfmodel.sim.fleet.pool import FleetRouter, Pool
from perfmodel.specs.cluster import PoolGroup

if TYPE_CHECKING:
    from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
    from perfmodel.sim.fleet.gateway import RequestServer


class Deployed(NamedTuple):
    """`pools` by position in the scenario, behind a `router` (unified pools) or a `server` (prefill, decode)."""

    spec: PoolGroup
    pools: Mapping[int, Pool]
    router: FleetRouter | None
    server: "DisaggregatedServer | None"

    @property
    def route(self) -> "Callable[[Request], RequestServer]":
        """Router of a deployment with a fixed set of replicas."""
        if self.server is not None:
            server = self.server
            return lambda _: server
        assert self.router is not None
        return self.router
