"""`RetractingRequests`: who runs under an engine that decodes all or, where blocks run short, all but a few (SGLang).

Decodes are granted together, without a token budget. If the blocks for their next tokens are missing, requests are
retracted, those with the shortest answers so far first and of these the longest prompts, until the others fit; one
always stays. What the tree has of a retracted request stays in the cache, a token of it in flight is dropped, and it
waits behind all others. A step in which blocks are missing that requests with their last token in flight are about to
give back decodes nothing.
"""

from collections.abc import Callable, Sequence

from perfmodel.engine.config import Estimates, SchedulerConfig
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.radix_blocks import RadixKVBlocks
from perfmodel.engine.request import Request
from perfmodel.engine.running import RunningRequests


class RetractingRequests(RunningRequests):
    """Runs requests over `radix` under `config` and its estimates, `rules`; `on_preempted` is called with each that is
    retracted. `requests` is in the order in which they came to run.

    ratio:   the share of their longest answers that running requests are expected to give
    dropped: (plan, request) of samples that come in vain
    """

    def __init__(
        self, config: SchedulerConfig, radix: RadixKVBlocks, on_preempted: Callable[[Request], None], rules: Estimates
    ) -> None:
        super().__init__(config, radix, lambda request: (request.arrival,), on_preempted)
        self._radix = radix
        self._rules = rules
        self.ratio = rules.first_ratio
        self.dropped: set[tuple[StepPlan, Request]] = set()

    @property
    def unfinished_prompt(self) -> Request | None:
        """The request whose prompt is computed in part, of which there is at most one."""
        return self._prompts[0] if self._prompts else None

    def continue_prompt(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        """Grant `request`, the unfinished one, more of its prompt."""
        if self._grant_prompt(request, num_new_tokens, plan):
            self._prompts.remove(request)

    def num_expected(self, request: Request) -> float:
        """Tokens that `request`, which runs, may still need."""
        rules = self._rules
        left = min(request.max_output_tokens - self.cohort.num_output(request), rules.most_output_tokens)
        return left * (self.ratio if rules.ends_early else 1.0)

    def decode(self, plan: StepPlan, beside: Sequence[Request] = ()) -> bool:
        """Grant all who decode a token; False if there are no blocks for that. Nobody gives way for it in a plan that
        ends the prompts of `beside`, who do not decode yet."""
        cohort, radix, may_retract = self.cohort, self._radix, not plan.chunks and not plan.singles
        cohort.drop_ended()
        begun = [request for request in self._joining if request in beside]
        self._joining = [request for request in self._joining if request not in beside]
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
        """So many more steps of the decode before."""
        self._decay(num_steps)
        self._radix.want(len(self.cohort.joined) - self.cohort.num_blocks_taken)

    def _retract(self, plan: StepPlan) -> None:
        """Send requests back until the others can decode."""
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
        """`requests` come before those that have decoded beside their prompts."""
        first = dict.fromkeys(requests)
        self.requests = {**first, **{request: None for request in self.requests if request not in first}}
