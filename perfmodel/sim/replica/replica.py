"""`EngineRank`: an engine and its HTTP server on the simulated clock; `Replica`: the ranks of one model copy.

A `Lockstep` drives its steps, alone or with the other ranks of a data-parallel group."""

from collections.abc import Callable, Sequence
from heapq import heapreplace

from perfmodel.cost.calibrations.engine_profile import ServerFit
from perfmodel.cost.calibrations.host_work import HostImages
from perfmodel.engine import Request, RequestStatus, ServeLoop, StepPlan, StepRecord
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.replica.grammars import GrammarCompiler
from perfmodel.sim.replica.host_cores import HostCores
from perfmodel.sim.replica.lockstep import Lockstep


class ImageThreads:
    """Threads of `num_processes` API servers that work on images: `num_decoding` of each decode files, all of them, and
    one runs the model's processor, but for images among the `num_bytes` that it keeps.

    num_images, num_cached, num_requests: so far; busy_ticks: of the processors' threads; ticks: from the arrival of a
    request until its images are processed

    Source: vLLM 0.30.0, multimodal/media/connector.py (`global_thread_pool`), renderers/base.py (`_mm_executor`)."""

    def __init__(self, work: HostImages, num_decoding: int, num_bytes: float, num_processes: int = 1) -> None:
        self._sizes = [[to_ticks(seconds) for seconds in size[:2]] for size in work.sizes]
        self._bytes, self._most_bytes = [size.num_bytes for size in work.sizes], num_bytes
        self._request, self._new_request = to_ticks(work.request_s), to_ticks(work.new_request_s)
        self._decoding = [0] * (num_decoding * num_processes)  # heaps of ticks at which a thread is free
        self._processing = [(0, number) for number in range(num_processes)]
        self.num_processes = num_processes
        self._kept: list[dict[object, int]] = [{} for _ in range(num_processes)]  # the oldest first
        self._num_free = [num_bytes] * num_processes
        self._last: tuple[object, int] = (None, 0)
        self.num_images = self.num_cached = self.num_requests = self.busy_ticks = self.ticks = 0

    @property
    def num_threads(self) -> int:
        return len(self._decoding) + len(self._processing)

    def num_busy(self, now: int) -> int:
        """Threads that have work."""
        return sum([free > now for free in self._decoding]) + sum([free > now for free, _ in self._processing])

    def done_at(self, request: Request, now: int, cores: HostCores | None) -> int:
        """When the images of `request`, which come `now`, are processed."""
        if request.session is not None and request.session == self._last[0]:  # another answer of the same prompt
            return max(self._last[1], now)
        decoded_at = now
        for item in request.encoder_inputs:
            done_at = max(self._decoding[0], now) + _on_cores(cores, self._sizes[item.size][0], now)
            heapreplace(self._decoding, done_at)
            decoded_at = max(decoded_at, done_at)
        free_at, process = self._processing[0]
        kept = [self._keep(process, item.content, self._bytes[item.size]) for item in request.encoder_inputs]
        work = self._request + (0 if all(kept) else self._new_request)
        new = [item for item, is_kept in zip(request.encoder_inputs, kept, strict=True) if not is_kept]
        work = _on_cores(cores, work + sum([self._sizes[item.size][1] for item in new]), now)
        done_at = max(free_at, decoded_at) + work
        heapreplace(self._processing, (done_at, process))
        self._last = request.session, done_at
        self.num_requests += 1
        self.num_images += len(kept)
        self.num_cached += sum(kept)
        self.busy_ticks += work
        self.ticks += done_at - now
        return done_at

    def _keep(self, process: int, content: object, num_bytes: int) -> bool:
        """Whether the cache of `process` has `content`; it is the newest there from now on."""
        kept = self._kept[process]
        is_kept = kept.pop(content, None) is not None
        if num_bytes <= self._most_bytes:
            self._num_free[process] -= 0 if is_kept else num_bytes
            kept[content] = num_bytes
            while self._num_free[process] < 0:
                self._num_free[process] += kept.pop(next(iter(kept)))
        return is_kept


def _on_cores(cores: HostCores | None, ticks: int, now: int) -> int:
    return ticks if cores is None else cores.taken_in(ticks, now)


class FrontEnd:
    """HTTP, tokenisation and streaming in front of an engine: latency outside of steps.

    num_processes: that share the requests; each works on one after another, the next one on the first that is free
    images:        their threads for images, where requests have some"""

    def __init__(self, server: ServerFit, num_processes: int = 1, images: ImageThreads | None = None) -> None:
        self.images = images
        self._in = to_ticks(server.in_s)
        self._in_serial = to_ticks(server.in_serial_s)
        self._in_per_token = to_ticks(server.in_per_prompt_token_s)
        self._beam = to_ticks(server.beam_s)
        self._out = to_ticks(server.out_s)
        self._out_per_sequence = to_ticks(server.out_per_sequence_s)
        self._free_at = [0] * num_processes  # a heap
        self.num_processes = num_processes
        self.cores: HostCores | None = None  # where others work as well

    def num_busy(self, now: int) -> int:
        """Processes that take requests in, and threads that work on images."""
        return sum([free > now for free in self._free_at]) + (self.images.num_busy(now) if self.images else 0)

    def delay(self, request: Request, now: int) -> int:
        """Ticks until the engine has a request that arrives `now`."""
        work, latency = self._in_serial + self._in_per_token * request.num_prompt_tokens, self._in
        if request.beam_step > 0:
            work, latency = self._beam, 0
        work, latency = _on_cores(self.cores, work, now), _on_cores(self.cores, latency, now)
        done_at = max(self._free_at[0], now) + work
        heapreplace(self._free_at, done_at)
        if self.images is not None and request.encoder_inputs and request.beam_step <= 0:
            done_at = self.images.done_at(request, done_at, self.cores)
        return done_at - now + latency

    def pass_in(self, env: TickEnvironment, request: Request, enter: Callable[[Request], None]) -> None:
        """Call `enter` once the engine has a `request` that arrives now."""
        delay = self.delay(request, env.ticks)
        if delay:
            Alarm(env, delay, lambda _: enter(request), ARRIVAL_PRIORITY)
        else:
            enter(request)

    def delay_out(self, batch: int) -> int:
        """Ticks from the end of a step that sampled for `batch` sequences until clients have the tokens."""
        ticks = self._out + self._out_per_sequence * -(-batch // len(self._free_at))
        return ticks if self.cores is None else self.cores.sent(ticks)

    def deliver(self, request: Request) -> None:
        """Shift a finished request's times from sampling to delivery; a beam's token goes no farther."""
        if request.beam_step >= 0:
            return
        assert request.first_token_at is not None
        assert request.finished_at is not None
        request.first_token_at += self.delay_out(request.first_token_batch)
        request.finished_at += self.delay_out(request.last_token_batch)


class EngineRank:
    """An engine under simulated time.

    lockstep: its clock; index: its number in the cluster; loop: its serve loop; front_end: its HTTP server
    on_finished: callback (replica, request) per finished request, before the next step is planned; client times
    on_step: callback (replica, record) per step or leap"""

    def __init__(
        self,
        lockstep: Lockstep,
        index: int,
        loop: ServeLoop,
        on_finished: "Callable[[EngineRank, Request], None]",
        on_step: "Callable[[EngineRank, StepRecord], None]",
        front_end: FrontEnd | None = None,
    ) -> None:
        self.index, self.loop = index, loop
        self.num_outstanding = 0  # waiting, running or on their way; blocks of their prompts
        self.num_prompt_blocks = 0
        self.is_dead = False  # failed, not yet detected
        self._watchers: list[Callable[[int], None]] = []
        self.block_size = loop.scheduler.config.block_size
        self.clock, self._on_finished, self._on_step = lockstep, on_finished, on_step
        self.front_end = front_end or FrontEnd(ServerFit())
        self.grammars: GrammarCompiler | None = None  # where answers may have a required shape
        lockstep.join(self)

    def add(self, request: Request) -> None:
        """Accept `request` now, through the front end."""
        self.expect(request)
        if not self.is_dead:
            self.front_end.pass_in(self.clock.env, request, self._enter)

    def _enter(self, request: Request) -> None:
        if request.status is not RequestStatus.ABORTED and not self.is_dead:
            delay = 0 if self.grammars is None else self.grammars.delay(request, self.clock.env.ticks)
            if delay:
                request.awaits_grammar = True
                Alarm(self.clock.env, delay, lambda _: self._has_grammar(request), ARRIVAL_PRIORITY)
            self.clock.enter(self, request)

    def _has_grammar(self, request: Request) -> None:
        request.awaits_grammar = False
        if not self.is_dead:
            self.retry_waiting()

    def abort(self, request: Request) -> bool:
        """Abort `request`; False if it is finished and on its way to the client."""
        if request.status is RequestStatus.FINISHED:
            return False
        if not self.clock.abort(self, request):
            request.status = RequestStatus.ABORTED  # still in the front end
        self.forget((request,))
        return True

    def drop(self, request: Request) -> None:
        """Free `request`, whose KV transfer was cancelled."""
        self.clock.abort(self, request)

    def die(self) -> None:
        """Fail undetected and lose all state: requests sent here wait until aborted.

        As with an abort, running and planned steps still compute their tokens."""
        self.is_dead, scheduler = True, self.loop.scheduler
        for request in [*scheduler.running, *scheduler.waiting, *scheduler.detached.values()]:
            if request.keeps_blocks and request.status is RequestStatus.FINISHED:
                scheduler.release(request)
            self.clock.abort(self, request)

    def expect(self, request: Request) -> None:
        """Count `request` in the load that routers see."""
        self.num_outstanding += 1
        self.num_prompt_blocks += -(-request.num_prompt_tokens // self.block_size)

    def forget(self, requests: Sequence[Request]) -> None:
        """Stop counting `requests`."""
        self.num_outstanding -= len(requests)
        for request in requests:
            self.num_prompt_blocks -= -(-request.num_prompt_tokens // self.block_size)
        self._say_less()

    def _say_less(self) -> None:
        if self._watchers:
            for on_less in self._watchers:
                on_less(self.index)

    def watch(self, on_less: Callable[[int], None]) -> None:
        """Call `on_less(index)` when requests are forgotten or kept blocks released."""
        self._watchers.append(on_less)

    def delay_out(self, batch: int) -> int:
        """Ticks from the end of a step that sampled for `batch` sequences until clients have the tokens."""
        return self.front_end.delay_out(batch)

    @property
    def plan(self) -> StepPlan:
        """Plan of the running step; within `on_step`, of the step that has ended."""
        return self.clock.plan_of(self)

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests, none on their way, and no KV to be fetched."""
        return not (self.num_outstanding or self.loop.scheduler.detached or self.loop.has_requests)

    @property
    def num_used_blocks(self) -> int:
        """KV blocks of requests that run, wait with their KV, or are finished and keep it."""
        self.clock.finalize()
        return self.loop.scheduler.blocks.num_used

    def slow_down(self, factor: float) -> None:
        """Multiply step durations by `factor` from the next step on."""
        self.clock.slow_down(factor)

    def await_kv(self, request: Request, on_load: Callable[[Request], None]) -> None:
        """Accept `request` with KV elsewhere: `on_load(request)` once it has blocks; `finish_load` must follow."""
        self.expect(request)
        if not self.is_dead:
            self.loop.on_load = on_load
            self.clock.enter(self, request)

    def finish_load(self, request: Request) -> None:
        """The KV of `request` has arrived."""
        self.loop.scheduler.finish_load(request)
        self.clock.reschedule()

    def retry_waiting(self) -> None:
        """KV has reached the host that a waiting request may need: schedule again."""
        self.loop.scheduler.retry_waiting()
        self.clock.reschedule()

    def release(self, request: Request) -> None:
        """Free the KV blocks kept by a finished `request`, and schedule again."""
        self.loop.scheduler.release(request)
        self.clock.reschedule()
        self._say_less()

    def end_step(self, record: StepRecord, finished: list[Request]) -> None:
        """Report a finished step or leap and its `finished` requests."""
        self._on_step(self, record)
        if not finished:
            return
        self.forget(finished)
        for request in finished:
            self.front_end.deliver(request)
            self._on_finished(self, request)


class Replica:
    """One copy of the model for fleets and routers: the sum of its data-parallel ranks, usually one."""

    def __init__(self, ranks: Sequence[EngineRank]) -> None:
        self.index = ranks[0].index
        self.block_size = ranks[0].block_size
        self.ranks = tuple(ranks)

    @property
    def num_outstanding(self) -> int:
        """Requests waiting, running or on their way here."""
        return sum([rank.num_outstanding for rank in self.ranks])

    @property
    def num_prompt_blocks(self) -> int:
        """KV blocks of their prompts."""
        return sum([rank.num_prompt_blocks for rank in self.ranks])

    def watch(self, on_less: Callable[[int], None]) -> None:
        """Call `on_less(index)` whenever a rank's load falls."""
        for rank in self.ranks:
            rank.watch(lambda _: on_less(self.index))
