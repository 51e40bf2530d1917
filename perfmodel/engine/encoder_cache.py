"""Inputs that an encoder turns into tokens of a prompt (images, videos): which a step encodes, and which stay cached.

An input is encoded whole in the step that computes its first token, as far as the budget of a step and the cache allow;
if they do not, the prompt's chunk ends before it. Cached inputs serve every request with the same content; those that
no request needs any more go when room is needed, oldest first. Sizes in tokens of the prompt.

Source: vLLM v1, v1/core/sched/scheduler.py (`_try_schedule_encoder_inputs`, `_free_encoder_inputs`) and
v1/core/encoder_cache_manager.py; not modelled: tokens of an input that are no embeddings (separators of tiles)."""

from collections.abc import Sequence

from perfmodel.engine.config import EncoderRules
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request


class EncoderCache:
    """Encoded inputs under `rules`, and the budget that is left of the step that is being planned."""

    def __init__(self, rules: EncoderRules) -> None:
        self._rules, self.num_free = rules, rules.cache_size
        self._needed_by: dict[object, set[Request]] = {}  # by content, of all that are cached
        self._unneeded: dict[object, int] = {}  # content -> tokens, oldest first
        self._held: dict[Request, set[int]] = {}  # inputs, by number, that a request needs
        self._plan, self._budget_left = StepPlan(-1), 0

    @property
    def num_reclaimable(self) -> int:
        """Tokens that are free or cached for nobody."""
        return self.num_free + sum(self._unneeded.values())

    def fit(self, request: Request, num_computed: int, num_tokens: int, plan: StepPlan) -> tuple[int, Sequence[int]]:
        """How many of the next `num_tokens` of `request` behind `num_computed` can be computed in `plan`, and which
        inputs (by number) are encoded for them; `encode` follows if they are."""
        if plan is not self._plan:
            self._plan, self._budget_left = plan, self._rules.budget
        end, num_chosen, chosen = num_computed + num_tokens, 0, dict[object, int]()
        budget_left = self._budget_left
        for number, item in enumerate(request.encoder_inputs):
            if item.end <= num_computed:
                continue
            if item.offset >= end:
                break
            if item.content in chosen or self._need(request, number):
                continue
            is_cut = self._rules.is_whole and num_computed < item.offset and end < item.end
            num_chosen += item.num_tokens
            if is_cut or item.num_tokens > budget_left or not self._make_room(num_chosen):
                num_tokens = max(item.offset - num_computed, 0)
                break
            chosen[item.content] = number
            budget_left -= 0 if item.is_external else item.num_tokens
        return num_tokens, tuple(chosen.values())

    def encode(self, request: Request, numbers: Sequence[int], plan: StepPlan) -> None:
        """Encode inputs of `request` in `plan`, which `fit` chose."""
        for item in (request.encoder_inputs[number] for number in numbers):
            self._needed_by.setdefault(item.content, set()).add(request)
            self.num_free -= item.num_tokens
            if not item.is_external:
                self._budget_left -= item.num_tokens
                plan.encoded = (*plan.encoded, (request, item))
        self._held.setdefault(request, set()).update(numbers)

    def take_back(self, victim: Request, plan: StepPlan) -> None:
        """Give back the budget of what `plan` encodes for `victim`."""
        self._budget_left += sum([item.num_tokens for request, item in plan.encoded if request is victim])
        plan.encoded = tuple([pair for pair in plan.encoded if pair[0] is not victim])

    def release(self, plan: StepPlan) -> bool:
        """Let go of inputs whose tokens the executed `plan` and those before it have computed; whether there were any.

        Call it before the plan's output tokens are counted."""
        before, granted = self.num_reclaimable, {grant.request for grant in plan.chunks}
        for request in sorted(self._held, key=lambda held: held.admission):
            if request in granted or request in plan.decodes:
                num_ahead = request.num_promised_tokens - request.num_output_tokens if self._rules.is_ahead else 0
                num_done, inputs = request.num_computed_tokens - num_ahead, request.encoder_inputs
                self._let_go(request, [number for number in self._held[request] if inputs[number].end <= num_done])
        return self.num_reclaimable > before

    def free(self, request: Request) -> None:
        """Let go of all inputs of `request`, which ended or lost its slot."""
        self._let_go(request, list(self._held.get(request, ())))

    def forget_all(self) -> None:
        """Clear the cache; no request may need an input."""
        assert not self._held, "a request still needs an input"
        self._make_room(self._rules.cache_size)

    def _need(self, request: Request, number: int) -> bool:
        """Whether the input is cached; then `request` needs it from now on."""
        content = request.encoder_inputs[number].content
        if content not in self._needed_by:
            return False
        self._unneeded.pop(content, None)
        self._needed_by[content].add(request)
        self._held.setdefault(request, set()).add(number)
        return True

    def _make_room(self, num_tokens: int) -> bool:
        """Drop what nobody needs, oldest first, until `num_tokens` are free; False if that is not enough."""
        if num_tokens > self.num_reclaimable:
            return False
        while num_tokens > self.num_free:
            content = next(iter(self._unneeded))
            self.num_free += self._unneeded.pop(content)
            del self._needed_by[content]
        return True

    def _let_go(self, request: Request, numbers: Sequence[int]) -> None:
        for number in numbers:  # in the order of the set, as vLLM: the oldest goes first
            item, held = request.encoder_inputs[number], self._held[request]
            held.discard(number)
            if not any(request.encoder_inputs[other].content == item.content for other in held):
                self._needed_by[item.content].discard(request)
                if not self._needed_by[item.content]:
                    self._unneeded[item.content] = item.num_tokens
        if not self._held.get(request, True):
            del self._held[request]
