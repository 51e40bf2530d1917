"""`PipelinedRequests`: who runs, where several plans are under way at once, on their way through pipeline stages.

A request whose next token is being computed by one of them is granted nothing until that has come back: the first
stage needs it. What it still lacks of its prompt may follow in the next plan at once, since counts advance when a plan
is made. So requests that were once granted their token together stay together, and are not moved from one plan to
another to make plans equal, as in vLLM v1; other engines limit the sequences of a plan (`max_plan_seqs`), so that those
beyond them go into the next.

Which requests a plan finds is different from plan to plan, so there is no cohort: each is looked at when it is back.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter

from perfmodel.engine.admission import Policy
from perfmodel.engine.config import SchedulerConfig
from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request, RequestStatus
from perfmodel.engine.running import RunningRequests

_ADMISSION = attrgetter("admission")


class PipelinedRequests(RunningRequests):
    """As its base, for a `config` with a pipeline_parallel_size above 1.

    blocks, key, on_preempted: as of `RunningRequests`
    """

    def __init__(
        self, config: SchedulerConfig, blocks: KVBlockManager, key: Policy, on_preempted: Callable[[Request], None]
    ) -> None:
        super().__init__(config, blocks, key, on_preempted)
        self._most_in_plan = config.max_plan_seqs or config.max_num_seqs
        self._ready: dict[Request, None] = {}  # those that lack something, and wait for no token that is under way
        self._last_back = -1  # index of the last plan that came back

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def has_place(self, plan: StepPlan, most: int) -> bool:
        in_plan = len(plan.decodes) + len(plan.singles) + len(plan.chunks)
        return in_plan < self._most_in_plan and super().has_place(plan, most)

    def admit(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        super().admit(request, num_new_tokens, plan)
        self._forget_cohort()
        if request.num_promised_tokens == request.num_output_tokens:
            self._ready[request] = None

    def drop(self, request: Request) -> None:
        super().drop(request)
        self._ready.pop(request, None)

    def grant(self, plan: StepPlan, budget: int, decodes: bool = True) -> int:
        grant = self._grant_sequences(plan, budget) if self._recomputes else self._grant_in_order(plan, budget, decodes)
        for under_way in (plan.decodes, plan.samples):
            for request in under_way:
                self._ready.pop(request, None)
        return grant

    def num_known_tokens(self, request: Request) -> int:
        return request.num_computed_tokens  # all tokens were known when they were granted

    def is_under_way(self, request: Request) -> bool:
        return any(
            request in plan.decodes or any(grant.request is request for grant in plan.chunks)
            for plan in self._under_way
        )

    def send_out(self, plan: StepPlan) -> None:
        self._under_way.append(plan)

    def come_back(self, plan: StepPlan) -> None:
        if not plan:
            return  # it has the index of the next one
        self._last_back = plan.index
        self._under_way = [other for other in self._under_way if other.index > plan.index]
        for under_way in (plan.decodes, plan.samples):
            for request in under_way:
                if request.status is RequestStatus.RUNNING and request.num_promised_tokens < request.max_output_tokens:
                    self._ready[request] = None

    def _in_turn(self) -> Iterable[Request]:
        return sorted(self._ready, key=_ADMISSION)[: self._most_in_plan]

    def _index_before(self, plan: StepPlan) -> int:
        return self._last_back

    def _preempt(self, victim: Request, plan: StepPlan, num_computed: int, num_known: int) -> None:
        super()._preempt(victim, plan, num_computed, num_known)
        self._ready.pop(victim, None)

    def _sort_out(self) -> None:
        self._forget_cohort()

    def _forget_cohort(self) -> None:
        """No request has to leave those that decode together."""
        self._prompts.clear()
        self._joining.clear()

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._ready.keys() <= self.requests.keys()
        for request in self.requests:
            if request.status is not RequestStatus.RUNNING or not request.num_remaining_tokens:
                assert request not in self._ready, f"{request} has nothing left to be granted"
            else:
                is_under_way = request.num_promised_tokens > request.num_output_tokens
                assert is_under_way != (request in self._ready), f"{request} is lost, or granted twice"
