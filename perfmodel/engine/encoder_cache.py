"""Inputs that an encoder turns into tokens of a prompt (images, videos): which a step encodes, and which stay cached.

An input is encoded whole in the step that computes its first token, as far as the budget of a step and the cache allow;
if they do not, the prompt's chunk ends before it. Cached inputs serve every request with the same content; those that
no request needs any more go when room is needed, oldest first. Sizes in tokens of the prompt.

Source: vLLM v1, v1/core/sched/scheduler.py (`_try_schedule_encoder_inputs`, `_free_encoder_inputs`) and
v1/core/encoder_cache_manager.py; not modelled: tokens of an input that are no embeddings (separators of tiles)."""

from collections.abc import Sequence

from perfmodel.engine.config import EncoderRules
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import EncoderInput, Request


class EncoderCache:
    """Encoded inputs under `rules`, and the budget that is left of the step that is being planned."""

    def __init__(self, rules: EncoderRules) -> None:
        self._rules = rules
        self._cached: dict[object, set[Request]] = {}  # content -> who needs it
        self._unneeded: dict[object, int] = {}  # content -> tokens, oldest first
        self._held: dict[Request, set[int]] = {}  # inputs, by number, that a request needs
        self.num_free = rules.cache_size
        self._plan: StepPlan | None = None
        self._budget_left = 0

    @property
    def num_reclaimable(self) -> int:
        """Tokens that are free or cached for nobody."""
        return self.num_free + sum(self._unneeded.values())

    def fit(self, request: Request, num_computed: int, num_tokens: int, plan: StepPlan) -> tuple[int, Sequence[int]]:
        """How many of the next `num_tokens` behind `num_computed` a step can compute, and which inputs (by number) it
        encodes for them; `encode` follows if it does."""
        if plan is not self._plan:
            self._plan, self._budget_left = plan, self._rules.budget
        end, left, num_chosen = num_computed + num_tokens, self._budget_left, 0
        chosen: dict[object, int] = {}
        for number, item in enumerate(request.encoder_inputs):
            if item.end <= num_computed:
                continue
            if item.offset >= end:
                break
            if item.content in chosen or self._need(request, number):
                continue
            if self._rules.is_whole and num_computed < item.offset and end < item.end:
                return item.offset - num_computed, tuple(chosen.values())
            if item.num_tokens > left or not self._make_room(item.num_tokens + num_chosen):
                return max(item.offset - num_computed, 0), tuple(chosen.values())
            num_chosen += item.num_tokens
            left -= item.num_tokens
            chosen[item.content] = number
        return num_tokens, tuple(chosen.values())

    def encode(self, request: Request, numbers: Sequence[int], plan: StepPlan) -> None:
        """Encode inputs of `request` in `plan`, which `fit` chose."""
        for number in numbers:
            item = request.encoder_inputs[number]
            self._cached.setdefault(item.content, set()).add(request)
            self._held.setdefault(request, set()).add(number)
            self.num_free -= item.num_tokens
            self._budget_left -= item.num_tokens
        plan.encoded = (*plan.encoded, *((request, request.encoder_inputs[number]) for number in numbers))

    def take_back(self, victim: Request, plan: StepPlan) -> None:
        """Give back the budget of what `plan` encodes for `victim`."""
        self._budget_left += sum([item.num_tokens for request, item in plan.encoded if request is victim])
        plan.encoded = tuple([pair for pair in plan.encoded if pair[0] is not victim])

    def release(self, plan: StepPlan) -> bool:
        """Let go of inputs whose tokens the executed `plan` and those before it have computed; whether there were any.

        Call it before the plan's output tokens are counted."""
        before = self.num_reclaimable
        granted = {grant.request for grant in plan.chunks}
        for request in sorted(self._held, key=lambda held: held.admission):
            if request not in granted and request not in plan.decodes:
                continue
            num_ahead = request.num_promised_tokens - request.num_output_tokens if self._rules.is_ahead else 0
            num_done = request.num_computed_tokens - num_ahead
            self._let_go(request, [n for n in self._held[request] if request.encoder_inputs[n].end <= num_done])
        return self.num_reclaimable > before

    def free(self, request: Request) -> None:
        """Let go of all inputs of `request`, which ended or lost its slot."""
        self._let_go(request, list(self._held.get(request, ())))

    def _need(self, request: Request, number: int) -> bool:
        """Whether the input is cached; then `request` needs it from now on."""
        content = request.encoder_inputs[number].content
        if content not in self._cached:
            return False
        self._unneeded.pop(content, None)
        self._cached[content].add(request)
        self._held.setdefault(request, set()).add(number)
        return True

    def _make_room(self, num_tokens: int) -> bool:
        """Drop what nobody needs, oldest first, until `num_tokens` are free; False if that is not enough."""
        if num_tokens > self.num_reclaimable:
            return False
        while num_tokens > self.num_free:
            content = next(iter(self._unneeded))
            self.num_free += self._unneeded.pop(content)
            del self._cached[content]
        return True

    def _let_go(self, request: Request, numbers: Sequence[int]) -> None:
        for number in numbers:  # in the order of the set, as vLLM: the oldest goes first
            item, held = request.encoder_inputs[number], self._held[request]
            held.discard(number)
            if any(request.encoder_inputs[other].content == item.content for other in held):
                continue
            self._cached[item.content].discard(request)
            if not self._cached[item.content]:
                self._unneeded[item.content] = item.num_tokens
        if request in self._held and not self._held[request]:
            del self._held[request]


def check_inputs(inputs: Sequence[EncoderInput], rules: EncoderRules | None) -> str:
    """What is wrong with inputs of a request under `rules`, as the end of a sentence; empty if nothing."""
    if rules is None:
        return "has images, and the engine has no encoder; serve a model with one"
    most, longest = min(rules.budget, rules.cache_size), max(item.num_tokens for item in inputs)
    if longest <= most:
        return ""
    return f"has an image of {longest} tokens, above the encoder's budget of {most}; raise max_num_batched_tokens"
