"""`Emulator`: a scenario's cluster on the wall clock, and what becomes of each request that real clients send.

It is a driver as `perfmodel.sim.driver` is one, over the same cluster of the same engines; only that requests come from
outside, that equal steps are taken one by one, and that each token is told of when its client would have it."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from itertools import count
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from perfmodel.engine import Request, RequestStatus, StepPlan, StepRecord
from perfmodel.errors import PerfmodelError, SpecError, WorkloadError
from perfmodel.serve.paced_clock import ClockStoppedError, PacedClock
from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, PacedEnvironment
from perfmodel.sim.fleet.cluster import Cluster
from perfmodel.sim.fleet.gateway import LostRequest, RequestServer
from perfmodel.sim.fleet.pool import remembered_basis
from perfmodel.sim.replica.replica import EngineRank, Replica
from perfmodel.specs.autoscaling import AutoscalingSpec
from perfmodel.specs.scenario import Scenario


def beyond_context(max_model_len: int, excess: str, way_out: str) -> WorkloadError:
    """Error for a request beyond the model's context.

    max_model_len: tokens of the context; excess: what does not fit; way_out: what the client can do"""
    limit = f"This model's maximum context length is {max_model_len} tokens."
    return WorkloadError(f"{limit} However, {excess}; {way_out}.")


class RequestParams(NamedTuple):
    """What a client has asked for, beside counts of tokens.

    finish_reason: "stop" where the text ends there, "length" where its limit of tokens does
    max_tokens:    what the client allows; None: as many as it gets
    n:             answers that it asked for; None for all but one of these
    adapter:       name of the LoRA adapter
    token_ids:     of the prompt and then of the answer"""

    finish_reason: str = "length"
    max_tokens: int | None = None
    n: int | None = 1
    adapter: str | None = None
    token_ids: NDArray[np.int64] | None = None


Fate = Literal["finished", "failed", "rate_limited", "timed_out"]


class ReplicaDownError(PerfmodelError):
    """A replica that is not there now: it has failed, starts, or is not needed."""


class Order(NamedTuple):
    """What an engine has to know of a request: counts of tokens, never their text.

    num_prompt_tokens, num_output_tokens: tokens of the prompt; tokens to generate
    block_hashes: identity of the full KV blocks of the prompt, and then of the answer, in order; () = like no other
    priority:     the least goes first, under the policy `priority`
    session:      whose request it is, for routers that keep sessions together
    params:       what observers may want to know beside"""

    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[Hashable, ...] = ()
    priority: int = 0
    session: Hashable | None = None
    params: RequestParams = RequestParams()


class Listener(Protocol):
    """Whoever waits for an answer. It is called within a turn of the clock: nothing may take long here."""

    def on_tokens(self, num_tokens: int) -> None:
        """So many more tokens of the answer are with the client now."""

    def on_end(self, fate: Fate) -> None:
        """There will be no more: all tokens have come, or the deployment has lost the request."""


class Observer:
    """Whoever counts what engines do, of which each method that is not its own is no news to it."""

    def on_arrived(self, request: Request) -> None:
        """A client has sent `request`."""

    def on_step(self, engine: EngineRank, record: StepRecord, plan: StepPlan, gaps: Sequence[tuple[int, int]]) -> None:
        """A step of `engine` has ended, which was to compute `plan`.

        gaps: (ticks, how many times) between tokens of requests that sat out the steps between; those of the others are
              the step's own duration, `record.num_gaps` times"""

    def on_finished(self, engine: EngineRank, request: Request) -> None:
        """An answer is complete; its times are those of its client, and may be a moment ahead."""

    def on_lost(self, request: Request, fate: Fate) -> None:
        """The deployment has failed `request`, or its deadline is over."""

    def on_aborted(self, request: Request) -> None:
        """The client of `request` has gone."""


class _Stream:
    """An answer on its way: `request`, its newest try; tokens sampled for that, and those that were told of."""

    __slots__ = ("is_closed", "is_finished", "listener", "num_sampled", "num_told", "params", "request", "server")

    def __init__(self, request: Request, server: RequestServer, listener: Listener, params: RequestParams) -> None:
        self.request, self.server, self.listener, self.params = request, server, listener, params
        self.num_sampled = self.num_told = 0
        self.is_closed = self.is_finished = False

    def sample(self, request: Request, has_drafts: bool) -> int:
        """A step has given `request` a token, or several: how many it has now."""
        if request is not self.request:  # tried again
            self.request, self.num_sampled = request, 0
        if has_drafts or not self.num_sampled:
            self.num_sampled = request.num_output_tokens  # 2 where the first, of another engine, leaves with its second
        else:
            self.num_sampled += 1  # counters of those that decode together stand still
        return self.num_sampled

    def on_sampled(self, num_sampled: int) -> None:
        """The client has so many of its tokens."""
        more = num_sampled - self.num_told
        if more > 0 and not self.is_closed:
            self.num_told = num_sampled
            self.listener.on_tokens(more)

    def end(self, fate: Fate) -> None:
        """There is no more: tokens of its last step may be on their way, and never arrive."""
        if not self.is_closed:
            self.is_closed = True
            self.listener.on_end(fate)


class Emulator:
    """The cluster of `scenario` on the wall clock; `start` it within an event loop.

    speed:     simulated seconds per second
    own_ports: replicas are sent their requests by name, by somebody else's router: the scenario's router and gateway
               are left out
    loras:     LoRA adapters that it is started with, in order
    on_late, on_slowed, on_error: as of a `PacedClock`

    Raises DoesNotFitError for a model too large for the devices, SpecError for what has no wall clock."""

    def __init__(
        self,
        scenario: Scenario,
        speed: float = 1.0,
        own_ports: bool = False,
        loras: Sequence[str] = (),
        on_late: Callable[[float], None] = lambda _: None,
        on_slowed: Callable[[float], None] = lambda _: None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        if own_ports:
            scenario = _without_entrance(scenario)
        if scenario.prompt_compression is not None:
            raise SpecError(
                f"{scenario.name}: prompt_compression shortens the prompts of a scenario's traffic, and a server is "
                f"sent its prompts: leave it out."
            )
        if scenario.traffic.beam_width > 1:
            raise SpecError(f"{scenario.name}: got traffic.beam_width; a server's clients ask for beams, leave it out.")
        if any(pool.role == "encode" for pool in scenario.pools):
            raise SpecError(f"{scenario.name}: requests that a server is sent have no images; leave encode pools out.")
        env = PacedEnvironment()
        self.scenario = scenario
        self.clock = PacedClock(env, speed, on_late=on_late, on_slowed=on_slowed, on_error=on_error)
        self.observers: list[Observer] = []
        basis, heard = remembered_basis(None, None), (self._on_finished, self._on_step)
        self.cluster = Cluster(env, scenario, basis, *heard, can_leap=False, on_lost=self._on_lost)
        entrance = next(pool for pool in self.cluster.pools if pool.spec.role != "decode")
        config = entrance.engines[0].loop.scheduler.config
        self.max_model_len, self.block_size = config.max_model_len, config.block_size
        self.num_sent = self.num_finished = self.num_failed = self.num_timed_out = self.num_aborted = 0
        self._streams: dict[int, _Stream] = {}
        self._adapters = {name: number for number, name in enumerate(loras)}
        self._numbers = count()
        silent = [pool for pool in self.cluster.pools if pool.spec.shadow or pool.spec.role == "prefill"]
        self._silent = {engine.index for pool in silent for engine in pool.engines}

    @property
    def num_under_way(self) -> int:
        """Requests that clients wait for."""
        return len(self._streams)

    def server_of(self, number: int) -> RequestServer | None:
        """What took request `number`: a rank, or what stands before several; None once it is over."""
        stream = self._streams.get(number)
        return None if stream is None else stream.server

    def params_of(self, number: int) -> RequestParams:
        """What is known beside of request `number`, which is not over."""
        return self._streams[number].params

    def start(self) -> None:
        """Tick 0 is now; within the running event loop."""
        self.clock.start()

    def stop(self) -> None:
        """Time stands still, and no listener is called again."""
        self.clock.stop()

    def submit(self, order: Order, listener: Listener, replica: int | None = None, arrived: float | None = None) -> int:
        """`order` arrives; its number.

        listener: gets its tokens
        replica:  which takes it, past router and gateway; by default they decide
        arrived:  when it came, in seconds of the event loop's clock; by default now. What it took since to read it is
                  no time of the deployment's, whose own server takes what it was measured to take

        Raises WorkloadError for one that could never run, ReplicaDownError where `replica` is not there,
        ClockStoppedError where nothing is any more."""
        now = self.clock.catch_up(arrived)
        if replica is not None and not self.is_up(replica):
            raise ReplicaDownError(f"replica {replica} is not up; ask another, or wait until it has started")
        is_vector = self.scenario.model.pooling is not None  # which takes no room
        if order.num_prompt_tokens + order.num_output_tokens > self.max_model_len + is_vector:
            excess = f"a prompt of {order.num_prompt_tokens} and {order.num_output_tokens} to generate are more"
            raise beyond_context(self.max_model_len, excess, "shorten the prompt or ask for fewer")
        request = Request(next(self._numbers), now, *order[:4])  # counts, blocks, priority
        request.session = order.session
        if (name := order.params.adapter) is not None:
            request.adapter = self._adapters.setdefault(name, len(self._adapters))
        request.turn = 0 if order.block_hashes else -1  # its answer's blocks may begin another prompt
        for pool in self.cluster.pools:
            pool.engines[0].loop.scheduler.check_can_ever_run(request)
        engine = None
        if replica is not None:  # its rank with the fewest requests
            engine = min(self.replicas[replica].ranks, key=lambda rank: rank.num_outstanding)
        server = engine if engine is not None and self.cluster.dynamic is None else self.cluster.route(request)
        self._streams[request.request_id] = _Stream(request, server, listener, order.params)
        self.num_sent += 1
        for observer in self.observers:
            observer.on_arrived(request)
        if engine is not None and self.cluster.dynamic is not None:
            self.cluster.dynamic.send_to(engine, request)
        else:
            server.add(request)
        self.clock.reschedule()
        return request.request_id

    def abort(self, number: int) -> None:
        """The client of request `number` has gone; nothing happens if it has its answer."""
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.is_closed = True
        with suppress(ClockStoppedError):  # nothing happens to it then
            self.clock.catch_up()
        if self._streams.pop(number, None) is None or stream.is_finished:
            return  # it was lost meanwhile, or its answer is on the way
        stream.server.abort(stream.request)
        self.num_aborted += 1
        for observer in self.observers:
            observer.on_aborted(stream.request)
        self.clock.reschedule()

    @property
    def rate_limited_for_s(self) -> float:
        """Seconds of the wall until the gateway's rate limit lets the next request in."""
        dynamic = self.cluster.dynamic
        return 0.0 if dynamic is None else dynamic.gateway.rate_limit_wait / TICKS_PER_S / self.clock.speed

    @property
    def replicas(self) -> list[Replica]:
        """The replicas of all pools, those that may come later included."""
        return [replica for pool in self.cluster.pools for replica in pool.replicas]

    def is_up(self, replica: int) -> bool:
        """Whether the replica of this number takes requests now."""
        for pool in self.cluster.pools:
            if replica < len(pool.replicas):
                fleet = None if self.cluster.dynamic is None else self.cluster.dynamic.fleet_of(pool)
                return fleet is None or fleet.is_up(replica)
            replica -= len(pool.replicas)
        raise IndexError(replica)

    def cold_start_s(self) -> float:
        """Simulated seconds until the deployment serves: the longest that a replica of it takes to load its weights, at
        the bandwidth that an autoscaler of its pool is given, or would be by default."""
        return max(
            (pool.spec.autoscaling or AutoscalingSpec(target=1, max_replicas=1)).start_s(
                pool.weight_bytes_per_replica, pool.spec.engine.num_graphs
            )
            for pool in self.cluster.pools
        )

    def _on_step(self, engine: EngineRank, record: StepRecord) -> None:
        plan, irregular = engine.plan, engine.loop.scheduler.irregular_gaps
        gaps = tuple(irregular)
        irregular.clear()
        for observer in self.observers:
            observer.on_step(engine, record, plan, gaps)
        if engine.index in self._silent:
            return
        # First tokens are told of first: to tell takes a moment, which is more of a TTFT than of a gap between tokens.
        streams, has_drafts = self._streams, bool(plan.draft_depths)
        result: list[tuple[_Stream, int]] = []
        for request in (*plan.samples, *plan.decodes):
            stream = streams.get(request.request_id)
            if stream is not None and request.status is not RequestStatus.ABORTED:  # of a replica that has failed
                result.append((stream, stream.sample(request, has_drafts)))
        if result:
            delay = self.cluster.delay_out(engine, plan.num_samples)
            Alarm(self.clock.env, delay, lambda _: _notify(result), ARRIVAL_PRIORITY)

    def _on_finished(self, engine: EngineRank, request: Request) -> None:
        self.num_finished += 1
        for observer in self.observers:
            observer.on_finished(engine, request)
        stream = self._streams.get(request.request_id)
        if stream is not None:
            assert request.finished_at is not None
            stream.is_finished = True
            env = self.clock.env
            Alarm(env, max(request.finished_at - env.ticks, 0), lambda _: self._end(stream, request), ARRIVAL_PRIORITY)

    def _end(self, stream: _Stream, request: Request) -> None:
        """The client has the whole answer, unless it has gone meanwhile."""
        if self._streams.pop(request.request_id, None) is stream:
            stream.on_sampled(request.num_output_tokens)
            stream.end("finished")

    def _on_lost(self, lost: LostRequest) -> None:
        fate: Fate = "rate_limited" if lost.is_over_rate else lost.fate
        if lost.fate == "failed":
            self.num_failed += 1
        else:
            self.num_timed_out += 1
        for observer in self.observers:
            observer.on_lost(lost.request, fate)
        stream = self._streams.pop(lost.request.request_id, None)
        if stream is not None:
            stream.end(fate)


def _without_entrance(scenario: Scenario) -> Scenario:
    """`scenario` as one whose replicas are asked one by one. Raises SpecError for one whose replicas are no servers."""
    start = f"{scenario.name}: each replica on a port of its own, but"
    if scenario.cluster.is_disaggregated:
        raise SpecError(f"{start} its pools share the work of a request, prefill and decode; serve it on one port.")
    if any(pool.share is not None for pool in scenario.pools):
        raise SpecError(
            f"{start} cluster.pools split the traffic by `share`, which only a router in front can; serve it on one "
            f"port, or leave `share` out."
        )
    return scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update={"gateway": None})})


def _notify(sampled: Sequence[tuple[_Stream, int]]) -> None:
    for stream, num_sampled in sampled:
        stream.on_sampled(num_sampled)
