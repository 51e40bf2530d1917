"""The scheduler: which tokens of which requests run in the next step. It knows tokens and blocks, never seconds.

vLLM v1's rules for continuous batching: one token budget; running requests first, in the order they were admitted;
if blocks run out, the running request with the largest policy key is preempted and later recomputed; then waiting
requests, in policy order, while slots, budget and blocks last, and none in a step that preempted. There is no prefill
and no decode phase, only tokens computed and tokens to compute.

Counts advance when a plan is *made* (`num_computed_tokens`, `num_promised_tokens`), so the next plan can be made while
this one runs; `apply` then turns promised tokens into output tokens. With known output lengths nothing is ever
computed in vain.
"""

__all__ = ["Scheduler"]

import heapq
from collections.abc import Iterator

from perfmodel.engine.batching import DISCIPLINES
from perfmodel.engine.config import SchedulerConfig
from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.plan import Grant, StepPlan
from perfmodel.engine.policies import POLICIES
from perfmodel.engine.request import Request, RequestStatus
from perfmodel.errors import WorkloadError


class Scheduler:
    """Plans steps over `blocks` under `config`. Requests enter by `add` and leave by `apply`."""

    def __init__(self, config: SchedulerConfig, blocks: KVBlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0
        self.num_prefix_tokens_asked = 0
        self.num_prefix_tokens_hit = 0
        self._key = POLICIES[config.scheduling_policy]
        self._discipline = DISCIPLINES[config.batching]
        self._max_batch = min(config.max_num_seqs, self._discipline.max_batch or config.max_num_seqs)
        self._waiting: list[tuple[tuple[int, ...], Request]] = []  # heap by policy key
        self.irregular_gaps: list[int] = []  # ticks between two tokens of a request that sat out steps in between
        self._budget = (
            config.max_num_batched_tokens if self._discipline.uses_budget else config.max_model_len * self._max_batch
        )
        self._next_index = 0
        self._may_admit = False  # something happened since the last plan that could let a waiting request in

    # ---------------------------------------------------------------- requests in and out

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Iterator[Request]:
        """Waiting requests, in no particular order."""
        return (request for _, request in self._waiting)

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, request: Request) -> None:
        """Queue `request`. Raises WorkloadError for one that could never run."""
        self._check_can_ever_run(request)
        heapq.heappush(self._waiting, (self._key(request), request))
        self._may_admit = True

    def _check_can_ever_run(self, request: Request) -> None:
        config, blocks = self.config, self.blocks
        longest = request.num_prompt_tokens + request.max_output_tokens - 1  # the last token sampled is never computed
        if longest > config.max_model_len:
            raise WorkloadError(
                f"request {request.request_id} needs {longest} tokens ({request.num_prompt_tokens} of prompt), above "
                f"max_model_len={config.max_model_len}; raise it or shorten the request"
            )
        is_whole = self._discipline.uses_budget and not config.enable_chunked_prefill
        at_once = request.num_prompt_tokens if config.reserves_output else longest  # it may be recomputed in whole
        if is_whole and at_once > config.max_num_batched_tokens:
            raise WorkloadError(
                f"request {request.request_id} may have to compute {at_once} tokens at once, above "
                f"max_num_batched_tokens={config.max_num_batched_tokens}; raise it or set enable_chunked_prefill"
            )
        most = config.max_model_len if self._discipline.reserves_all else longest
        if -(-most // blocks.block_size) > blocks.num_blocks:
            raise WorkloadError(
                f"request {request.request_id} needs KV blocks for {most} tokens, but the pool has {blocks.num_blocks} "
                f"blocks of {blocks.block_size}; shorten it, or give the KV cache more memory"
            )

    # ---------------------------------------------------------------- planning

    def plan(self, now: int) -> StepPlan:
        """The next step at time `now`; an empty plan when nothing can run."""
        plan, budget = StepPlan(self._next_index), self._budget
        is_polled = plan.index % self.config.poll_every == 0 or not self.running
        exclusive = self.config.prefill_exclusive
        budget = self._grant_running(plan, budget, decodes=not exclusive)
        # Only now: until here a grant could still be taken back, and its blocks with it.
        for request in [grant.request for grant in plan.chunks] + plan.resumed:
            self.blocks.publish(request)
        if is_polled and self._waiting and not plan.preempted and self._may_join(now):
            self._admit(plan, budget, now)
        if exclusive:
            if plan:
                plan.is_complete = False  # decodes stand still while prompts are computed
            else:
                self._grant_running(plan, budget)
        self._sum_contexts(plan)
        self._may_admit = not is_polled and bool(self._waiting)
        if plan:
            self._next_index += 1
        return plan

    def next_wakeup(self, now: int) -> int | None:
        """When an idle scheduler should be asked again although nothing arrives: the end of a batch's wait."""
        if not self._discipline.waits_to_fill or self.running or not self._waiting:
            return None
        return max(self._oldest_arrival() + self.config.batch_timeout, now)

    def _oldest_arrival(self) -> int:
        return min(request.arrival for _, request in self._waiting)

    def _grant_running(self, plan: StepPlan, budget: int, decodes: bool = True) -> int:
        """Grant the running requests their next tokens, in order; returns what is left of the budget.

        Without `decodes`, only prompts (and sequences to recompute) are continued.
        """
        index, block_size, granted = plan.index, self.blocks.block_size, plan.decodes
        running = RequestStatus.RUNNING
        for request in tuple(self.running):
            promised = request.num_promised_tokens
            if promised == request.max_output_tokens or request.status is not running:
                continue  # its last token is in flight, or it was preempted a moment ago
            computed = request.num_computed_tokens
            missing = request.num_prompt_tokens + promised - computed
            if missing == 1 and not decodes:
                continue
            if budget <= 0:
                plan.is_complete = False
                continue
            if missing > 1:
                missing = self._chunk(missing, budget)
            if computed + missing > len(request.block_ids) * block_size:
                given_back = self._make_room(request, computed + missing, plan)
                if given_back is None:
                    continue  # the request itself was the one to give way
                budget += given_back
                self.blocks.allocate(request, computed + missing)
            budget -= missing
            if missing == 1 and computed + 1 == request.num_prompt_tokens + promised:
                request.num_computed_tokens = computed + 1
                request.num_promised_tokens = promised + 1
                granted.append(request)
                if not promised or request.last_step != index - 1:
                    plan.resumed.append(request)
                request.last_step = index
            else:
                self._grant_chunk(request, missing, plan)
        return budget

    def _chunk(self, missing: int, budget: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < missing:
            missing = threshold
        return min(missing, budget)

    def _grant_chunk(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        """Grant tokens that are not a plain decode step: all or part of a prompt, or of a sequence to recompute."""
        plan.chunks.append(Grant(request, request.num_computed_tokens, num_new_tokens))
        plan.num_chunk_tokens += num_new_tokens
        request.num_computed_tokens += num_new_tokens
        if request.num_computed_tokens == request.num_tokens:
            request.num_promised_tokens += 1
            plan.samples.append(request)
        if request.last_step != plan.index - 1:
            plan.resumed.append(request)
        request.last_step = plan.index

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> int | None:
        """Preempt until `request` can hold `num_tokens`: the granted tokens taken back, or None if it fell itself."""
        given_back = 0
        while not self.blocks.can_allocate(request, num_tokens):
            # A request whose last token is in flight frees its blocks by itself, and has nothing left to recompute.
            candidates = (r for r in self.running if r.num_promised_tokens < r.max_output_tokens or r is request)
            victim = max(candidates, key=self._key)
            given_back += self._preempt(victim, plan)
            if victim is request:
                return None
        return given_back

    def _preempt(self, victim: Request, plan: StepPlan) -> int:
        """Send `victim` back to wait, to be recomputed; returns the tokens that `plan` had granted it."""
        given_back = 0
        if victim.last_step == plan.index:
            if victim in plan.decodes:
                plan.decodes.remove(victim)
                given_back = 1
                victim.num_promised_tokens -= 1
            for grant in [g for g in plan.chunks if g.request is victim]:
                plan.chunks.remove(grant)
                plan.num_chunk_tokens -= grant.num_new_tokens
                given_back += grant.num_new_tokens
            if victim in plan.samples:
                plan.samples.remove(victim)
                victim.num_promised_tokens -= 1
            if victim in plan.resumed:
                plan.resumed.remove(victim)
        self.blocks.free(victim)
        self.running.remove(victim)
        victim.num_computed_tokens = 0
        victim.last_step = -1
        victim.num_preemptions += 1
        victim.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        plan.preempted.append(victim)
        heapq.heappush(self._waiting, (self._key(victim), victim))
        return given_back

    def _may_join(self, now: int) -> bool:
        discipline = self._discipline
        if discipline.joins_running:
            return True
        if self.running:
            return False
        is_full = len(self._waiting) >= self._max_batch
        return not discipline.waits_to_fill or is_full or now >= self._oldest_arrival() + self.config.batch_timeout

    def _admit(self, plan: StepPlan, budget: int, now: int) -> None:
        """Let waiting requests in, in policy order, until the first that does not fit."""
        blocks, config = self.blocks, self.config
        while self._waiting and budget > 0 and len(self.running) < self._max_batch:
            request = self._waiting[0][1]
            cached = blocks.cached_prefix(request)
            num_cached = len(cached) * blocks.block_size
            missing = request.num_tokens - num_cached
            if missing > budget and not config.enable_chunked_prefill:
                break
            if missing > 1:
                missing = self._chunk(missing, budget)
            reserved = self._reservation(request, num_cached + missing)
            must_fit = max(reserved, request.num_tokens) if config.scheduler_reserve_full_isl else reserved
            if not blocks.can_allocate(request, must_fit, cached):
                break
            heapq.heappop(self._waiting)
            blocks.allocate(request, reserved, cached)
            self.running.append(request)
            self.num_prefix_tokens_asked += request.num_tokens
            self.num_prefix_tokens_hit += num_cached
            if request.first_scheduled_at is None:
                request.first_scheduled_at = now
                request.num_cached_tokens = num_cached
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_cached
            budget -= missing
            if missing == 1 and num_cached + 1 == request.num_tokens:
                request.num_computed_tokens += 1
                request.num_promised_tokens += 1
                request.last_step = plan.index
                plan.decodes.append(request)
                plan.resumed.append(request)
            else:
                self._grant_chunk(request, missing, plan)
            blocks.publish(request)

    def _reservation(self, request: Request, needed: int) -> int:
        """Tokens that a request is given blocks for when it joins; `needed` now."""
        if self._discipline.reserves_all:
            return self.config.max_model_len
        if self.config.reserves_output:
            return request.num_prompt_tokens + request.max_output_tokens - 1
        return needed

    def _sum_contexts(self, plan: StepPlan) -> None:
        decodes = plan.decodes
        plan.decode_context = sum([request.num_computed_tokens for request in decodes])
        if self.config.spans:
            plan.decode_windowed = tuple(
                sum([min(request.num_computed_tokens, span) for request in decodes]) for span in self.config.spans
            )
        if self.config.record_positions:
            plan.positions = [request.num_computed_tokens - 1 for request in decodes]
            granted = [*decodes, *(grant.request for grant in plan.chunks)]
            plan.block_tables = {request.request_id: list(request.block_ids) for request in granted}

    # ---------------------------------------------------------------- what came of a plan

    def apply(self, plan: StepPlan, now: int) -> list[Request]:
        """Take the tokens that `plan` has sampled by `now`; returns the requests that are done."""
        finished: list[Request] = []
        # A token that does not end a plain gap: the first, and one after steps that the request sat out.
        late = [request for request in plan.resumed if request in plan.decodes] + plan.samples
        gaps = [now - request.last_token_at for request in late if request.last_token_at is not None]
        self.irregular_gaps += gaps
        num_gaps = plan.num_samples - len(gaps)
        for sampled in (plan.decodes, plan.samples):
            for request in sampled:
                request.num_output_tokens = count = request.num_output_tokens + 1
                request.last_token_at = now
                if count == 1:
                    request.first_token_at = now
                    request.first_token_batch = plan.num_samples
                    num_gaps -= 1
                if count == request.max_output_tokens:
                    finished.append(request)
        plan.num_gaps = num_gaps
        if finished:
            self._finish(finished, plan.num_samples, now)
        return finished

    def _finish(self, finished: list[Request], batch: int, now: int) -> None:
        for request in finished:
            request.finished_at = now
            request.last_token_batch = batch
            request.status = RequestStatus.FINISHED
        if self._discipline.frees_together:
            if any(request.status is not RequestStatus.FINISHED for request in self.running):
                return
            leaving = self.running
            self.running = []
        else:
            leaving = finished
            for request in finished:
                self.running.remove(request)
        for request in leaving:
            self.blocks.free(request)
        self._may_admit = True

    # ---------------------------------------------------------------- many equal steps at once

    def max_repeats(self, plan: StepPlan) -> int:
        """How many more plans equal to `plan`, the last one made, would follow if nothing arrived; a lower bound.

        Equal: the same requests, one token each. A plan that starts, resumes or preempts anything has no repeats, nor
        one after which a waiting request might be let in, nor one that leaves a running request out.
        """
        decodes = plan.decodes
        if not decodes or plan.chunks or plan.resumed or plan.preempted or not plan.is_complete:
            return 0
        repeats = min([request.max_output_tokens - request.num_promised_tokens for request in decodes])
        if self._may_admit and self._waiting:  # up to the plan in which they are looked at
            repeats = min(repeats, -self._next_index % self.config.poll_every)
        num_free, block_size = self.blocks.num_free, self.blocks.block_size
        if -(-repeats // block_size) * len(decodes) > num_free:
            repeats = num_free // len(decodes) * block_size
        for span in self.config.spans:  # up to the step in which the next request fills its window
            short = [span - request.num_computed_tokens for request in decodes if request.num_computed_tokens < span]
            repeats = min([repeats, *short])
        return repeats

    def num_growing(self, plan: StepPlan) -> tuple[int, ...]:
        """For each span, how many of the plan's decodes have not filled it: its sum grows by as much in a repeat."""
        return tuple(sum([r.num_computed_tokens < span for r in plan.decodes]) for span in self.config.spans)

    def repeat(self, plan: StepPlan, times: int) -> None:
        """Turn `plan`, the last one made, into the one that `times` more calls of `plan()` would have made last."""
        if self.config.spans:
            growing = self.num_growing(plan)
            plan.decode_windowed = tuple(
                total + times * count for total, count in zip(plan.decode_windowed, growing, strict=True)
            )
        plan.index += times
        plan.decode_context += times * len(plan.decodes)
        self._next_index += times
        block_size, allocate = self.blocks.block_size, self.blocks.allocate
        for request in plan.decodes:
            request.num_computed_tokens = computed = request.num_computed_tokens + times
            request.num_promised_tokens += times
            request.last_step += times
            if computed > len(request.block_ids) * block_size:
                allocate(request, computed)

    def apply_repeated(self, plan: StepPlan, times: int, now: int) -> None:
        """As `times` calls of `apply` for equal plans of which none finishes a request, the last at `now`."""
        plan.num_gaps = len(plan.decodes)
        for request in plan.decodes:
            request.num_output_tokens += times
            request.last_token_at = now

    # ---------------------------------------------------------------- invariants

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, counts and blocks agree with each other."""
        assert len(self.running) <= self._max_batch
        waiting = [request for _, request in self._waiting]
        assert not set(map(id, waiting)) & set(map(id, self.running)), "a request waits and runs"
        for request in self.running:
            assert 0 <= request.num_output_tokens <= request.num_promised_tokens <= request.max_output_tokens, request
            assert request.num_promised_tokens - request.num_output_tokens <= 2, f"{request} has too much in flight"
            assert request.num_computed_tokens <= request.num_tokens, request
            assert request.num_computed_tokens <= len(request.block_ids) * self.blocks.block_size, request
        for request in waiting:
            assert not request.block_ids, f"{request} waits with blocks"
        self.blocks.check_integrity(self.running)
