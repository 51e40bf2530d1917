"""`DisaggregatedServer`: prefill replicas compute prompts, decode replicas fetch the KV and generate.

Order of events, as in vLLM's NIXL connector, Dynamo and TensorRT-LLM:

1. The front end sends the request to a prefill replica with an output limit of one token.
2. After that token the KV blocks stay allocated and a decode replica is chosen.
3. The request queues there until it is scheduled and has free blocks for its prompt, then fetches the KV that the
   prefix cache lacks. The transfer waits for both engines' links; afterwards the prefill replica frees its blocks.
4. With a free sequence slot the decode replica continues at token 2 (TensorRT-LLM, SGLang), or recomputes the
   prompt's last token and samples token 1 again (vLLM, `BatchingRules.resamples_first`).

The client gets its first token after the first decode step (its second, where decode continues at token 2), so TTFT
includes the wait for a decode slot and the transfer. One-token answers end at the prefill replica. A failed replica
loses its own requests and those in transfer to or from it (`fail`)."""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, partial

from simpy.events import Process

from perfmodel.cost import ServerFit
from perfmodel.engine import Request, RequestStatus
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.fleet.gateway import Entrance
from perfmodel.sim.fleet.kv_transfer import Fabric, KvTransfers, TransferCost, pcie_of_slices, transfer_cost
from perfmodel.sim.fleet.pool import FleetRouter, OnFinished, Pool
from perfmodel.sim.replica.replica import EngineRank, FrontEnd
from perfmodel.specs.scenario import Scenario

# What one transfer costs from an engine to another, by their numbers.
CostOf = Callable[[int, int], TransferCost]


class _Stage(Enum):
    ENTRANCE = "waits for a prefill replica to be there"
    PREFILL = "with its prefill replica"
    BETWEEN = "waits for a decode replica to be there"
    INBOUND = "waits for its decode replica's turn and blocks"
    MOVING = "its KV is on its way"
    DECODE = "with its decode replica"


class _Passage:
    """Path of a client's `request`: `prefill` is the copy on replica `source`, `target` decodes."""

    __slots__ = ("prefill", "request", "source", "stage", "target", "transfer")
    source: EngineRank
    target: EngineRank
    transfer: Process | None

    def __init__(self, request: Request, prefill: Request) -> None:
        self.request, self.prefill, self.stage = request, prefill, _Stage.ENTRANCE

    def touches(self, engines: set[int]) -> bool:
        """Whether the request is on one of `engines`, or in transfer to or from one."""
        has_source = self.stage not in (_Stage.ENTRANCE, _Stage.DECODE)
        if has_source and self.source.index in engines:
            return True
        return self.stage in (_Stage.INBOUND, _Stage.MOVING, _Stage.DECODE) and self.target.index in engines


class DisaggregatedServer:
    """Accepts requests like a replica and passes each from a prefill to a decode replica.

    to_prefill, to_decode: routers; cost_of: transfer cost between two engines; transfers: link scheduler
    front_end: HTTP server; resamples_first: decode replicas sample token 1 again
    on_finished: callback (last replica, request) for each finished request"""

    def __init__(
        self,
        env: TickEnvironment,
        to_prefill: FleetRouter,
        to_decode: FleetRouter,
        cost_of: CostOf,
        on_finished: OnFinished,
        front_end: FrontEnd | None = None,
        transfers: KvTransfers | None = None,
        resamples_first: bool = False,
    ) -> None:
        self.env = env
        self.transfers = transfers or KvTransfers(env)
        self.prefill_entrance = Entrance(to_prefill, self._prefill_at)
        self.decode_entrance = Entrance(to_decode, self._expect_at)
        self._cost_of, self._on_finished = cost_of, on_finished
        self._front_end = front_end or FrontEnd(ServerFit())
        self._passages: dict[int, _Passage] = {}  # of requests that a client waits for, by their numbers
        self._num_sampled = 0 if resamples_first else 1  # tokens with which requests come to decode replicas
        self._moving: dict[_Passage, None] = {}  # transfers that have begun, whether a client still waits or not

    def add(self, request: Request) -> None:
        """`request` arrives now, at the front end."""
        self._front_end.pass_in(self.env, request, self._enter)

    def _enter(self, request: Request) -> None:
        if request.status is RequestStatus.ABORTED:
            return
        prefill = request.afresh()
        prefill.max_output_tokens = 1
        prefill.keeps_blocks = request.max_output_tokens > 1
        self._passages[request.request_id] = _Passage(request, prefill)
        self.prefill_entrance.send(prefill)

    def _prefill_at(self, prefill: Request, source: EngineRank) -> None:
        passage = self._passages[prefill.request_id]
        passage.source, passage.stage = source, _Stage.PREFILL
        source.add(prefill)

    def on_prefilled(self, source: EngineRank, prefill: Request) -> None:
        """`source` has sampled the first token of `prefill`."""
        passage = self._passages[prefill.request_id]
        request = passage.request
        request.first_scheduled_at = prefill.first_scheduled_at
        request.num_cached_tokens = prefill.num_cached_tokens
        request.num_preemptions = prefill.num_preemptions
        request.num_promised_tokens = request.num_output_tokens = self._num_sampled if prefill.keeps_blocks else 1
        if not prefill.keeps_blocks:
            request.first_token_at, request.finished_at = prefill.first_token_at, prefill.finished_at
            request.first_token_batch = request.last_token_batch = prefill.first_token_batch
            self.on_decoded(source, request)
            return
        request.num_transferred_tokens = request.num_prompt_tokens
        passage.stage = _Stage.BETWEEN
        self.decode_entrance.send(request)

    def _expect_at(self, request: Request, target: EngineRank) -> None:
        passage = self._passages[request.request_id]
        passage.target, passage.stage = target, _Stage.INBOUND
        target.await_kv(request, self._begin_move)

    def _begin_move(self, request: Request) -> None:
        """Start the transfer into blocks just allocated, unless `request` was aborted since."""
        passage = self._passages.get(request.request_id)
        if passage is None or passage.request is not request or request.status is RequestStatus.ABORTED:
            return
        prefill = passage.prefill
        if request.status is RequestStatus.RUNNING:  # its prefix cache has it all
            passage.source.release(prefill)
            passage.stage = _Stage.DECODE
            return
        passage.stage = _Stage.MOVING
        self._moving[passage], passage.transfer = None, None
        if passage.source.is_dead:
            return
        ends = passage.source.index, passage.target.index
        cost = self._cost_of(*ends)
        num_tokens = request.num_computed_tokens - request.num_hashed_blocks * passage.target.block_size
        assert prefill.first_scheduled_at is not None
        assert prefill.finished_at is not None
        computed = prefill.first_scheduled_at, prefill.finished_at
        done, copies = partial(self._arrived, passage), (prefill, request)
        passage.transfer = self.transfers.start(cost, *ends, num_tokens, done, computed, copies)

    def _arrived(self, passage: _Passage) -> None:
        request, target = passage.request, passage.target
        if self._passages.get(request.request_id) is not passage:  # its client has given up
            self._end_move(passage)
            return
        del self._moving[passage]
        passage.source.release(passage.prefill)
        passage.stage = _Stage.DECODE
        target.finish_load(request)

    def _end_move(self, passage: _Passage) -> None:
        """Free what both sides keep for a cancelled transfer."""
        del self._moving[passage]
        passage.source.release(passage.prefill)
        passage.target.drop(passage.request)
        passage.target.forget((passage.request,))

    def delay_out(self, batch: int) -> int:
        """Ticks from the end of a step that sampled tokens for `batch` sequences until clients have them."""
        return self._front_end.delay_out(batch)

    def on_decoded(self, replica: EngineRank, request: Request) -> None:
        """`replica` has sampled the last token of `request`."""
        del self._passages[request.request_id]
        self._front_end.deliver(request)
        self._on_finished(replica, request)

    def abort(self, request: Request) -> bool:
        """Abort `request` at any stage; its KV is freed once a running transfer is over."""
        passage = self._passages.pop(request.request_id, None)
        if passage is not None:
            self._withdraw(passage)
        request.status = RequestStatus.ABORTED  # if it is in the front end, that keeps it from going on
        return True

    def sever(self, ranks: Sequence[EngineRank]) -> None:
        """Cancel transfers of failed `ranks`. Other replicas keep their requests' KV until detection (`fail`)."""
        engines = {rank.index for rank in ranks}
        for passage in self._moving:
            if passage.touches(engines):
                self._stop(passage)

    def _stop(self, passage: _Passage) -> None:
        if passage.transfer is not None:
            self.transfers.abandon(passage.transfer)
            passage.transfer = None

    def fail(self, ranks: Sequence[EngineRank]) -> list[Request]:
        """Requests lost with the failed replica `ranks`: on it, awaiting its KV or with KV kept for it. Other replicas
        free their parts."""
        engines = {rank.index for rank in ranks}
        lost = [passage for passage in self._passages.values() if passage.touches(engines)]
        for passage in lost:
            del self._passages[passage.request.request_id]
            self._withdraw(passage)
        moving = [passage for passage in self._moving if passage.touches(engines)]
        for passage in moving:
            self._stop(passage)
            self._end_move(passage)
        return [passage.request for passage in lost]

    def _withdraw(self, passage: _Passage) -> None:
        """Free an aborted request's resources, except KV in transfer."""
        stage, request, prefill = passage.stage, passage.request, passage.prefill
        if stage is _Stage.ENTRANCE:
            self.prefill_entrance.abort(prefill)
        elif stage is _Stage.PREFILL:
            passage.source.abort(prefill)
        elif stage is _Stage.BETWEEN:
            self.decode_entrance.abort(request)
            passage.source.release(prefill)
        elif stage is _Stage.INBOUND:
            passage.target.abort(request)
            passage.source.release(prefill)
        elif stage is _Stage.DECODE:
            passage.target.abort(request)


def disaggregated_server(
    env: TickEnvironment,
    scenario: Scenario,
    pools: Sequence[Pool],
    on_finished: OnFinished,
    front_end: FrontEnd,
    transfers: KvTransfers,
) -> DisaggregatedServer:
    """Server between the prefill and decode `pools` of `scenario`, on the clock `env`.

    on_finished: callback (last replica, request); front_end: HTTP server; transfers: link scheduler"""
    prefill, decode = ([p for p in pools if p.spec.role == role] for role in ("prefill", "decode"))
    routers = FleetRouter.over(prefill, scenario), FleetRouter.over(decode, scenario)
    pool_of = {engine.index: number for number, pool in enumerate(pools) for engine in pool.engines}
    spec = scenario.cluster.kv_transfer

    @cache
    def between(source: int, target: int) -> TransferCost:
        a, b = pools[source].scenario, pools[target].scenario
        return transfer_cost(a, b, spec.link_of(a.hardware), spec.link_of(b.hardware))

    def cost_of(source: int, target: int) -> TransferCost:
        return between(pool_of[source], pool_of[target])

    resamples = any(pool.scenario.engine.rules.resamples_first for pool in decode)
    return DisaggregatedServer(env, *routers, cost_of, on_finished, front_end, transfers, resamples)


def kv_transfers(env: TickEnvironment, scenario: Scenario) -> KvTransfers:
    """Transfers between all engines of the cluster: links, and their shared fabric if any."""
    spec, fabric = scenario.cluster.kv_transfer, None
    if spec.shared:
        first = next(pool for pool in scenario.pools if pool.role == "prefill")
        own = spec.link_of(first.hardware or scenario.hardware).bandwidth_bytes_per_s
        fabric = Fabric(env, spec.fabric_bandwidth_bytes_per_s or own)
    elif (pcie := pcie_of_slices(scenario)) is not None:
        fabric = Fabric(env, pcie[1])
    return KvTransfers(env, spec.layerwise, fabric)
