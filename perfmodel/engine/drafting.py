"""`DraftingRequests`: running requests under speculative decoding.

A step verifies each decode's newest token and the tokens drafted after it: `StepPlan.draft_depths` deep, `nodes`
tokens in all (one per depth in a chain, several in a tree). `Outcome.num_accepted` has 0 to depth right tokens per
decode; the request gains one more than that. Rejected drafts never advance its counts, and its blocks are kept. With n
tokens to go a request drafts at most n - 1 deep (one token comes in any case), within the step's token budget.

Pipelined, the drafter runs ahead during verification. `num_accepted` may be depth + 1: all drafts were right, and so
was the drafter's guess of the model's own token. Only then is there a draft for the next step; else, and for decodes
that just began or were left out, the drafter restarts and the next step brings one token.

With `Speculation.depth_by_match` drafts are by a request's right tokens in a row; depth + 1 says that the row goes on.

Grants differ by request, so there is no cohort. Plans advance counts by the certain token; `take_accepted` adds right
drafts. Ahead (`Speculation.is_ahead`), a plan is made before the last one's drafts are verified and takes all as right:
it allocates blocks behind them, up to the longest sequence, and is moved once acceptance is known; work for requests
that ended meanwhile is wasted.
Source: vLLM 0.30, v1/core/sched/async_scheduler.py (`num_output_placeholders`), scheduler.py (`update_from_output`)."""

from collections.abc import Mapping, Sequence
from operator import add

from perfmodel.engine.config import SchedulerConfig
from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request, RequestStatus
from perfmodel.engine.running import OnPreempted, RunningRequests

_TOO_MANY = 1 << 40  # above any token budget


class AcceptanceEstimate:
    """Recent acceptance: share of judged tokens that were right, with a memory of some `_MEMORY` judged tokens.

    A token is judged if all before it were right. While nothing is drafted the estimate drifts back to its start."""

    _MEMORY = 500.0

    def __init__(self, start: float) -> None:
        self.value = self._start = start
        self._judged = self._MEMORY
        self._right = self._MEMORY * start

    def add(self, num_judged: int, num_right: float) -> None:
        """Count a step's judged and right tokens."""
        kept = self._MEMORY / (self._MEMORY + num_judged)
        self._judged = (self._judged + num_judged) * kept
        self._right = (self._right + num_right) * kept
        self.value = self._right / self._judged

    def fade(self) -> None:
        """A step drafted nothing, for lack of expected gain."""
        self.add(1, self._start)


class DraftingRequests(RunningRequests):
    """`RunningRequests` for a `config` with speculation."""

    def __init__(self, config: SchedulerConfig, blocks: KVBlockManager, on_preempted: OnPreempted) -> None:
        super().__init__(config, blocks, on_preempted)
        assert config.speculation is not None
        self._speculation = config.speculation
        self._num_lookahead = config.speculation.num_lookahead
        self._max_model_len, self._spans = config.max_model_len, config.spans
        is_fixed = not config.speculation.depths and config.speculation.disable_by_batch_size is None
        self._pads = config.pads_lone_tokens if is_fixed else "never"
        self._waits_to_be_padded = config.waits_to_be_padded
        self._newly_right: dict[Request, int] = {}  # accepted drafts of its last verification
        self._unverified: dict[Request, int] = {}  # drafted or padding tokens of its newest plan, not verified yet
        self._ended: set[Request] = set()  # finished in the plan before one that computes something for them
        self._has_running = False  # the plan in progress grants running requests something
        self._continues_prompt = False  # the plan in progress computes a prompt of a running request
        self._estimate = AcceptanceEstimate(config.speculation.estimate)
        self._by_match = config.speculation.depth_by_match
        self._has_draft: set[Request] = set()  # pipelined: the drafter was right so far and ran on

    def admit(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        super().admit(request, num_new_tokens, plan)
        self._prompts.clear()  # without a cohort nobody waits in these
        self._joining.clear()

    def pad(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        """Add `num_tokens` padding tokens to `plan` beside the one for which `request` was admitted."""
        plan.padded += (request,)
        plan.num_padding_tokens += num_tokens
        self._unverified[request] = num_tokens

    def leave(self, request: Request) -> None:
        super().leave(request)
        self._unverified.pop(request, None)

    def drop(self, request: Request) -> None:
        super().drop(request)
        self._has_draft.discard(request)

    def num_known_tokens(self, request: Request) -> int:
        if self._speculation.is_ahead:
            return super().num_known_tokens(request)
        return request.num_computed_tokens - self._newly_right.pop(request, 0)

    def _depth_of_step(self) -> int:
        speculation = self._speculation
        if not speculation.depths and speculation.disable_by_batch_size is None:
            return speculation.depth
        num_decodes = sum(
            [
                request.num_prompt_tokens + request.num_promised_tokens == request.num_computed_tokens + 1
                and request.num_promised_tokens < request.max_output_tokens
                for request in self.requests
            ]
        )
        depth = speculation.depth_at(max(num_decodes, 1), self._estimate.value)
        if num_decodes and not depth:
            self._estimate.fade()
        return depth

    def grant(self, plan: StepPlan, budget: int, decodes: bool = True) -> int:
        most_deep = self._depth_of_step() if decodes else 0
        self._continues_prompt = False
        block_size, nodes, running = self._blocks.block_size, self._nodes, RequestStatus.RUNNING
        has_draft = self._has_draft if self._speculation.pipelined else self.requests
        for request in tuple(self.requests):
            promised, computed = request.num_promised_tokens, request.num_computed_tokens
            lacking = request.max_output_tokens - promised
            if not lacking or request.status is not running:
                continue  # done in a batch that ends together, or just preempted
            num_slots, deep = request.num_prompt_tokens + promised - computed, 0
            if num_slots == 1 and not decodes:
                continue
            under_way = self._unverified.get(request, 0)
            computed += under_way
            if under_way and computed >= self._max_model_len - 1:  # vLLM: no position for another token
                plan.is_complete = False
                continue
            if budget <= 0:
                plan.is_complete = False
                continue
            is_chunk = num_slots > 1
            if is_chunk:
                num_slots = self.chunk(num_slots, budget)
            elif most_deep and request.last_step >= 0 and request in has_draft:
                longest = most_deep
                if self._by_match:
                    longest = min(longest, self._by_match[min(request.num_matched, len(self._by_match) - 1)])
                deep = self._depth_before_end(computed, lacking, longest)
                if nodes[deep] >= budget:
                    deep = self._speculation.depth_within(deep, budget - 1)
                num_slots += nodes[deep]
            if self._blocks.gives_up_rows:
                self._release(request, computed - under_way)
            last = computed + num_slots
            if self._num_lookahead:
                last = max(last, min(last + self._num_lookahead, self._max_model_len))
            if last > len(request.block_ids) * block_size:
                if self._blocks.num_needed(request, last) > 0:  # else released blocks suffice
                    given_back = self._make_room(request, last, plan)
                    if given_back is None:  # the request itself was preempted: vLLM looks at no other
                        plan.is_complete = False
                        break
                    budget += given_back
                self._blocks.allocate(request, last)
            budget -= num_slots + self.num_input_tokens
            self._continues_prompt |= request.last_step < 0  # no token since it was admitted
            if is_chunk:
                self._grant_chunk(request, num_slots, plan)
            else:
                self._grant_decode(request, deep, plan)
        self._has_running = bool(plan)
        if not plan.num_draft_tokens and not (most_deep and (self._speculation.pipelined or self._by_match)):
            plan.draft_depths = []
        return budget

    def padding(self, plan: StepPlan, num_computed: int) -> int:
        pads = self._has_running if self._pads == "beside_running" else self._has_running or num_computed
        if self._pads == "never" or self._continues_prompt or not pads:
            return 0
        padding, waits = self._nodes[-1], self._waits_to_be_padded
        if num_computed + padding + 2 - waits <= self._max_model_len:  # the next token has room, too, unless it waits
            return padding
        return _TOO_MANY if waits else 0

    def _depth_before_end(self, num_computed: int, num_lacking: int, most_deep: int) -> int:
        """Draft depth with `num_computed` tokens computed and `num_lacking` output tokens to go."""
        if not self._speculation.past_end:
            return min(num_lacking - 1, most_deep)
        num_slots = self._max_model_len - num_computed - 2  # excluding the newest token and the certain one
        return self._speculation.depth_within(most_deep, max(num_slots, 0))

    def _grant_decode(self, request: Request, depth: int, plan: StepPlan) -> None:
        if not request.num_promised_tokens or request.last_step != plan.index - 1:
            plan.resumed.append(request)
        request.num_computed_tokens += 1
        request.num_promised_tokens += 1
        request.last_step = plan.index
        self._newly_right.pop(request, None)
        if depth:
            self._unverified[request] = self._nodes[depth]
        else:
            self._unverified.pop(request, None)
        plan.decodes.append(request)
        plan.draft_depths.append(depth)
        plan.num_draft_tokens += self._nodes[depth]

    def leave_out_ended(self, plan: StepPlan, num_accepted: Sequence[int] | None) -> Sequence[int] | None:
        """Drop from executed `plan` the requests that had ended; return `num_accepted` of the others."""
        if not self._ended:
            return num_accepted
        kept = [place for place, request in enumerate(plan.decodes) if request not in self._ended]
        self._ended.clear()
        num_before, num_left_out = plan.num_tokens, len(plan.decodes) - len(kept)
        plan.decodes = [plan.decodes[place] for place in kept]
        if plan.draft_depths:
            plan.draft_depths = [plan.draft_depths[place] for place in kept]
            plan.num_draft_tokens = sum([self._nodes[depth] for depth in plan.draft_depths])
        plan.num_wasted_tokens = num_before - plan.num_tokens
        assert num_left_out, "nothing was computed for the requests that had ended"
        return None if num_accepted is None else [num_accepted[place] for place in kept]

    def come_back(self, plan: StepPlan) -> None:
        super().come_back(plan)
        if self._unverified:
            for request in (*plan.decodes, *plan.padded):
                if request.last_step == plan.index:  # no plan since
                    self._unverified.pop(request, None)

    def take_accepted(self, plan: StepPlan, num_accepted: Sequence[int]) -> None:
        """Count the accepted drafts of each of `decodes` as computed and as output."""
        is_ahead, ahead, by_match = self._speculation.is_ahead, self.previous, self._by_match
        may_run_on = self._speculation.pipelined or bool(by_match)
        self._has_draft.clear()
        num_judged = num_right = 0
        moved: dict[Request, int] = {}  # requests that `ahead` was made for before this was known -> right drafts
        for request, depth, right in zip(plan.decodes, plan.draft_depths, num_accepted, strict=True):
            assert 0 <= right <= depth + may_run_on, f"{request} drafted {depth} tokens, not {right}"
            if by_match:
                request.num_matched = request.num_matched + right if right > depth else 0
            if right > depth:
                self._has_draft.add(request)
                right = depth
            if depth:
                num_judged += right + (right < depth)
                num_right += right
                # Nothing counts beyond the end; one more token comes in any case.
                right = min(right, request.max_output_tokens - request.num_output_tokens - 1)
                if request.status is not RequestStatus.PREEMPTED:
                    request.num_computed_tokens += right
                    if not is_ahead:
                        self._newly_right[request] = right
                request.num_promised_tokens += right
                request.num_output_tokens += right
                if ahead is not plan and request.last_step == ahead.index:
                    moved[request] = right
        self._estimate.add(num_judged, num_right)
        plan.num_accepted, plan.num_accepted_tokens = num_accepted, num_right
        if moved:
            self._move_up(ahead, moved)

    def _move_up(self, ahead: StepPlan, moved: Mapping[Request, int]) -> None:
        """Shift `ahead` by the accepted drafts in `moved`; work for requests that end now is wasted."""
        ahead.decode_context += sum(moved.values())
        for request, right in moved.items() if self._spans else ():
            now = request.num_computed_tokens
            grown = [min(now, span) - min(now - right, span) for span in self._spans]
            ahead.decode_windowed = tuple(map(add, ahead.decode_windowed, grown))
        if ahead.positions:
            ahead.positions = [
                place + moved.get(request, 0) for request, place in zip(ahead.decodes, ahead.positions, strict=True)
            ]
        self._ended.update(request for request in moved if request.num_output_tokens + 1 == request.max_output_tokens)
