"""`RunningRequests`: running requests and their grants in a plan.

vLLM v1's rule: in order of admission within the token budget; when blocks run out, the running request with the largest
policy key is preempted and recomputed later. Budget and blocks nearly always suffice for all decodes; order then does
not matter, so they advance together as a `DecodeCohort`. Else the requests are visited in order."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from perfmodel.engine.admission import POLICIES
from perfmodel.engine.config import SchedulerConfig
from perfmodel.engine.decode_cohort import DecodeCohort
from perfmodel.engine.encoder_cache import EncoderCache
from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.plan import Grant, StepPlan
from perfmodel.engine.request import Request, RequestStatus

_ADMISSION = attrgetter("admission")
OnPreempted = Callable[[Request], None]


class RunningRequests:
    """Requests that hold a slot under `config` and `blocks`; `on_preempted` is called with each that loses it.

    `_prompts` have more to compute than their newest token, or no token yet; `_joining` had a token sampled and decode
    from the next plan on; the others are in the cohort or have their last token in flight."""

    def __init__(self, config: SchedulerConfig, blocks: KVBlockManager, on_preempted: OnPreempted) -> None:
        self.requests: dict[Request, None] = {}  # in order of admission
        self.cohort = DecodeCohort(blocks, config.spans)
        self._config, self._blocks, self._on_preempted = config, blocks, on_preempted
        self._key = POLICIES.get(config.scheduling_policy, POLICIES["fcfs"])  # the largest is preempted first
        self.caps_prompts = True  # in this step
        self._recomputes = not config.keeps_kv
        self._nodes = config.speculation.nodes if config.speculation is not None else (0,)
        self.num_input_tokens = config.speculation.num_input_tokens if config.speculation is not None else 0
        self.encoder = EncoderCache(config.encoder) if config.encoder is not None else None
        self._num_admissions = 0
        self.previous = StepPlan(-1)  # the plan before the one that is being made
        self._under_way: list[StepPlan] = []  # plans that have not come back, where blocks are given up meanwhile
        self._prompts: list[Request] = []
        self._joining: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def has_ready(self) -> bool:
        """Whether any running request might get a grant."""
        return bool(self.requests)

    def has_place(self, plan: StepPlan, most: int) -> bool:
        """Whether another request may run, of `most` at once, and join `plan`."""
        return len(self.requests) < most

    def chunk(self, missing: int, budget: int) -> int:
        """Tokens of a prompt with `missing` tokens that a step takes."""
        if self.caps_prompts and 0 < self._config.long_prefill_token_threshold < missing:
            missing = self._config.long_prefill_token_threshold
        return min(missing, budget)

    # ---------------------------------------------------------------- coming and going

    def admit(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        """Give `request`, with blocks allocated, a slot and its first tokens."""
        self.requests[request] = None
        request.admission = self._num_admissions
        self._num_admissions += 1
        if self._recomputes:
            self._grant_all(request, plan)
        elif not self._grant_prompt(request, num_new_tokens, plan):
            self._prompts.append(request)

    def leave(self, request: Request) -> None:
        """Remove a request that has no slot any more: finished, dropped or preempted."""
        if self.encoder is not None:
            self.encoder.free(request)
        del self.requests[request]

    def drop(self, request: Request) -> None:
        """Remove an unfinished request; work in flight for it is wasted."""
        if request in self.cohort.joined:
            self.cohort.leave_early(request)
        for others in (self._prompts, self._joining):
            if request in others:
                others.remove(request)
        self.leave(request)

    def padding(self, plan: StepPlan, num_computed: int) -> int:
        """Padding tokens for a request admitted to `plan` with one token, after `num_computed`."""
        return 0

    def is_under_way(self, request: Request) -> bool:
        """Whether a plan in flight computes something of `request`, preempted since."""
        return request.num_promised_tokens > request.num_output_tokens

    def send_out(self, plan: StepPlan) -> None:
        """Register `plan`, which grants something, as in flight."""
        if self._blocks.gives_up_rows or self._config.defers_frees:
            self._under_way.append(plan)

    def come_back(self, plan: StepPlan) -> None:
        """`plan` has been executed."""
        if plan in self._under_way:
            self._under_way.remove(plan)

    def publish_answers(self) -> None:
        """Cache blocks filled by answers, where a prompt may begin with them."""
        blocks, size = self._blocks, self._blocks.block_size
        for request in self.requests:
            num_full = min(self.cohort.num_computed(request) // size, len(request.contents))
            if num_full > request.num_hashed_blocks and request.turn >= 0:
                blocks.publish(request, self.cohort.hand_out_blocks_of(request))

    # ---------------------------------------------------------------- grants

    def grant(self, plan: StepPlan, budget: int, decodes: bool = True) -> int:
        """Grant running requests their next tokens, in order; return the remaining budget.

        Without `decodes`, only prompts (and sequences to recompute) continue."""
        if self._recomputes:
            return self._grant_sequences(plan, budget)
        cohort = self.cohort
        cohort.drop_ended()
        if decodes and self._joining:
            self._join_cohort(plan)
        chunks = self._chunks(budget, decodes)
        if chunks is None:
            plan.resumed.clear()
            cohort.dissolve()
            return self._grant_in_order(plan, budget, decodes)
        if self._blocks.gives_up_rows:
            self._release_in_turn(chunks, decodes)
        for request, num_new_tokens in chunks:
            if not num_new_tokens:
                plan.is_complete = False
                continue
            budget -= num_new_tokens
            self._blocks.allocate(request, request.num_computed_tokens + num_new_tokens)
            if self._grant_prompt(request, num_new_tokens, plan):
                self._prompts.remove(request)
        if decodes and cohort.joined:
            budget -= len(cohort.joined)
            cohort.advance(plan)
        return budget

    def _release_in_turn(self, chunks: list[tuple[Request, int]], decodes: bool) -> None:
        """Release invisible blocks of all who get grants, before any takes blocks: equivalent to in turn, since free
        blocks suffice for all."""
        cohort, releasing = self.cohort, [request for request, num_new_tokens in chunks if num_new_tokens]
        if decodes and cohort.joined:
            num_in_flight = sum([cohort.covers(plan) for plan in self._under_way if plan.cohort_age])
            releasing += cohort.due_to_release(num_in_flight)
        for request in sorted(releasing, key=_ADMISSION):
            num_done = self._release(request, cohort.num_computed(request))
            if request in cohort.joined:
                cohort.expect_release(request, num_done)

    def _release(self, request: Request, num_computed: int) -> int | None:
        """Release blocks unread by `request` and running steps; return at how many finished tokens it next can."""
        return self._blocks.release(request, num_computed - self._num_in_flight(request))

    def _num_in_flight(self, request: Request) -> int:
        joined = self.cohort.joined.get(request)
        count = 0
        for plan in self._under_way:
            if joined is not None and plan.cohort_age > joined:
                count += 1
            else:
                chunks = [grant.num_new_tokens for grant in plan.chunks if grant.request is request]
                count += chunks[0] if chunks else int(request.last_step == plan.index)
        return count

    def _join_cohort(self, plan: StepPlan) -> None:
        """Move requests with a token from a grant of their own into the cohort."""
        for request in self._joining:
            if request.last_step != plan.index - 1:
                plan.resumed.append(request)
            self.cohort.join(request)
        self._joining.clear()

    def _chunks(self, budget: int, decodes: bool) -> list[tuple[Request, int]] | None:
        """Grants per prompt if all decodes get their token; None if the order must decide."""
        cohort = self.cohort
        if self.encoder is not None and self._prompts:
            return None  # images are encoded in turn
        left = budget - len(cohort.joined) if decodes else budget
        num_blocks = cohort.num_blocks_due if decodes else 0
        chunks: list[tuple[Request, int]] = []
        for request in self._prompts:
            missing = request.num_tokens - request.num_computed_tokens
            if missing == 1 and not decodes:
                continue
            if missing > 1:
                missing = self.chunk(missing, max(left, 0))
            left -= missing
            num_blocks += max(self._blocks.num_needed(request, request.num_computed_tokens + missing), 0)
            chunks.append((request, missing))
        if num_blocks > self._blocks.num_free or left < 0:
            return None
        if left == 0 and decodes and self._prompts and self._prompts[0].admission < cohort.last_admission:
            return None  # a prompt may precede a decode that it starves
        return chunks

    def _grant_prompt(self, request: Request, num_new_tokens: int, plan: StepPlan) -> bool:
        """Grant tokens other than a plain decode; True if it yields an output token."""
        if num_new_tokens > 1 or request.num_tokens - request.num_computed_tokens > 1:
            has_sample = self._grant_chunk(request, num_new_tokens, plan)
        else:
            request.num_computed_tokens += 1
            request.num_promised_tokens += 1
            request.last_step = plan.index
            plan.singles.append(request)
            has_sample = True
        if has_sample and request.num_remaining_tokens:
            self._joining.append(request)
        return has_sample

    def _grant_chunk(self, request: Request, num_new_tokens: int, plan: StepPlan) -> bool:
        """Grant all or part of a prompt or recomputation; True if it completes it."""
        plan.chunks.append(Grant(request, request.num_computed_tokens, num_new_tokens))
        plan.num_chunk_tokens += num_new_tokens
        request.num_computed_tokens += num_new_tokens
        if request.num_computed_tokens < request.num_tokens:
            return False
        request.num_promised_tokens += 1
        request.last_step = plan.index
        plan.samples.append(request)
        return True

    def _grant_all(self, request: Request, plan: StepPlan) -> None:
        """Grant all tokens of `request`, none of which stay computed."""
        plan.chunks.append(Grant(request, 0, request.num_tokens))
        plan.num_chunk_tokens += request.num_tokens
        plan.samples.append(request)
        request.num_promised_tokens += 1
        request.last_step = plan.index

    def _grant_sequences(self, plan: StepPlan, budget: int) -> int:
        """`grant` without KV cache: whole sequences in order, within the budget."""
        for request in self._in_turn():
            if not request.num_remaining_tokens or request.status is not RequestStatus.RUNNING:
                continue
            if request.num_tokens > budget:
                plan.is_complete = False
                continue
            budget -= request.num_tokens
            self._grant_all(request, plan)
        return budget

    # ---------------------------------------------------------------- grants in order

    def _grant_in_order(self, plan: StepPlan, budget: int, decodes: bool) -> int:
        """`grant` one request at a time, when budget or blocks are short."""
        index, before, blocks, running = plan.index, self._index_before(plan), self._blocks, RequestStatus.RUNNING
        block_size = blocks.block_size
        for request in self._in_turn():
            promised, computed = request.num_promised_tokens, request.num_computed_tokens
            if promised == request.max_output_tokens or request.status is not running:
                continue  # last token in flight, or just preempted
            missing = request.num_prompt_tokens + promised - computed
            is_decode = missing == 1
            if is_decode and not decodes:
                continue
            if budget <= 0:
                plan.is_complete = False
                continue
            if not is_decode:
                missing = self.chunk(missing, budget)
            encoded: Sequence[int] = ()
            if self.encoder is not None and request.encoder_inputs:
                missing, encoded = self.encoder.fit(request, computed, missing, plan)
                if not missing:
                    plan.is_complete = False
                    continue
            wanted = computed + missing
            if blocks.gives_up_rows:
                self._release(request, computed)
            if wanted > len(request.block_ids) * block_size:
                if blocks.num_needed(request, wanted) > 0:  # else released blocks suffice
                    given_back = self._make_room(request, wanted, plan)
                    if given_back is None:  # the request itself was preempted: vLLM looks at no other
                        plan.is_complete = False
                        break
                    budget += given_back
                blocks.allocate(request, wanted)
            budget -= missing
            if is_decode:
                if not promised or request.last_step != before:
                    plan.resumed.append(request)
                request.num_computed_tokens = computed + 1
                request.num_promised_tokens = promised + 1
                request.last_step = index
                plan.decodes.append(request)
            else:
                self._grant_chunk(request, missing, plan)
            if encoded and self.encoder is not None:
                self.encoder.encode(request, encoded, plan)
        self._sort_out()
        return budget

    def _in_turn(self) -> Iterable[Request]:
        """Requests that may get a grant, in order of admission."""
        return tuple(self.requests)

    def _index_before(self, plan: StepPlan) -> int:
        """Index of the plan with the previous token of uninterrupted decodes."""
        return plan.index - 1

    def _sort_out(self) -> None:
        """Split `requests` into those joining the cohort and those with more to compute."""
        self._prompts, self._joining = [], []
        for request in self.requests:
            if request.num_remaining_tokens:
                is_decoding = request.num_promised_tokens and request.num_tokens == request.num_computed_tokens + 1
                (self._joining if is_decoding else self._prompts).append(request)

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> int | None:
        """Preempt until `request` fits `num_tokens`; return tokens taken back, or None if it was preempted itself."""
        given_back = 0
        while not self._blocks.can_allocate(request, num_tokens):
            is_fcfs = self._config.scheduling_policy == "fcfs"  # then the last admitted
            victim = next(reversed(self.requests)) if is_fcfs else max(self.requests, key=self._key)
            if self._config.defers_frees and self.is_in_flight(victim, plan):
                return None  # its blocks would not be free now
            num_known = self.num_known_tokens(victim)
            if victim.last_step == plan.index:  # a grant of this plan named them, one token before those in flight
                num_known = victim.num_computed_tokens - (victim.num_promised_tokens - victim.num_output_tokens) + 1
            num_drafted, taken_back = plan.num_draft_tokens, _take_back(victim, plan, self._nodes)
            num_drafted -= plan.num_draft_tokens
            given_back += taken_back + (self.num_input_tokens if taken_back else 0)
            if plan.encoded and self.encoder is not None:
                self.encoder.take_back(victim, plan)
            self._preempt(victim, plan, victim.num_computed_tokens - (taken_back - num_drafted), num_known)
            if victim is request:
                return None
        return given_back

    def is_in_flight(self, request: Request, plan: StepPlan | None = None) -> bool:
        """Whether a plan in flight, other than `plan` in the making, computes something of `request`."""
        num_granted = plan is not None and request.last_step == plan.index
        if request.num_promised_tokens - request.num_output_tokens > num_granted:
            return True
        return any(grant.request is request for other in self._under_way for grant in other.chunks)

    def num_reserved_blocks(self) -> int:
        """Blocks that started prompts still lack to their end."""
        begun = (request for request in self.requests if request.last_step < 0)
        return sum([max(self._blocks.num_needed(request, request.num_tokens), 0) for request in begun])

    def num_known_tokens(self, request: Request) -> int:
        """Leading tokens known when the blocks that `request` gives up last got contents.

        Tokens in flight are unknown, except for the first of a run: vLLM names a grant's blocks when it is made."""
        in_flight, previous = request.num_promised_tokens - request.num_output_tokens, self.previous
        if in_flight and request in previous.samples + previous.singles + previous.resumed:
            in_flight -= 1
        return request.num_computed_tokens - in_flight

    def _preempt(self, victim: Request, plan: StepPlan, num_computed: int, num_known: int) -> None:
        """Preempt `victim` with `num_computed` tokens of KV, to be recomputed or restored; its first `num_known` may be
        cached.

        More known than computed tokens means that a grant was taken back: vLLM counts its blocks as full, and would let
        others find what was never computed."""
        blocks = self._blocks
        if blocks.host is None or not blocks.host.park(victim, num_computed, blocks.num_filled(num_computed)):
            staying = {"all": victim.num_tokens, "prompt": victim.num_prompt_tokens, "nothing": 0}
            blocks.publish_own(victim, min(num_computed, num_known, staying[self._config.stays_of_preempted]))
        blocks.free(victim, num_known)
        self._lose_slot(victim, plan)

    def _lose_slot(self, victim: Request, plan: StepPlan) -> None:
        """Requeue `victim`, whose blocks are free, with nothing computed."""
        self.leave(victim)
        victim.num_computed_tokens = victim.num_transferred_tokens = 0
        victim.last_step = -1
        victim.num_preemptions += 1
        victim.status = RequestStatus.PREEMPTED
        plan.preempted.append(victim)
        self._on_preempted(victim)


def _take_back(victim: Request, plan: StepPlan, nodes: tuple[int, ...]) -> int:
    """Take back the grant of `plan` to `victim`, whose drafts have `nodes`; return its tokens."""
    given_back = 0
    if victim in plan.decodes:
        place = plan.decodes.index(victim)
        num_drafted = nodes[plan.draft_depths.pop(place)] if plan.draft_depths else 0
        del plan.decodes[place]
        plan.num_draft_tokens -= num_drafted
        victim.num_promised_tokens -= 1
        given_back += 1 + num_drafted
    if victim in plan.samples:
        plan.samples.remove(victim)
        victim.num_promised_tokens -= 1
    for grant in [g for g in plan.chunks if g.request is victim]:
        plan.chunks.remove(grant)
        plan.num_chunk_tokens -= grant.num_new_tokens
        given_back += grant.num_new_tokens
    if victim in plan.resumed:
        plan.resumed.remove(victim)
    return given_back


class PipelinedRequests(RunningRequests):
    """`RunningRequests` with several plans in flight over pipeline stages.

    A request with its next token in flight gets no grant until that has come back; further prompt chunks may follow at
    once, since counts advance when a plan is made. Requests once granted together stay together and are not moved to
    balance plans (vLLM v1); other engines cap the sequences of a plan (`max_plan_seqs`), so the rest go into the next.
    Plans find different requests, so there is no cohort."""

    def __init__(self, config: SchedulerConfig, blocks: KVBlockManager, on_preempted: OnPreempted) -> None:
        super().__init__(config, blocks, on_preempted)
        self._most_in_plan = config.max_plan_seqs or config.max_num_seqs
        self._ready: dict[Request, None] = {}  # lack something, and wait for no token in flight
        self._last_back = -1  # index of the last returned plan

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def has_place(self, plan: StepPlan, most: int) -> bool:
        in_plan = len(plan.decodes) + len(plan.singles) + len(plan.chunks)
        return in_plan < self._most_in_plan and super().has_place(plan, most)

    def admit(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        super().admit(request, num_new_tokens, plan)
        self._sort_out()
        if request.num_promised_tokens == request.num_output_tokens:
            self._ready[request] = None

    def leave(self, request: Request) -> None:
        super().leave(request)
        self._ready.pop(request, None)

    def grant(self, plan: StepPlan, budget: int, decodes: bool = True) -> int:
        left = self._grant_sequences(plan, budget) if self._recomputes else self._grant_in_order(plan, budget, decodes)
        for request in plan.decodes + plan.samples:
            self._ready.pop(request, None)
        return left

    def num_known_tokens(self, request: Request) -> int:
        return request.num_computed_tokens  # all tokens were known when they were granted

    def is_under_way(self, request: Request) -> bool:
        chunks = [grant.request for plan in self._under_way for grant in plan.chunks]
        return request in chunks or any(request in plan.decodes for plan in self._under_way)

    def send_out(self, plan: StepPlan) -> None:
        self._under_way.append(plan)

    def come_back(self, plan: StepPlan) -> None:
        if not plan:
            return  # it has the index of the next one
        self._last_back = plan.index
        self._under_way = [other for other in self._under_way if other.index > plan.index]
        for request in plan.decodes + plan.samples:
            if request.status is RequestStatus.RUNNING and request.num_promised_tokens < request.max_output_tokens:
                self._ready[request] = None

    def _in_turn(self) -> Iterable[Request]:
        return sorted(self._ready, key=_ADMISSION)[: self._most_in_plan]

    def _index_before(self, plan: StepPlan) -> int:
        return self._last_back

    def _sort_out(self) -> None:
        """Empty both lists: without a cohort, `_ready` alone says who gets grants."""
        self._prompts.clear()
        self._joining.clear()
