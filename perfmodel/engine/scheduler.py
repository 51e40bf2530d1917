"""The scheduler: which tokens of which requests run in the next step. It knows tokens and blocks, never seconds.

    add(request) -> heap of those that wait, by policy key (admission.py)
                              |
    plan(now):                |  2. _admit: in that order, while slots, budget and blocks last; blocks of a cached
                              v     prefix, or of KV that comes from elsewhere or from a second tier, first
    1. RunningRequests.grant: who runs, a token each or a chunk of its prompt (running.py), within one token budget
         |- DecodeCohort: all who decode, as one; what changes is in calendars of ages (decode_cohort.py)
         '- _grant_in_order: one by one where budget or blocks are short; preempts the largest key
                              |
       KVBlockManager: allocate, publish, free; a cohort's blocks are set aside by their number (kv_blocks.py)
                              |
    apply(plan, now): promised tokens are output tokens; who has its last gives blocks and slot back
    max_repeats(plan) -> repeat, apply_repeated: a leap over equal plans, exactly as one by one (serve_loop.py)

vLLM v1's rules for continuous batching: one token budget; running requests first, in the order they were admitted;
then waiting requests, and none in a step that preempted. There is no prefill and no decode phase, only tokens computed
and tokens to compute.

Counts advance when a plan is *made* (`num_computed_tokens`, `num_promised_tokens`), so the next plan can be made while
this one runs. As lengths are known, none is computed in vain."""

import heapq
from collections.abc import Iterator, Sequence
from operator import attrgetter

from perfmodel.engine.adapters import AdapterSlots
from perfmodel.engine.admission import DISCIPLINES, POLICIES, Reservations
from perfmodel.engine.config import SchedulerConfig
from perfmodel.engine.drafting import DraftingRequests
from perfmodel.engine.grammars import GrammarMasks
from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request, RequestStatus
from perfmodel.engine.running import PipelinedRequests, RunningRequests
from perfmodel.engine.slots import SlottedRequests
from perfmodel.engine.token_watch import TokenWatch

_ADMISSION = attrgetter("admission")
_MANY = 1 << 40  # more requests than are ever preempted
Waiting = tuple[tuple[int, ...], Request]  # by its key


class Scheduler:
    """Plans steps over `blocks` under `config`. Requests enter by `add` and leave by `apply`."""

    def __init__(self, config: SchedulerConfig, blocks: KVBlockManager, watch: TokenWatch | None = None) -> None:
        self.config, self.blocks = config, blocks
        self.num_preemptions = self._num_skipped = 0
        self.num_prefix_tokens_asked = self.num_prefix_tokens_hit = 0
        self._key = POLICIES[config.scheduling_policy]
        self._drafting: DraftingRequests | None = None
        kind = PipelinedRequests if config.pipeline_parallel_size > 1 else RunningRequests
        self._running: RunningRequests = kind(config, blocks, self._requeue)
        if config.speculation is not None:
            self._running = self._drafting = DraftingRequests(config, blocks, self._requeue)
            blocks.rereads_last_block = config.speculation.rereads_last_block
        self._slotted: SlottedRequests | None = None
        if config.slots is not None:
            self._running = self._slotted = SlottedRequests(config, blocks, self._requeue)
        self.adapters = None if config.adapters is None else AdapterSlots(config.adapters)
        self.masks = GrammarMasks() if config.has_shapes else None
        self._num_deferred = 0  # waiting requests that lacked a slot in the last plan
        self.watch = self._running.cohort.watch = watch
        self._discipline = discipline = DISCIPLINES[config.batching]
        self._reservations = Reservations(config, discipline)
        self._max_batch = min(config.max_num_seqs, discipline.max_batch or config.max_num_seqs)
        self._waiting: list[Waiting] = []  # heap by policy key
        self.detached: dict[int, Request] = {}  # hold blocks but neither wait nor run: KV on its way in or out
        self._load_keys: dict[int, tuple[int, ...]] = {}  # queue keys of requests that wait for KV
        # (ticks, count) of gaps between tokens of requests that sat out steps
        self.irregular_gaps: list[tuple[int, int]] = []
        budget = config.max_num_batched_tokens if discipline.uses_budget else config.max_model_len * self._max_batch
        self._budget = budget - self._running.num_input_tokens  # of the last request that a step has room for
        self._next_index = 0
        self._loads_without_slot = False  # KV may start to arrive without a free slot
        self._spares_lone_prompts = config.long_prefill_token_threshold > 0 and not config.caps_lone_prompts
        self._poll_at = 0  # arrivals are looked at in this step and every `poll_every` after it
        self._may_admit = False  # a change since the last plan could admit a waiting request

    # ---------------------------------------------------------------- requests in and out

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_free_slot(self) -> bool:
        return len(self._running.requests) < self._max_batch

    def counts(self) -> tuple[int, int, int]:
        """(running, waiting, used blocks), as in step records."""
        blocks = self.blocks
        return len(self._running.requests), len(self._waiting), blocks.num_blocks - blocks.num_free

    @property
    def running(self) -> Iterator[Request]:
        yield from self._running.requests

    @property
    def waiting(self) -> Iterator[Request]:
        """Waiting requests, unordered."""
        yield from (request for _, request in self._waiting)

    def num_computed(self, request: Request) -> int:
        """Tokens of `request` with KV once the plans made so far have run."""
        return self._running.cohort.num_computed(request)

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> None:
        """Queue `request`. Raises WorkloadError for one that could never run.

        With `num_transferred_tokens` it gets blocks in its turn, is in `loads` of that plan, and waits for
        `finish_load`."""
        self.check_can_ever_run(request)
        entry = self._key(request), request
        heapq.heappush(self._waiting, entry if request.grammar is None else self._skip(*entry))
        self._may_admit = True
        if request.num_transferred_tokens:
            self._loads_without_slot = not self.config.loads_need_slot
        if self.blocks.host is not None and self.blocks.host.prefetches:
            self.blocks.host.prefetch(request, len(self.blocks.cached_prefix(request)))

    def retry_waiting(self) -> None:
        """KV has reached the host, or a grammar is compiled, that a waiting request may need."""
        self._may_admit = True

    def finish_load(self, request: Request, num_tokens: int | None = None) -> None:
        """The KV of `request` has arrived, all or its first `num_tokens`."""
        del self.detached[request.request_id]
        if num_tokens is not None:
            num_here = request.num_hashed_blocks * self.blocks.block_size
            request.num_computed_tokens = min(max(num_tokens, num_here), request.num_computed_tokens)
        if self.blocks.host is not None:
            self.blocks.host.end_load(request)
        heapq.heappush(self._waiting, (self._load_keys.pop(request.request_id), request))
        self._may_admit = True

    def release(self, request: Request) -> None:
        """Free blocks kept by a finished request."""
        if self.detached.pop(request.request_id, None) is None:
            request.keeps_blocks = False  # in an unfinished static batch: freed with the others
            return
        self.blocks.free(request)
        self._may_admit = True

    def abort(self, request: Request) -> bool:
        """Abort `request` in any state; False if it is unknown or finished.

        As in vLLM, running and planned steps still compute its tokens."""
        if request.status is RequestStatus.FINISHED:
            return False
        num_known = None
        if request in self._running.requests:
            self._running.drop(request)
            num_known = self._running.num_known_tokens(request)
        elif not self._withdraw(request):
            return False
        request.status = RequestStatus.ABORTED
        if self._running.encoder is not None:
            self._running.encoder.free(request)
        self.blocks.free(request, num_known)
        if self._discipline.frees_together and self._running:
            self._end_batch()
        self._may_admit = True
        return True

    def forget_all(self) -> None:
        """The engine starts anew, with nothing cached; no request may be here."""
        self.blocks.forget_all()
        if self.adapters is not None:
            self.adapters.start()
        if self._running.encoder is not None:
            self._running.encoder.forget_all()

    def _withdraw(self, request: Request) -> bool:
        """Remove `request` from the queue or KV loads; False if it is in neither."""
        if self.detached.get(request.request_id) is request:
            del self.detached[request.request_id]
            self._load_keys.pop(request.request_id, None)
        else:
            place = next((i for i, (_, waiting) in enumerate(self._waiting) if waiting is request), None)
            if place is None:
                return False
            del self._waiting[place]
            heapq.heapify(self._waiting)
            self._num_deferred = min(self._num_deferred, len(self._waiting))
        if self.blocks.host is not None:
            self.blocks.host.forget(request)
        return True

    def _requeue(self, victim: Request) -> None:
        self.num_preemptions += 1
        # FCFS: the last preempted goes before all others.
        key = (-self.num_preemptions,) if self.config.scheduling_policy == "fcfs" else self._key(victim)
        heapq.heappush(self._waiting, (key, victim))

    def _skip(self, key: tuple[int, ...], request: Request) -> Waiting:
        """New queue entry of a skipped `request`: under FCFS it precedes those not skipped."""
        if self.config.scheduling_policy == "fcfs" and key[0] > -_MANY:
            self._num_skipped += 1
            key = (self._num_skipped - 2 * _MANY,)
        return key, request

    def check_can_ever_run(self, request: Request) -> None:
        """Raise WorkloadError for a request that an empty engine could not serve."""
        self._reservations.check_can_ever_run(request, self.blocks)

    # ---------------------------------------------------------------- planning

    def plan(self, now: int, admits: bool = True) -> StepPlan:
        """The next step at time `now`; empty when nothing can run. Without `admits`, no request is admitted."""
        plan, budget = StepPlan(self._next_index), self._budget
        if not (self._running.has_ready or self._waiting):
            return plan
        is_polled = (plan.index - self._poll_at) % self.config.poll_every == 0 or not self._running.requests
        exclusive = self.config.prefill_exclusive
        if self._spares_lone_prompts:
            self._running.caps_prompts = len(self._running) + self.num_waiting > 1
        slotted = None if self._loads_without_slot else self._slotted  # transferred requests wait like others
        if slotted is not None and admits and self._waiting:
            self._fill_slots(slotted, now)
        budget = self._running.grant(plan, budget, decodes=not exclusive)
        # Last: until here a grant and its blocks could be taken back.
        if plan.chunks or plan.singles or plan.resumed:
            for request in [grant.request for grant in plan.chunks] + plan.singles + plan.resumed:
                self.blocks.publish(request)
        num_joined = 0
        if admits and slotted is None and is_polled and self._waiting and not plan.preempted and self._may_join(now):
            num_joined = self._admit(plan, budget, now)
        if exclusive:
            if plan.chunks or len(plan.singles) > num_joined:
                plan.is_complete = False  # decodes stand still while prompts are computed
            else:
                budget = self._running.grant(plan, budget)
        self._sum_up(plan)
        if self.adapters is not None:
            self.adapters.load(plan)
        if self.masks is not None:
            self.masks.count(plan)
        self._running.previous = plan
        self._may_admit = self.num_waiting > 0 and (not is_polled or (not admits and self.has_free_slot))
        if plan.decodes or plan.chunks:
            self._next_index += 1
            self.blocks.finalize(plan)
            self._running.send_out(plan)
        if plan.chunks or plan.singles:  # after prompts the next step looks (sglang, SchedulerRecvSkipper)
            self._poll_at = self._next_index
        return plan

    def next_wakeup(self, now: int) -> int | None:
        """End of a batch's wait: when an idle scheduler should plan again without an arrival."""
        if not self._discipline.waits_to_fill or self._running or not self._waiting:
            return None
        end = self._oldest_arrival() + self.config.batch_timeout
        return end if end > now else None  # afterwards only blocks held elsewhere can be missing

    def _oldest_arrival(self) -> int:
        return min(request.arrival for _, request in self._waiting)

    def _may_join(self, now: int) -> bool:
        discipline = self._discipline
        if discipline.joins_running or self._running:
            return discipline.joins_running
        is_full = len(self._waiting) >= self._max_batch
        return not discipline.waits_to_fill or is_full or now >= self._oldest_arrival() + self.config.batch_timeout

    def _admit(self, plan: StepPlan, budget: int, now: int) -> int:
        """Admit waiting requests in policy order until one does not fit; return how many have KV and decode."""
        blocks, config, host, num_joined = self.blocks, self.config, self.blocks.host, 0
        skipped: list[Waiting] = []
        adapters, encoder = self.adapters, self._running.encoder
        scheduled: set[int] = set() if adapters is None else adapters.scheduled(plan, self._running.cohort.members)
        while self._waiting and budget > 0 and self._running.has_place(plan, self._max_batch):
            key, request = self._waiting[0]
            # Its grammar, or work in flight for it, must come first.
            must_wait = request.awaits_grammar or (
                request.status is RequestStatus.PREEMPTED and self._running.is_under_way(request)
            )
            if must_wait or (adapters is not None and not adapters.admits(request, scheduled)):
                heapq.heappop(self._waiting)
                skipped.append(self._skip(key, request))
                continue
            has_come = bool(request.num_transferred_tokens and request.block_ids) and self._take_load(request)
            if has_come:
                cached: list[int] = []
                num_cached = num_ready = min(request.num_computed_tokens, request.num_tokens - 1)
            else:
                cached = blocks.cached_prefix(request)
                num_cached = num_ready = len(cached) * blocks.block_size
                if request.num_transferred_tokens > num_cached:
                    if not self._begin_load(self._waiting[0], cached, plan):
                        break
                    continue
                if host is not None:
                    if host.can_wait and host.must_wait(request, num_cached, blocks.block_size):
                        heapq.heappop(self._waiting)
                        skipped.append(self._skip(key, request))
                        continue
                    num_ready = host.num_ready(request, num_cached, blocks.block_size)
                    if host.is_async and num_ready > num_cached:
                        request.num_transferred_tokens = num_ready
                        if self._begin_load(self._waiting[0], cached, plan):
                            continue
                        request.num_transferred_tokens = 0
                        break
            missing = request.num_tokens - num_ready
            padding = self._running.padding(plan, num_ready) if missing == 1 else 0
            if padding >= budget:
                break
            if config.keeps_kv:
                missing = self._running.chunk(missing, missing)
            if missing > budget and not (config.enable_chunked_prefill and config.keeps_kv):
                break
            missing = min(missing, budget)
            encoded: Sequence[int] = ()
            if encoder is not None and request.encoder_inputs:
                missing, encoded = encoder.fit(request, num_ready, missing, plan)
                if not missing:
                    break
            reserved = self._reservations.num_tokens(request, num_ready + missing + padding)
            num_whole = request.num_tokens if config.scheduler_reserve_full_isl else 0
            if has_come:
                has_room = blocks.can_allocate(request, max(reserved, num_whole))
            else:
                has_room = blocks.can_admit(request, reserved, num_whole, cached)
            if not has_room:
                if encoder is not None:
                    encoder.free(request)
                break
            heapq.heappop(self._waiting)
            blocks.allocate(request, reserved, cached)
            if not has_come:
                self._count_prefix(request, num_ready)
                if host is not None:
                    plan.num_restored_blocks += host.restore(request, num_cached, num_ready, blocks.block_size)
                    plan.num_restored_tokens += num_ready - num_cached
                if request.num_transferred_tokens:
                    plan.loads += (request,)
                    request.num_transferred_tokens = 0
            num_joined += has_come and missing == 1
            budget -= missing + padding + self._running.num_input_tokens
            self._enter(request, num_ready, missing, plan, now)
            if request.adapter is not None:
                scheduled.add(request.adapter)
            if encoded and encoder is not None:
                encoder.encode(request, encoded, plan)
            if padding and self._drafting is not None:
                self._drafting.pad(request, padding, plan)
            blocks.publish(request)
        for entry in skipped:
            heapq.heappush(self._waiting, entry)
        if self._loads_without_slot and not self._running.has_place(plan, self._max_batch):
            self._begin_loads(plan)
        if not (plan or self._running.requests or self.detached) and self._put_loaded_first():
            return self._admit(plan, budget, now)
        return num_joined

    def _fill_slots(self, slotted: SlottedRequests, now: int) -> None:
        """Assign free slots before the step grants tokens.

        Each freed slot calls the longest waiting request, ahead of those called before: of several slots freed by one
        step the last call comes first, then new arrivals."""
        num_free = self._max_batch - len(slotted.requests)
        called = [heapq.heappop(self._waiting) for _ in range(min(num_free, len(self._waiting)))]
        num_deferred = min(self._num_deferred, len(called))
        called[:num_deferred] = reversed(called[:num_deferred])
        for place, (_, request) in enumerate(called):
            wanted = self._reservations.num_tokens(request, request.num_tokens)
            if not self.blocks.can_allocate(request, wanted):
                for entry in called[place:]:
                    heapq.heappush(self._waiting, entry)
                break
            self.blocks.allocate(request, wanted)
            num_ready = slotted.take_slot(request)
            self._count_prefix(request, num_ready)
            request.first_scheduled_at, request.num_cached_tokens = now, num_ready
            request.status = RequestStatus.RUNNING
        self._num_deferred = len(self._waiting)

    def _count_prefix(self, request: Request, num_hit: int) -> None:
        self.num_prefix_tokens_asked += request.num_tokens
        self.num_prefix_tokens_hit += num_hit

    def _put_loaded_first(self) -> bool:
        """Nothing runs because requests with arrived KV hold the blocks: run the first of these; False if none. (vLLM
        waits for ever.)"""
        loaded = [entry for entry in self._waiting if entry[1].block_ids]
        if not loaded or self._waiting[0][1].block_ids:
            return False
        first = min(loaded)
        self._waiting.remove(first)
        self._waiting.append(((-3 * _MANY,), first[1]))
        heapq.heapify(self._waiting)
        return True

    def _begin_loads(self, plan: StepPlan) -> None:
        """Allocate for KV that can arrive while its request waits for a slot, in queue order."""
        blocks = self.blocks
        for entry in sorted(self._waiting):
            request = entry[1]
            if request.num_transferred_tokens and not request.block_ids:
                cached = blocks.cached_prefix(request)
                is_here = request.num_transferred_tokens <= len(cached) * blocks.block_size
                if not (is_here or self._begin_load(entry, cached, plan)):
                    return

    def _enter(self, request: Request, num_ready: int, num_new_tokens: int, plan: StepPlan, now: int) -> None:
        """Make `request`, whose first `num_ready` tokens have KV, a running one."""
        if request.first_scheduled_at is None:
            request.first_scheduled_at, request.num_cached_tokens = now, num_ready
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_ready
        self._running.admit(request, num_new_tokens, plan)

    def _begin_load(self, entry: Waiting, cached: list[int], plan: StepPlan) -> bool:
        """Allocate blocks for a waiting request's KV beyond `cached` and start its load; False if too few are free
        beside those that started prompts and loads still need."""
        request = entry[1]
        blocks, total = self.blocks, min(request.num_transferred_tokens, request.num_tokens)
        reserved = self._reservations.num_tokens(request, total, is_load=True)
        num_whole = request.num_tokens if self.config.scheduler_reserve_full_isl else 0
        if not blocks.can_admit(request, reserved, num_whole, cached):
            return False
        begun = [other for other in self.detached.values() if other.request_id in self._load_keys]
        begun += [other for _, other in self._waiting if other.block_ids]
        others = sum([max(blocks.num_needed(other, other.num_tokens), 0) for other in begun])
        others += self._running.num_reserved_blocks()
        if others and not blocks.can_allocate(request, reserved + others * blocks.block_size, cached):
            return False
        self._waiting.remove(entry)
        heapq.heapify(self._waiting)
        key, _ = self._skip(*entry)
        blocks.allocate(request, reserved, cached)
        num_cached, host = len(cached) * blocks.block_size, blocks.host
        if host is not None:
            host.restore(request, num_cached, total, blocks.block_size)
        self._count_prefix(request, num_cached if host is None else total)
        request.num_computed_tokens = total
        self.detached[request.request_id], self._load_keys[request.request_id] = request, key
        plan.loads += (request,)
        return True

    def _take_load(self, request: Request) -> bool:
        """Publish the KV of `request`; False if none has arrived, so that it waits like any other."""
        if request.num_computed_tokens:
            self.blocks.publish(request)
            return True
        request.num_transferred_tokens = 0
        self.blocks.free(request, 0)
        return False

    def _sum_up(self, plan: StepPlan) -> None:
        """Enter decodes and their context into `plan`."""
        cohort, alone, spans = self._running.cohort, plan.singles, self.config.spans
        if plan.cohort_age and not (alone or spans or self.config.record_positions):  # nearly always
            plan.decodes, plan.decode_context = cohort.members, cohort.context
            return
        if plan.cohort_age:
            plan.decodes = [*cohort.members, *alone] if alone else cohort.members
            context, windowed = cohort.context, cohort.windowed
        else:
            plan.decodes += alone
            if plan.draft_depths:
                plan.draft_depths += [0] * len(alone)
            alone, context, windowed = plan.decodes, 0, [0] * len(spans)
        plan.decode_context = context + sum([request.num_computed_tokens for request in alone])
        plan.decode_windowed = tuple(
            total + sum([min(request.num_computed_tokens, span) for request in alone])
            for total, span in zip(windowed, spans, strict=True)
        )
        if self.config.record_positions:
            cohort.hand_out_blocks()
            plan.positions = [cohort.num_computed(request) - 1 for request in plan.decodes]
            granted = [*plan.decodes, *(grant.request for grant in plan.chunks)]
            plan.block_tables = {request.request_id: list(request.block_ids) for request in granted}

    # ---------------------------------------------------------------- what came of a plan

    def apply(self, plan: StepPlan, now: int, num_accepted: Sequence[int] | None = None) -> list[Request]:
        """Apply tokens sampled by `plan`, ended at `now`, and `num_accepted` drafts; return finished requests."""
        cohort, watch = self._running.cohort, self.watch
        if self._drafting is not None:
            num_accepted = self._drafting.leave_out_ended(plan, num_accepted)
            if plan.draft_depths:
                assert num_accepted is not None, "the backend did not say which drafted tokens were right"
                self._drafting.take_accepted(plan, num_accepted)
        plan.num_gaps = plan.num_samples - plan.note_uneven(now, cohort.last_token_at, self.irregular_gaps)
        self._running.come_back(plan)
        if self._running.encoder is not None and self._running.encoder.release(plan):
            self._may_admit = True
        finished, alone = (cohort.apply(plan, now), plan.singles) if cohort.covers(plan) else ([], plan.decodes)
        samples = plan.samples
        if self.config.encoder is not None and self.config.encoder.is_alone:
            alone = [request for request in alone if request.status is RequestStatus.RUNNING]
            granted = [grant.request for grant in plan.chunks if grant.request.num_promised_tokens]
            samples = [request for request in granted if request.status is RequestStatus.RUNNING]
        for sampled in (alone, samples):
            for request in sampled:
                request.num_output_tokens = count = request.num_output_tokens + 1
                if watch is not None:
                    watch.take(request, now)
                request.last_token_at = now
                if request.first_token_at is None:  # a transferred request's first token leaves with its second
                    request.first_token_at = now
                    request.first_token_batch = plan.num_samples
                if count == request.max_output_tokens:
                    finished.append(request)
        if finished:
            finished = [request for request in finished if request.status is not RequestStatus.ABORTED]
            if len(finished) > 1:
                finished.sort(key=_ADMISSION)  # order in which blocks are freed
            for request in finished:
                request.finished_at, request.last_token_batch = now, plan.num_samples
                request.status = RequestStatus.FINISHED
            if self._discipline.frees_together:
                self._end_batch()
            else:
                self._free(finished)
        return finished

    def _end_batch(self) -> None:
        """Free slots and blocks of a finished static batch."""
        if all(request.status is RequestStatus.FINISHED for request in self._running.requests):
            self._free(list(self._running.requests))

    def _free(self, finished: list[Request]) -> None:
        for request in finished:
            num_known = None
            if request in self._running.requests:
                num_known = self._running.num_known_tokens(request)
                self._running.leave(request)
            else:  # preempted with its last token in flight
                self._withdraw(request)
            if request.keeps_blocks:
                self.detached[request.request_id] = request
            else:
                if request.turn >= 0:  # the answer is in the next turn's prompt
                    self.blocks.publish(request)
                self.blocks.free(request, num_known)
        self._may_admit = True

    def publish_answers(self) -> None:
        """Cache blocks filled by answers now, not at their end (vLLM)."""
        self._running.publish_answers()

    # ---------------------------------------------------------------- many equal steps at once

    def max_repeats(self, plan: StepPlan) -> int:
        """Lower bound on plans equal to `plan`, the last one made, that follow without an arrival.

        Equal: the same requests, one token each. Zero if `plan` starts, resumes, preempts or omits a running request,
        or if a waiting request might be admitted after it."""
        cohort = self._running.cohort
        if not (plan.is_plain and plan.is_complete and cohort.covers(plan)):
            return 0
        repeats, num_free = cohort.num_steps_unchanged, self.blocks.num_free_unawaited
        if self._may_admit and self.num_waiting:  # up to the plan in which they are looked at
            repeats = min(repeats, (self._poll_at - self._next_index) % self.config.poll_every)
        if self.blocks.gives_up_rows and self.num_waiting and self.has_free_slot:
            repeats = min(repeats, cohort.num_steps_before_release)  # what is given up may let a request in
        size, most_per_block = self.blocks.block_size, len(cohort.joined) * self.blocks.most_weight
        return repeats if -(-repeats // size) * most_per_block <= num_free else num_free // most_per_block * size

    @property
    def num_growing(self) -> tuple[int, ...]:
        """Decodes that have not filled each span: growth of its sum per repeated step."""
        return tuple(self._running.cohort.growing)

    def repeat(self, plan: StepPlan, times: int) -> None:
        """Turn `plan` into the last of `times` more calls of `plan()`."""
        self._running.cohort.repeat(plan, times)
        self._next_index += times
        plan.index += times
        self._sum_up(plan)

    def apply_repeated(self, plan: StepPlan, times: int, now: int) -> None:
        """As `times` calls of `apply` for equal plans that finish no request, the last at `now`."""
        plan.num_gaps = len(plan.decodes)
        self._running.come_back(plan)
        self._running.cohort.apply_repeated(times, now)
