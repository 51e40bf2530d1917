"""`DecodeCohort`: requests that get one token in every step, kept so that a step costs only what changes.

The cohort has one age (tokens granted to each member) and calendars from age to events: last tokens, filled attention
spans, changes of block growth (a rolling cache or window is full). Sums over members grow by their number. Members
need a block every `block_size` steps, so the calendar of blocks is a ring over remainders of the age.

With `GroupedKVBlocks` members also give up blocks, which others take or find in the prefix cache: a calendar has those
ages, and members get their blocks at once.

A member's counters (`num_computed_tokens`, `num_promised_tokens`, `num_output_tokens`, `last_token_at`, `last_step`)
keep their values from joining until it leaves; its new blocks are set aside until then."""

import heapq
from collections.abc import Collection, Iterable
from operator import attrgetter

from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request
from perfmodel.engine.token_watch import TokenWatch

_ADMISSION = attrgetter("admission")


class DecodeCohort:
    """Members hold blocks of `blocks`; `spans` are the attention spans under which contexts are summed."""

    def __init__(self, blocks: KVBlockManager, spans: tuple[int, ...]) -> None:
        self.watch: TokenWatch | None = None  # records token times, if any
        self._blocks, self._spans = blocks, spans
        self.joined: dict[Request, int] = {}  # member -> age when it joined
        self.age = 0  # tokens granted to each member by all plans so far, including those before it joined
        self.context = 0  # sum over the members of the tokens in their KV
        self.windowed = [0] * len(spans)  # for each span, the sum of min(tokens, span)
        self.growing = [0] * len(spans)  # members that have not filled the span
        self.last_index = -1  # of the last plan with a grant for the members
        self.last_token_at = 0  # end of the last executed of those plans
        self.last_admission = -1  # latest admission of any past or present member
        self._applied = 0  # age after the plans already executed
        self._dissolved = 0  # plans up to this age were for members that have been dissolved
        self._phase: dict[Request, int] = {}  # member that will need more blocks -> remainder of those ages
        self._members: list[Request] | None = None
        self._ending: dict[int, list[Request]] = {}  # age -> members whose last token it brings
        self._due = [0] * blocks.block_size  # remainder -> blocks that members need at such ages
        self._fills: list[dict[int, int]] = [{} for _ in spans]  # per span: age -> members that fill it then
        self._changing: dict[int, list[Request]] = {}  # age -> members whose block growth changes
        self._changes: list[int] = []  # heap of the ages in `_ending`, `_fills` and `_changing`
        self._gives_up_rows = blocks.gives_up_rows
        self._takers: list[dict[Request, None]] = [{} for _ in self._due] if self._gives_up_rows else []  # as `_due`
        # age -> (member that gives up blocks, age when it joined)
        self._releases: dict[int, list[tuple[Request, int]]] = {}
        self._released_at = -1  # the last age at which members gave up blocks
        self._num_in_flight = 0  # tokens of each member computed by running steps when the next is granted

    @property
    def members(self) -> list[Request]:
        """All members; the same list object until someone joins or leaves."""
        if self._members is None:
            self._members = list(self.joined)
        return self._members

    def num_computed(self, request: Request) -> int:
        """Tokens of `request`, member or not, whose KV the plans so far compute."""
        return request.num_computed_tokens + self.age - self.joined.get(request, self.age)

    def num_output(self, request: Request) -> int:
        """Existing output tokens of `request`, member or not."""
        return request.num_output_tokens + max(self._applied - self.joined.get(request, self._applied), 0)

    def join(self, request: Request) -> None:
        """Add `request`, which lacks one token to compute and decodes from the next plan on."""
        age, computed = self.age, request.num_computed_tokens
        last = age + request.max_output_tokens - request.num_promised_tokens
        self.joined[request] = age
        self._members = None
        self.last_admission = max(self.last_admission, request.admission)
        self.context += computed
        self._ending.setdefault(last, []).append(request)
        heapq.heappush(self._changes, last)
        # `due`: the age at which it has filled its blocks.
        blocks, num_held = self._blocks, len(request.block_ids)
        size, weight = blocks.block_size, blocks.weight(num_held)
        due = age - computed + 1 + num_held * size
        if due <= last and weight:  # else its blocks suffice to the end
            assert due <= age + size, f"{request} has blocks to spare, but not to its end"
            self._phase[request] = phase = due % size
            self._due[phase] += weight
            self._schedule_change(request, due, num_held, last)
            if self._gives_up_rows:
                self._takers[phase][request] = None
        if self._gives_up_rows:
            self._releases.setdefault(age + 1, []).append((request, age))
        if self.watch is not None:
            self.watch.join(request, age)
        for i, span in enumerate(self._spans) if self._spans else ():
            self.windowed[i] += min(computed, span)
            if computed < span:
                self.growing[i] += 1
                filled = age + span - computed
                if filled <= last:
                    self._fills[i][filled] = self._fills[i].get(filled, 0) + 1
                    heapq.heappush(self._changes, filled)

    def _schedule_change(self, request: Request, due: int, num_held: int, last: int) -> None:
        """Schedule the next change of block growth; `due`: the age at which it needs more than its `num_held` rows."""
        change = self._blocks.next_change(num_held)
        if change is not None:
            age = due + (change - num_held - 1) * self._blocks.block_size
            if age <= last:
                self._changing.setdefault(age, []).append(request)
                heapq.heappush(self._changes, age)

    def _change(self, request: Request) -> None:
        """Update sums for `request`, whose block growth changes now."""
        blocks, before = self._blocks, len(request.block_ids)
        self._hand_out_blocks(request, self.num_computed(request))
        num_held, phase = len(request.block_ids), self._phase[request]
        weight = blocks.weight(num_held)
        self._due[phase] += weight - blocks.weight(before)
        if weight:
            last = self.joined[request] + request.max_output_tokens - request.num_promised_tokens
            self._schedule_change(request, self.age + blocks.block_size, num_held, last)
        else:
            del self._phase[request]

    def drop_ended(self) -> None:
        """Remove members whose last token is in flight."""
        for request in self._ending.get(self.age, ()):
            if request in self.joined:
                self._leave(request)

    def leave_early(self, request: Request) -> None:
        """Remove an aborted member and its calendar entries."""
        self._leave(request)
        for calendar in (self._ending, self._changing):
            for age, requests in list(calendar.items()):
                if request in requests:
                    requests.remove(request)
                    if not requests:
                        del calendar[age]
        for span, fills in zip(self._spans, self._fills, strict=True):
            filled = self.age + span - request.num_computed_tokens
            if self.age < filled <= self.age + request.num_remaining_tokens:
                fills[filled] -= 1

    def dissolve(self) -> list[Request]:
        """Remove and return all members. Plans in flight then stand for each by itself (see `covers`)."""
        members = self.members
        for request in members:
            self._settle(request)
        self.joined, self._phase, self._members = {}, {}, None
        self.context = 0
        self._dissolved = self._applied = self.age
        self.windowed, self.growing = [0] * len(self._spans), [0] * len(self._spans)
        self._due = [0] * self._blocks.block_size
        self._takers, self._releases = [{} for _ in self._takers], {}
        self._ending, self._fills, self._changes = {}, [{} for _ in self._spans], []
        self._changing = {}
        return members

    def _leave(self, request: Request) -> None:
        self._settle(request)
        del self.joined[request]
        self._members = None
        phase = self._phase.pop(request, None)
        if phase is not None:
            self._due[phase] -= self._blocks.weight(len(request.block_ids))
            if self._gives_up_rows:
                del self._takers[phase][request]
        computed = request.num_computed_tokens
        self.context -= computed
        for i, span in enumerate(self._spans) if self._spans else ():
            self.windowed[i] -= min(computed, span)
            self.growing[i] -= computed < span

    def _settle(self, request: Request) -> None:
        joined = self.joined[request]
        granted = self.age - joined
        if granted:
            request.num_computed_tokens += granted
            request.num_promised_tokens += granted
            request.last_step = self.last_index
            self._hand_out_blocks(request, request.num_computed_tokens)
        if self._applied > joined:
            if self.watch is not None:
                self.watch.leave(request, joined, self._applied)
            request.num_output_tokens += self._applied - joined
            request.last_token_at = self.last_token_at

    def _hand_out_blocks(self, request: Request, num_computed: int) -> None:
        missing = self._blocks.num_due(request, num_computed)
        if missing > 0:
            self._blocks.hand_out(request, missing)

    def hand_out_blocks_of(self, request: Request) -> int:
        """Give a member the blocks set aside for it; return the tokens in its KV (`num_computed`)."""
        num_computed = self.num_computed(request)
        if request in self._phase:
            self._hand_out_blocks(request, num_computed)
        return num_computed

    def hand_out_blocks(self) -> None:
        """Give members the blocks set aside, for readers of block ids."""
        for request in self._phase:
            self.hand_out_blocks_of(request)

    @property
    def num_blocks_due(self) -> int:
        """Blocks that the next step takes."""
        return self._due[(self.age + 1) % self._blocks.block_size]

    @property
    def num_blocks_taken(self) -> int:
        """Blocks that the last step took for present members."""
        return self._due[self.age % self._blocks.block_size]

    def advance(self, plan: StepPlan) -> None:
        """Grant each member a token in `plan`. The blocks due must be free."""
        if self.last_index != plan.index - 1:
            plan.num_stalled = sum(joined < self.age for joined in self.joined.values())
        self.last_index = plan.index
        self._grow(1)
        if self._gives_up_rows:
            self._take_due()
        plan.cohort_age = self.age

    def _grow(self, num_steps: int) -> None:
        self.age = age = self.age + num_steps
        self.context += num_steps * len(self.joined)
        if not self._gives_up_rows:
            num_blocks = self._num_blocks_due_in(num_steps)
            if num_blocks:
                self._blocks.set_aside(num_blocks)
        for request in self._changing.pop(age, ()) if self._changing else ():
            self._change(request)
        if self._spans:
            for i, fills in enumerate(self._fills):
                self.windowed[i] += num_steps * self.growing[i]
                self.growing[i] -= fills.pop(age, 0)

    def due_to_release(self, num_in_flight: int) -> list[Request]:
        """Members that give up blocks before the next step, with `num_in_flight` tokens each in running steps."""
        age = self.age + 1
        if num_in_flight != self._num_in_flight:  # what they read is kept for a different time
            self._num_in_flight = num_in_flight
            self._releases = {age: list(self.joined.items())}
        if age in self._releases:
            self._released_at = age
        joined = self.joined
        return [request for request, since in self._releases.pop(age, ()) if joined.get(request) == since]

    def expect_release(self, request: Request, num_done: int | None) -> None:
        """Schedule the member's next release, at `num_done` tokens computed by finished steps; None: never."""
        joined = self.joined[request]
        age = self.age + 2  # in the step after the next the tokens in running steps are certain
        if joined < self.age:
            if num_done is None:
                return
            age = max(num_done - request.num_computed_tokens + joined + 1 + self._num_in_flight, age)
        self._releases.setdefault(age, []).append((request, joined))

    @property
    def num_steps_before_release(self) -> int:
        """Steps until a member gives up blocks, or has in the last one; a lower bound."""
        return 0 if self._released_at == self.age else min(self._releases, default=self._changes[0]) - self.age - 1

    def _take_due(self) -> None:
        for request in _in_turn(self._takers[self.age % self._blocks.block_size]):
            self._blocks.allocate(request, self.num_computed(request))

    def _num_blocks_due_in(self, num_steps: int) -> int:
        """Blocks that were due in the last `num_steps` steps."""
        due, size = self._due, self._blocks.block_size
        if num_steps == 1:
            return due[self.age % size]
        rounds, rest = divmod(num_steps, size)
        first = (self.age - rest + 1) % size
        count = rounds * sum(due) + sum(due[first : first + rest])
        return count + sum(due[: first + rest - size]) if first + rest > size else count

    def covers(self, plan: StepPlan) -> bool:
        """Whether `plan` granted the members together, and they have not been dissolved since."""
        return plan.cohort_age > self._dissolved

    def apply(self, plan: StepPlan, now: int) -> list[Request]:
        """Apply the members' tokens of `plan` (covered) at `now`; return requests that have their last."""
        if self.watch is not None:
            self.watch.pass_step(plan.cohort_age, self.last_token_at, now, self.joined)
        self._applied, self.last_token_at = plan.cohort_age, now
        ended = self._ending.pop(plan.cohort_age, None)
        if ended is None:
            return []
        for request in ended:
            if request in self.joined:
                self._leave(request)
            else:  # removed when the next plan was made
                request.num_output_tokens += 1
                if self.watch is not None:
                    self.watch.take(request, now)
                request.last_token_at = now
        return ended

    @property
    def num_steps_unchanged(self) -> int:
        """Further steps with the same members and linear sums."""
        if self.age in self._ending:
            return 0
        while self._changes[0] <= self.age:
            heapq.heappop(self._changes)
        return self._changes[0] - self.age

    def repeat(self, plan: StepPlan, times: int) -> None:
        """As `times` more calls of `advance`; `plan` becomes the last of those plans."""
        self.last_index += times
        if self._gives_up_rows:  # members give up and take blocks step by step
            start, size = self.age, self._blocks.block_size
            for age in range(start + 1, start + times + 1):
                if age in self._releases:
                    self.age = age - 1
                    for request in _in_turn(self.due_to_release(self._num_in_flight)):
                        num_done = self.num_computed(request) - self._num_in_flight
                        self.expect_release(request, self._blocks.release(request, num_done))
                if self._takers[age % size]:
                    self.age = age
                    self._take_due()
            self.age = start
        self._grow(times)
        plan.cohort_age = self.age

    def apply_repeated(self, times: int, now: int) -> None:
        """As `times` calls of `apply` that end no request."""
        if self.watch is not None:
            self.watch.pass_leap(self._applied + 1, self.last_token_at, self.joined)
        self._applied += times
        self.last_token_at = now


def _in_turn(requests: Collection[Request]) -> Iterable[Request]:
    return sorted(requests, key=_ADMISSION) if len(requests) > 1 else requests
