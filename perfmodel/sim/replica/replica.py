"""`EngineRank`: one engine on the simulated clock, with the server in front of it; `Replica`: those of one replica.

Its steps are taken by a `Lockstep`, alone or beside the other ranks of a data-parallel group.
"""

from collections.abc import Callable, Sequence

from perfmodel.cost.calibrations.engine_profile import ServerFit
from perfmodel.engine import Request, RequestStatus, ServeLoop, StepPlan, StepRecord
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, to_ticks
from perfmodel.sim.replica.lockstep import Lockstep


class FrontEnd:
    """The server before and after one engine: HTTP, tokenisation, streaming. Time that no step knows of.

    It delays requests on their way in, and knows when their tokens reach the client.
    """

    def __init__(self, server: ServerFit) -> None:
        self._in = to_ticks(server.in_s)
        self._in_per_token = to_ticks(server.in_per_prompt_token_s)
        self._out = to_ticks(server.out_s)
        self._out_per_sequence = to_ticks(server.out_per_sequence_s)
        self._tokenizer_free_at = 0

    def delay(self, request: Request, now: int) -> int:
        """Ticks until a request that arrives now is with the engine; one is tokenised after the other."""
        self._tokenizer_free_at = max(self._tokenizer_free_at, now) + self._in_per_token * request.num_prompt_tokens
        return self._tokenizer_free_at - now + self._in

    def delay_out(self, batch: int) -> int:
        """Ticks from the end of a step that sampled a token for `batch` sequences until clients have them."""
        return self._out + self._out_per_sequence * batch

    def deliver(self, request: Request) -> None:
        """Move a finished request's times from when its tokens were sampled to when the client had them."""
        assert request.first_token_at is not None
        assert request.finished_at is not None
        request.first_token_at += self.delay_out(request.first_token_batch)
        request.finished_at += self.delay_out(request.last_token_batch)


class EngineRank:
    """An engine under simulated time.

    lockstep:    the clock of this engine and those that step with it; index: its number in the cluster
    loop, front_end: its serve loop; the HTTP server in front, if there is one
    on_finished: called with (replica, request) for each request that is done, before the next step is planned; its
                 times are those of the client if there is a front end
    on_step:     called with (replica, record) for each step or leap that has ended
    """

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
        self.num_outstanding = 0  # requests that wait or run here, or are on their way, and the blocks of their prompts
        self.num_prompt_blocks = 0
        self.is_dead = False  # failed, not yet detected
        self._watchers: list[Callable[[int], None]] = []
        self.block_size = loop.scheduler.config.block_size
        self._lockstep, self._front_end, self._on_finished, self._on_step = lockstep, front_end, on_finished, on_step
        lockstep.join(self)

    def add(self, request: Request) -> None:
        """`request` arrives now, at the front end if there is one."""
        self.expect(request)
        if self.is_dead:
            return
        env = self._lockstep.env
        delay = self._front_end.delay(request, env.ticks) if self._front_end is not None else 0

        def enter(_: object) -> None:
            if request.status is not RequestStatus.ABORTED and not self.is_dead:
                self._lockstep.enter(self, request)

        if delay:
            Alarm(env, delay, enter, ARRIVAL_PRIORITY)
        else:
            enter(None)

    def abort(self, request: Request) -> bool:
        """`request`, which was added here, gives up; False if it is done, and on its way to the client."""
        if request.status is RequestStatus.FINISHED:
            return False
        if not self._lockstep.abort(self, request):
            request.status = RequestStatus.ABORTED  # still in the front end
        self.forget((request,))
        return True

    def drop(self, request: Request) -> None:
        """The KV of `request`, which has blocks for it, is not coming."""
        self._lockstep.abort(self, request)

    def die(self) -> None:
        """It fails undetected and loses all that it has: what is sent here, or was, waits in vain until it is aborted.

        As with an abort, a step that runs or is planned computes its tokens in vain.
        """
        self.is_dead, scheduler = True, self.loop.scheduler
        for request in [*scheduler.running, *scheduler.waiting, *scheduler.detached.values()]:
            if request.keeps_blocks and request.status is RequestStatus.FINISHED:
                scheduler.release(request)
            self._lockstep.abort(self, request)

    def expect(self, request: Request) -> None:
        """`request` counts here from now on, for routers."""
        self.num_outstanding += 1
        self.num_prompt_blocks += -(-request.num_prompt_tokens // self.block_size)

    def forget(self, requests: Sequence[Request]) -> None:
        """They do not count here any more."""
        self.num_outstanding -= len(requests)
        for request in requests:
            self.num_prompt_blocks -= -(-request.num_prompt_tokens // self.block_size)
        self._say_less()

    def _say_less(self) -> None:
        if self._watchers:
            for on_less in self._watchers:
                on_less(self.index)

    def watch(self, on_less: Callable[[int], None]) -> None:
        """Call `on_less` with `index` whenever requests are forgotten, or kept blocks released."""
        self._watchers.append(on_less)

    def delay_out(self, batch: int) -> int:
        """Ticks from the end of a step that sampled tokens for `batch` sequences until clients have them."""
        return 0 if self._front_end is None else self._front_end.delay_out(batch)

    @property
    def plan(self) -> StepPlan:
        """The plan of the step in progress; while `on_step` is called, of the one that has ended."""
        return self._lockstep.plan_of(self)

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests, none are on their way, and no KV is to be fetched from it."""
        return not (self.num_outstanding or self.loop.scheduler.detached or self.loop.has_requests)

    @property
    def num_used_blocks(self) -> int:
        """KV blocks in use now, by requests that run, wait with their KV, or are done and keep it."""
        self._lockstep.settle()
        return self.loop.scheduler.blocks.num_used

    def slow_down(self, factor: float) -> None:
        """Its steps take `factor` times as long from the next one on."""
        self._lockstep.slow_down(factor)

    def await_kv(self, request: Request, on_load: Callable[[Request], None]) -> None:
        """`request`, whose KV is elsewhere, arrives now: once it has blocks for it, `on_load` is called `request`,
        and `finish_load` has to follow."""
        self.expect(request)
        if not self.is_dead:
            self.loop.on_load = on_load
            self._lockstep.enter(self, request)

    def finish_load(self, request: Request) -> None:
        """The KV of `request` has come."""
        self.loop.scheduler.finish_load(request)
        self._lockstep.look_again()

    def release(self, request: Request) -> None:
        """The KV blocks that the finished `request` kept are free now: one that waits for them may be let in."""
        self.loop.scheduler.release(request)
        self._lockstep.look_again()
        self._say_less()

    def end_step(self, record: StepRecord, finished: list[Request]) -> None:
        """A step or leap of this engine has ended, and these requests with it."""
        self._on_step(self, record)
        if not finished:
            return
        self.forget(finished)
        for request in finished:
            if self._front_end is not None:
                self._front_end.deliver(request)
            self._on_finished(self, request)


class Replica:
    """One copy of the model as fleets and routers see it: the sum of its data-parallel ranks, mostly a single one."""

    def __init__(self, ranks: Sequence[EngineRank]) -> None:
        self.index = ranks[0].index
        self.block_size = ranks[0].block_size
        self.ranks = tuple(ranks)

    @property
    def num_outstanding(self) -> int:
        """Requests that wait or run here, or are on their way."""
        return sum([rank.num_outstanding for rank in self.ranks])

    @property
    def num_prompt_blocks(self) -> int:
        """KV blocks of their prompts."""
        return sum([rank.num_prompt_blocks for rank in self.ranks])

    def watch(self, on_less: Callable[[int], None]) -> None:
        """Call `on_less` with `index` whenever one of the ranks has less to do."""
        for rank in self.ranks:
            rank.watch(lambda _: on_less(self.index))
