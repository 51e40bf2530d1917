"""`EstimatingScheduler`: SGLang's rules: admission by expected remaining tokens, prompts before decodes.

A step computes prompts while any can be admitted, else all decodes; in mixed mode decodes join prompts. A request is
admitted while available blocks cover its prompt, its longest answer and what running requests are expected to need.
Only prompts use the token budget; the first prompt that it cuts ends the step and continues in the next. After a
refusal for blocks or slots nothing is admitted until a request leaves. Prompts enter the prefix cache after their
step, partial ones when the next step is planned."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from perfmodel.engine.admission import ORDERS, POLICIES, sort_waiting
from perfmodel.engine.config import Estimates, SchedulerConfig
from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.radix_blocks import RadixKVBlocks, RadixNode
from perfmodel.engine.request import Request, RequestStatus
from perfmodel.engine.running import RunningRequests
from perfmodel.engine.scheduler import Scheduler
from perfmodel.engine.token_watch import TokenWatch
from perfmodel.errors import SpecError, WorkloadError


def scheduler_for(config: SchedulerConfig, blocks: KVBlockManager, watch: TokenWatch | None = None) -> Scheduler:
    """Scheduler for `config`: by estimates if it has any and `blocks` are in a radix tree.

    Raises SpecError for an unknown order of waiting requests."""
    orders = ORDERS if config.estimates is not None and isinstance(blocks, RadixKVBlocks) else POLICIES
    if config.scheduling_policy not in orders:
        raise SpecError(
            f"got scheduling_policy={config.scheduling_policy}; this engine, with its KV cache, stages and drafts, "
            f"serves by {', '.join(sorted(orders))}"
        )
    if config.estimates is not None and isinstance(blocks, RadixKVBlocks):
        return EstimatingScheduler(config, blocks, watch)
    return Scheduler(config, blocks, watch)


class RetractingRequests(RunningRequests):
    """Running requests of an engine that decodes all, or all but a few where blocks run short.

    Decodes have no token budget. Short of blocks, requests are retracted until the others fit, one at least: shortest
    answers first, then longest prompts. A retracted request keeps its tree blocks cached, drops a token in flight and
    queues last. A step short of blocks that requests with their last token in flight are about to free decodes nothing.
    `requests` is in order of starting to run.

    ratio:   expected share of running requests' longest answers
    dropped: (plan, request) of discarded samples"""

    def __init__(self, config: SchedulerConfig, radix: RadixKVBlocks, on_preempted: Callable[[Request], None]) -> None:
        super().__init__(config, radix, on_preempted)
        assert config.estimates is not None
        rules = config.estimates
        self._radix = radix
        self._rules = rules
        self.ratio = rules.first_ratio
        self.dropped: set[tuple[StepPlan, Request]] = set()

    @property
    def unfinished_prompt(self) -> Request | None:
        return self._prompts[0] if self._prompts else None

    def continue_prompt(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        """Grant more of the unfinished prompt of `request`."""
        if self._grant_prompt(request, num_new_tokens, plan):
            self._prompts.remove(request)

    def num_expected(self, request: Request) -> float:
        """Expected further tokens of a running `request`."""
        rules = self._rules
        left = min(request.max_output_tokens - self.cohort.num_output(request), rules.most_output_tokens)
        return left * (self.ratio if rules.ends_early else 1.0)

    def decode(self, plan: StepPlan, others: Sequence[Request] = ()) -> bool:
        """Grant all decodes a token; False if blocks are short. Without retraction in a plan that ends the prompts of
        `others`, which do not decode yet."""
        cohort, radix, may_retract = self.cohort, self._radix, not plan.chunks and not plan.singles
        cohort.drop_ended()
        begun = [request for request in self._joining if request in others]
        self._joining = [request for request in self._joining if request not in others]
        joining = list(self._joining)
        if joining:
            self._join_cohort(plan)
        self._joining = begun
        if not cohort.joined:
            return True
        if not radix.can_have(cohort.num_blocks_due):
            plan.resumed.clear()
            for request in joining:
                cohort.leave_early(request)
            self._joining = joining + begun
            if not may_retract or any(not request.num_remaining_tokens for request in self.requests):
                plan.is_complete = False
                return False
            self._retract(plan)
            if not cohort.joined:
                return True
        elif may_retract:
            self._decay(1)
        radix.want(len(cohort.joined))
        cohort.advance(plan)
        return True

    def _decay(self, num_steps: int) -> None:
        rules = self._rules
        decay = (rules.first_ratio - rules.least_ratio) / rules.decay_steps
        while num_steps and self.ratio > rules.least_ratio and rules.ends_early:
            self.ratio = max(self.ratio - decay, rules.least_ratio)
            num_steps -= 1

    def repeat(self, num_steps: int) -> None:
        """`num_steps` more steps like the last decode."""
        self._decay(num_steps)
        self._radix.want(len(self.cohort.joined) - self.cohort.num_blocks_taken)

    def _retract(self, plan: StepPlan) -> None:
        decoding = [*self.cohort.dissolve(), *self._joining]
        places = {request: place for place, request in enumerate(self.requests)}
        decoding.sort(key=places.__getitem__)
        staying = sorted(decoding, key=lambda r: (r.num_output_tokens, -r.num_prompt_tokens), reverse=True)
        radix, spared = self._radix, self._rules.spared_steps
        while len(staying) > 1:
            self._send_back(staying.pop(), plan)
            radix.evict(-(-len(staying) * spared // radix.block_size))
            if self._fit(staying):
                break
        if not self._fit(staying):  # another engine's KV is in its way
            self._send_back(staying.pop(), plan)
        num_known = sum(request.num_output_tokens for request in staying)
        longest = sum(request.max_output_tokens for request in staying)
        self.ratio = min(1.0, (num_known + spared * len(staying)) / (longest + 1))
        kept = set(staying)
        self._joining = [request for request in decoding if request in kept]
        self._join_cohort(plan)

    def _fit(self, staying: list[Request]) -> bool:
        """Whether there are blocks for the next token of each."""
        size = self._radix.block_size
        return self._radix.evict(sum(request.num_computed_tokens % size == 0 for request in staying))

    def _send_back(self, victim: Request, plan: StepPlan) -> None:
        in_flight = victim.num_promised_tokens - victim.num_output_tokens
        if in_flight:
            victim.num_promised_tokens -= in_flight
            self.dropped.add((self.previous, victim))
        self._radix.free(victim)
        self._lose_slot(victim, plan)

    def put_first(self, requests: list[Request]) -> None:
        """Put `requests` before those that decoded beside their prompts."""
        first = dict.fromkeys(requests)
        self.requests = {**first, **{request: None for request in self.requests if request not in first}}


class _Admission(NamedTuple):
    """A request with its cached prefix node and the tokens that it computes in a step."""

    request: Request
    node: RadixNode
    num_computed: int
    num_new_tokens: int


class _Budget:
    """Tokens left for admission.

    total:   expected by running and admitted requests; now: taken at once by the latter, in whole pages
    prompts: left for prompts in this step; whole_prompts: none is cut, and the first may be longer"""

    def __init__(self, blocks: RadixKVBlocks, prompts: int, whole_prompts: bool, num_decodes: int) -> None:
        self._blocks = blocks
        self._size = blocks.block_size
        self.total = float(num_decodes)
        self.now = num_decodes
        self.prompts = prompts - num_decodes
        self.whole_prompts = whole_prompts

    @property
    def left(self) -> float:
        """Available tokens that nobody is expected to need."""
        return self._blocks.num_free * self._size - self.total

    @property
    def left_now(self) -> int:
        """Available tokens after this step's."""
        return self._blocks.num_free * self._size - self.now

    def paged(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size) * self._size

    def charge(self, num_new_tokens: int, num_output_tokens: int) -> None:
        """Charge a request that computes `num_new_tokens` and is expected to answer `num_output_tokens`."""
        paged = self.paged(num_new_tokens)
        self.total += paged + self._size + num_output_tokens
        self.now += paged + self._size
        self.prompts -= paged


class EstimatingScheduler(Scheduler):
    """Plans steps over `radix` under `config`, which has `estimates`."""

    def __init__(self, config: SchedulerConfig, radix: RadixKVBlocks, watch: TokenWatch | None = None) -> None:
        super().__init__(replace(config, scheduling_policy="fcfs"), radix, watch)
        self.config = config
        assert config.estimates is not None
        self._rules: Estimates = config.estimates
        self._radix = radix
        self._running = self._decoding = RetractingRequests(config, radix, self._requeue)
        self._running.cohort.watch = watch
        # Whether each step looks at waiting requests, as an urgent one might replace a running one.
        self._may_preempt = config.scheduling_policy == "priority"
        self._is_full = False  # no admission until a request leaves
        self._num_admissions = 0  # how often the queue was sorted
        self._num_decoding = 0  # requests that ran beside the last plan's prompts
        self._was_short = False  # the last refusal was for blocks
        self._begun: dict[StepPlan, list[Request]] = {}  # plan -> requests whose prompts end with it, in its order

    def _requeue(self, victim: Request) -> None:
        self.num_preemptions += 1
        self._waiting.append(((), victim))

    def add(self, request: Request) -> None:
        """Queue `request`; see `Scheduler.add`."""
        self.check_can_ever_run(request)
        self._waiting.append(((), request))  # in the order last looked at
        self._may_admit = not self._is_full

    def _withdraw(self, request: Request) -> bool:
        place = next((i for i, (_, waiting) in enumerate(self._waiting) if waiting is request), None)
        if place is None:
            return super()._withdraw(request)
        del self._waiting[place]
        return True

    def abort(self, request: Request) -> bool:
        """See `Scheduler.abort`."""
        self._is_full = False
        return super().abort(request)

    def _most_output(self, request: Request) -> int:
        """Longest answer that fits an empty pool beside the prompt, in whole pages."""
        size = self._radix.block_size
        return (self._radix.num_blocks - -(-request.num_prompt_tokens // size) - 1) * size - 1

    def check_can_ever_run(self, request: Request) -> None:
        """Raise WorkloadError for a request that an empty engine could not serve."""
        super().check_can_ever_run(request)
        if self._most_output(request) <= 0:
            raise WorkloadError(
                f"request {request.request_id} has a prompt of {request.num_prompt_tokens} tokens, but the pool has "
                f"{self._radix.num_blocks} blocks of {self._radix.block_size}, of which two are for its answer; "
                f"shorten it, or give the KV cache more memory"
            )

    def plan(self, now: int, admits: bool = True) -> StepPlan:
        """The next step at time `now`; see `Scheduler.plan`."""
        plan, running = StepPlan(self._next_index), self._decoding
        if not (running.requests or self._waiting):
            return plan
        is_polled = (plan.index - self._poll_at) % self.config.poll_every == 0 or not running.requests
        # Deferred work of the plan before, now under way.
        unfinished, previous = running.unfinished_prompt, running.previous
        if unfinished is not None and any(grant.request is unfinished for grant in previous.chunks):
            self._radix.checkpoint(unfinished, unfinished.num_computed_tokens)
        had_prompts = bool(previous.chunks or previous.singles)
        if had_prompts and (unfinished is not None or not self._num_decoding):
            self._is_full = False
        if len(running.requests) == (unfinished is not None) or self._may_preempt:
            self._is_full = False
        if unfinished is not None or (admits and is_polled and self._waiting and not self._is_full):
            self._admit_by_estimate(plan, now, unfinished)
        if plan.chunks or plan.singles:
            plan.is_complete = False
            begun, unfinished = self._begun[plan], running.unfinished_prompt
            self._num_decoding = num_decoding = len(running.requests) - len(begun) - (unfinished is not None)
            # Decodes join the prompts if there are blocks for them.
            is_mixed = num_decoding and not self.config.prefill_exclusive and running.decode(plan, begun)
            if is_mixed and plan.cohort_age:
                running.put_first([*begun, *filter(None, [unfinished])])
                self._num_decoding = 0
            self._poll_at = self._next_index + 1
        else:
            running.decode(plan)
            if plan.preempted:
                self._is_full = False
        self._sum_up(plan)
        running.previous = plan
        self._may_admit = bool(self._waiting) and not self._is_full
        if plan.decodes or plan.chunks:
            self._next_index += 1
            running.send_out(plan)
        return plan

    def _admit_by_estimate(self, plan: StepPlan, now: int, unfinished: Request | None) -> None:
        config, running, rules, asked_tree = self.config, self._decoding, self._rules, False
        num_running = len(running.requests) - (unfinished is not None)
        places = self._max_batch - len(running.requests)
        if places <= 0 and unfinished is None and not self._may_preempt:
            self._is_full = True
            return
        if config.scheduling_policy != "fcfs":
            queue = [request for _, request in self._waiting]
            asked_tree = sort_waiting(queue, config.scheduling_policy, self._radix, rules)
            self._waiting = [((), request) for request in queue]
        if not asked_tree and self._waiting:
            if self._num_admissions % rules.refresh_every == 0:
                for _, request in reversed(self._waiting[: rules.most_sorted]):
                    self._radix.match(request, request.num_tokens)
            self._num_admissions += 1
        num_decodes = 0 if config.prefill_exclusive else num_running
        budget = _Budget(self._radix, self._budget, not config.enable_chunked_prefill, num_decodes)
        budget.total += sum([running.num_expected(other) for other in running.requests if other is not unfinished])
        num_continued = 0
        if unfinished is not None:  # its prompt goes first
            missing, left = unfinished.num_tokens - unfinished.num_computed_tokens, budget.prompts
            fitting = min(left, int(budget.left))
            num_continued = min(missing, fitting if fitting > 0 else left)
            budget.charge(num_continued, self._clipped(unfinished.max_output_tokens) if num_continued == missing else 0)
        admitted = self._choose(budget, places, num_running, bool(num_continued))
        self._start(plan, now, unfinished, num_continued, admitted)

    def _clipped(self, num_output_tokens: int) -> int:
        return min(num_output_tokens, self._rules.most_output_tokens)

    def _choose(self, budget: _Budget, places: int, num_running: int, continues: bool) -> list[_Admission]:
        """Admit waiting requests in order, until the first that does not fit."""
        admitted: list[_Admission] = []
        # Without a cache and with fixed answer lengths it is known when blocks are freed.
        knows_ends = not self._rules.ends_early and not self._radix.enable_prefix_caching
        guards = _FreedLater(self, budget) if knows_ends else None
        for _, request in self._waiting:
            if budget.prompts <= 0 and budget.left > 0 and budget.left_now > 0:
                break
            self._is_full |= len(admitted) >= places
            if self._is_full:
                break
            node = self._radix.match(request, request.num_tokens - 1)
            one = self._fit(request, node, budget, bool(admitted) or continues, guards, admitted)
            if one is not None:
                admitted.append(one)
                self._radix.adopt(request, node)
                whole = one.num_computed + one.num_new_tokens == request.num_tokens
                budget.charge(one.num_new_tokens, self._clipped(request.max_output_tokens) if whole else 0)
            is_short = budget.left <= 0 or budget.left_now <= 0 if one is not None else self._was_short
            if is_short:
                self._is_full = bool(admitted) or continues or num_running > 0
            if one is None or is_short or budget.prompts <= 0:
                break
        return admitted

    def _fit(
        self,
        request: Request,
        node: RadixNode,
        budget: _Budget,
        follows: bool,
        guards: "_FreedLater | None",
        admitted: list[_Admission],
    ) -> _Admission | None:
        """Admission of `request`, or None; sets `_was_short` if blocks are missing."""
        self._was_short = True
        size = self._radix.block_size
        num_computed = self._radix.depth(node) * size
        missing = request.num_tokens - num_computed
        if guards is not None:
            if not guards.has_room_for(request, missing, admitted):
                return None
        else:
            left_output = min(self._clipped(request.num_remaining_tokens), self._most_output(request))
            unheld = self._radix.num_unheld(node) * size
            if missing + left_output + size >= budget.left - unheld:
                return None
        self._was_short = False
        if budget.whole_prompts:
            if follows and budget.paged(missing) >= budget.prompts:
                return None
        elif (missing if guards is not None else budget.paged(missing)) > budget.prompts:
            missing = budget.prompts if guards is not None else budget.prompts // size * size
            if missing <= 0:
                return None
        return _Admission(request, node, num_computed, missing)

    def _start(
        self, plan: StepPlan, now: int, unfinished: Request | None, num_continued: int, admitted: list[_Admission]
    ) -> None:
        """Allocate blocks and grant tokens to all prompts in `plan`."""
        if not (num_continued or admitted):
            return
        del self._waiting[: len(admitted)]
        radix, size = self._radix, self._radix.block_size
        num_tokens = num_continued + sum(one.num_new_tokens for one in admitted)
        num_requests = len(admitted) + bool(num_continued)
        radix.evict(num_tokens if size == 1 else -(-num_tokens // size) + num_requests)
        if unfinished is not None:
            radix.allocate(unfinished, unfinished.num_computed_tokens + num_continued)
            self._decoding.continue_prompt(unfinished, num_continued, plan)
        for request, _, num_computed, num_new_tokens in admitted:
            radix.allocate(request, num_computed + num_new_tokens)
            self._count_prefix(request, num_computed)
            self._enter(request, num_computed, num_new_tokens, plan, now)
        granted = [*filter(None, [unfinished]), *(one.request for one in admitted)]
        self._begun[plan] = [request for request in granted if request is not self._decoding.unfinished_prompt]

    def apply(self, plan: StepPlan, now: int, num_accepted: Sequence[int] | None = None) -> list[Request]:
        """Apply tokens sampled by `plan`, ended at `now`, and `num_accepted` drafts; return finished requests."""
        kept = plan.decodes, plan.samples, plan.singles, plan.resumed
        dropped = self._decoding.dropped
        if dropped:
            vain = {request for of, request in dropped if of is plan}
            plan.decodes, plan.samples, plan.singles, plan.resumed = (
                [r for r in part if r not in vain] for part in kept
            )
            dropped -= {(plan, request) for request in vain}
        finished = super().apply(plan, now, num_accepted)
        begun = self._begun.pop(plan, None)
        if begun:
            sampled = {*plan.samples, *plan.singles}
            for request in begun:
                if request in sampled and request.status is RequestStatus.RUNNING:
                    self._radix.checkpoint(request, request.num_prompt_tokens + request.num_output_tokens - 1)
                elif request in sampled and request.status is RequestStatus.FINISHED:
                    self._release(request)
        if finished:
            others = [request for request in finished if request not in (begun or ())]
            if len(others) > 1 and not self.config.prefill_exclusive:
                places = {request: place for place, request in enumerate(self._running.requests)}
                others.sort(key=lambda request: places.get(request, -1))
            for request in others:
                self._release(request)
            self._is_full = False
            self._may_admit = bool(self._waiting)
        plan.decodes, plan.samples, plan.singles, plan.resumed = kept
        if not (self._waiting or self._running.requests):
            self._decoding.ratio = self._rules.first_ratio
        return finished

    def _free(self, finished: list[Request]) -> None:
        """No-op: finished requests give their blocks back in the order of their step."""

    def _release(self, request: Request) -> None:
        if request in self._running.requests:
            self._running.leave(request)
        if request.keeps_blocks:
            self.detached[request.request_id] = request
            return
        self._radix.checkpoint(request, request.num_computed_tokens)
        self._radix.free(request)

    def repeat(self, plan: StepPlan, times: int) -> None:
        """See `Scheduler.repeat`."""
        super().repeat(plan, times)
        self._decoding.repeat(times)


class _FreedLater:
    """Without cache, with fixed answer lengths: whether blocks suffice at all later times, as requests end."""

    def __init__(self, scheduler: EstimatingScheduler, budget: _Budget) -> None:
        self._scheduler, self._budget = scheduler, budget
        self._states: list[tuple[int, int]] | None = None  # (tokens left to generate, tokens held)

    def has_room_for(self, request: Request, missing: int, admitted: list[_Admission]) -> bool:
        """Whether `request`, computing `missing` tokens now, fits beside the others."""
        budget, size = self._budget, self._scheduler._radix.block_size
        paged = budget.paged(missing) + size
        if paged > min(budget.left_now, budget.left):
            return False
        if self._states is None:
            running = self._scheduler._decoding
            unfinished = running.unfinished_prompt
            others = [other for other in running.requests if other is not unfinished]
            granted = [*filter(None, [unfinished]), *(one.request for one in admitted)]
            self._states = sorted(filter(None, map(self._state, [request, *others, *granted])), key=lambda s: s[0])
        else:
            self._insert(self._state(request))
        left = budget.left_now - paged
        freed = 0
        for place, (num_left, num_held) in enumerate(self._states):
            count = len(self._states) - place
            if left + freed - num_left * count <= count:
                return False
            freed += num_held
        return True

    def _state(self, request: Request) -> tuple[int, int] | None:
        num_output = self._scheduler._decoding.cohort.num_output(request)
        left = request.max_output_tokens - num_output
        return (left, request.num_prompt_tokens + num_output) if left > 0 else None

    def _insert(self, state: tuple[int, int] | None) -> None:
        """Insert `state` before the first with at least as many tokens left, else before the last."""
        assert self._states is not None
        if state is None:
            return
        places = (place for place, (left, _) in enumerate(self._states) if state[0] <= left)
        self._states.insert(next(places, max(len(self._states) - 1, 0)), state)
