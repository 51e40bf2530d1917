"""`DisaggregatedServer`: prompts computed by prefill replicas, answers by decode replicas, KV fetched in between.

One request, in the order of vLLM's NIXL connector, Dynamo and TensorRT-LLM:

1. the front end hands it to a prefill replica, where it is a request for one token;
2. that token sampled, its KV blocks stay where they are and a decode replica is chosen;
3. when the decode replica has KV blocks for the whole prompt and one more token, it fetches the prompt's KV: the
   transfer waits for the links of both engines, then takes its time; then the prefill replica's blocks go free;
4. as soon as a sequence slot is free the decode replica goes on from token 2, as for any running request.

The client has the first token when that first decode step is over (it comes with the second, as TensorRT-LLM sends it),
so TTFT contains the wait for a decode slot and the transfer. An answer of one token ends at the prefill replica.
"""

__all__ = ["DisaggregatedServer"]

from collections import deque
from collections.abc import Callable, Sequence

from perfmodel.engine import Request, RequestStatus
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment
from perfmodel.sim.fleet.kv_transfer import KvTransfers, TransferCost
from perfmodel.sim.replica.front_end import FrontEnd
from perfmodel.sim.replica.replica import Replica

Route = Callable[[Request], Replica]
# What one transfer costs from an engine to another, by their numbers.
CostOf = Callable[[int, int], TransferCost]


class DisaggregatedServer:
    """Takes requests like a replica does, and passes each from a prefill to a decode replica.

    to_prefill, to_decode: the routers of the two roles
    on_finished: called with (replica that had it last, request) for each request that is done
    """

    def __init__(
        self,
        env: TickEnvironment,
        to_prefill: Route,
        to_decode: Route,
        cost_of: CostOf,
        on_finished: Callable[[Replica, Request], None],
        front_end: FrontEnd | None = None,
        transfers: KvTransfers | None = None,
    ) -> None:
        self.env = env
        self.transfers = transfers or KvTransfers(env)
        self._to_prefill, self._to_decode, self._cost_of = to_prefill, to_decode, cost_of
        self._on_finished, self._front_end = on_finished, front_end
        self._whole: dict[int, Request] = {}  # the client's request, by the number that its prefill bears too
        # (prefill replica, its request, the client's), by the decode replica that has no blocks for it yet.
        self._inbound: dict[int, deque[tuple[Replica, Request, Request]]] = {}
        # The engine that has a request of this number, and what it is there: its prefill, or itself.
        self._at: dict[int, tuple[Replica, Request]] = {}
        self._bound: dict[int, Replica] = {}  # the decode replica that a request is on its way to

    def add(self, request: Request) -> None:
        """`request` arrives now, at the front end if there is one."""
        delay = self._front_end.delay(request, self.env.ticks) if self._front_end is not None else 0
        if delay:
            Alarm(self.env, delay, lambda _: self._prefill(request), ARRIVAL_PRIORITY)
        else:
            self._prefill(request)

    def abort(self, request: Request) -> bool:
        """`request` gives up, wherever it is; its KV goes with it, once a transfer that has begun is over."""
        request.status, was = RequestStatus.ABORTED, request.status
        where = self._at.pop(request.request_id, None)
        if where is None:
            self._leave_inbound(request)
            return True  # in the front end, or between the engines
        replica, there = where
        self._whole.pop(request.request_id, None)
        if there is request:
            request.status = was
        return replica.abort(there)

    def _leave_inbound(self, request: Request) -> None:
        """Give up the wait for a decode replica's blocks, if `request` does wait for them."""
        target = self._bound.get(request.request_id)
        inbound = self._inbound[target.index] if target is not None else deque()
        for waiting in inbound:
            if target is not None and waiting[2] is request:
                inbound.remove(waiting)
                del self._bound[request.request_id]
                target.forget((request,))
                waiting[0].release(waiting[1])
                self.fetch(target)
                return

    def _prefill(self, request: Request) -> None:
        if request.status is RequestStatus.ABORTED:
            return
        prefill = Request(
            request.request_id, request.arrival, request.num_prompt_tokens, 1, request.block_hashes, request.priority
        )
        prefill.session = request.session
        prefill.keeps_blocks = request.max_output_tokens > 1
        self._whole[request.request_id] = request
        source = self._to_prefill(request)
        self._at[request.request_id] = source, prefill
        source.add(prefill)

    def on_prefilled(self, source: Replica, prefill: Request) -> None:
        """`source` has sampled the first token of `prefill`."""
        request = self._whole.pop(prefill.request_id)
        self._at.pop(prefill.request_id)
        request.first_scheduled_at = prefill.first_scheduled_at
        request.num_cached_tokens = prefill.num_cached_tokens
        request.num_preemptions = prefill.num_preemptions
        request.num_promised_tokens = request.num_output_tokens = 1
        if not prefill.keeps_blocks:
            request.first_token_at, request.finished_at = prefill.first_token_at, prefill.finished_at
            request.first_token_batch = request.last_token_batch = prefill.first_token_batch
            self._deliver(source, request)
            return
        request.num_transferred_tokens = request.num_prompt_tokens
        target = self._to_decode(request)
        target.loop.scheduler.check_can_ever_run(request)
        target.expect(request)  # on its way counts, for routers
        self._bound[request.request_id] = target
        self._inbound.setdefault(target.index, deque()).append((source, prefill, request))
        self.fetch(target)

    def fetch(self, target: Replica) -> None:
        """Start the transfers for which the decode replica `target` has blocks now, in order of arrival there."""
        inbound = self._inbound.get(target.index)
        while inbound and target.reserve(inbound[0][2]):
            self._transfer(target, *inbound.popleft())

    def _transfer(self, target: Replica, source: Replica, prefill: Request, request: Request) -> None:
        def arrived() -> None:
            source.release(prefill)
            target.forget((request,))
            if self._bound.get(request.request_id) is target:
                del self._bound[request.request_id]
            if request.status is RequestStatus.ABORTED:
                target.drop(request)
                return
            self._at[request.request_id] = target, request
            target.add(request)

        cost = self._cost_of(source.index, target.index)
        prefill_ticks = 0
        if prefill.finished_at == self.env.ticks and prefill.first_scheduled_at is not None:
            prefill_ticks = self.env.ticks - prefill.first_scheduled_at
        self.transfers.start(cost, source.index, target.index, request.num_prompt_tokens, arrived, prefill_ticks)

    def on_decoded(self, replica: Replica, request: Request) -> None:
        """`replica` has sampled the last token of `request`."""
        self._at.pop(request.request_id, None)
        self._deliver(replica, request)

    def _deliver(self, replica: Replica, request: Request) -> None:
        if self._front_end is not None:
            self._front_end.deliver(request)
        self._on_finished(replica, request)

    def check_idle(self, engines: Sequence[Replica]) -> None:
        """Raise AssertionError unless nothing is left anywhere: no request, no KV block, no transfer."""
        assert not self._whole
        assert not any(self._inbound.values())
        for engine in engines:
            scheduler = engine.loop.scheduler
            scheduler.check_integrity()
            assert not scheduler.has_requests
            assert not scheduler.detached
            assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
