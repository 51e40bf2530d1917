"""`PrefillDecode`: prefill and decode pools, joined by a `DisaggregatedServer` once both are there."""

__all__ = ["PrefillDecode", "kv_transfers"]

from collections.abc import Callable, Sequence
from functools import cache

from perfmodel.engine import Request
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
from perfmodel.sim.fleet.kv_transfer import Fabric, KvTransfers, TransferCost, transfer_cost
from perfmodel.sim.fleet.pool import FleetRouter, OnFinished, Pool
from perfmodel.sim.replica.replica import EngineRank, FrontEnd
from perfmodel.specs.scenario import Scenario


class PrefillDecode:
    """What the engines of the two roles call; after `join` it goes to the server between them."""

    def __init__(self) -> None:
        self._server: DisaggregatedServer | None = None

    def join(
        self,
        env: TickEnvironment,
        scenario: Scenario,
        pools: Sequence[Pool],
        on_finished: OnFinished,
        front_end: FrontEnd | None,
        transfers: KvTransfers,
    ) -> DisaggregatedServer:
        """The server between the prefill and the decode pools among `pools` of `scenario`.

        on_finished: called with (replica that had it last, request); front_end: the HTTP server in front, if any
        transfers:   those under way on the links
        """
        prefill, decode = ([p for p in pools if p.spec.role == role] for role in ("prefill", "decode"))
        routers = FleetRouter.over(prefill, scenario), FleetRouter.over(decode, scenario)
        costs = _transfer_costs(scenario, pools)
        resamples = any(pool.scenario.engine.rules.resamples_first for pool in decode)
        self._server = DisaggregatedServer(env, *routers, costs, on_finished, front_end, transfers, resamples)
        return self._server

    def on_prefilled(self, replica: EngineRank, request: Request) -> None:
        assert self._server is not None
        self._server.on_prefilled(replica, request)

    def on_decoded(self, replica: EngineRank, request: Request) -> None:
        assert self._server is not None
        self._server.on_decoded(replica, request)


def kv_transfers(env: TickEnvironment, scenario: Scenario) -> KvTransfers:
    """What moves KV between all engines of the cluster: their links, and the fabric between if they share one."""
    spec, fabric = scenario.cluster.kv_transfer, None
    if spec.shared:
        first = next(pool for pool in scenario.pools if pool.role == "prefill")
        own = spec.link_of(first.hardware or scenario.hardware).bandwidth_bytes_per_s
        fabric = Fabric(env, spec.fabric_bandwidth_bytes_per_s or own)
    return KvTransfers(env, spec.layerwise, fabric)


def _transfer_costs(scenario: Scenario, pools: Sequence[Pool]) -> Callable[[int, int], TransferCost]:
    pool_of = {engine.index: number for number, pool in enumerate(pools) for engine in pool.engines}
    spec = scenario.cluster.kv_transfer

    @cache
    def between(source: int, target: int) -> TransferCost:
        a, b = pools[source].scenario, pools[target].scenario
        return transfer_cost(a, b, spec.link_of(a.hardware), spec.link_of(b.hardware))

    return lambda source, target: between(pool_of[source], pool_of[target])
