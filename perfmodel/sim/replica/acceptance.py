"""`SimulatedAcceptance`: which drafted tokens are right, drawn.

Whether the draft of an output token is right is a matter of the token: its draw is a hash of seed, request and position
in the answer, so it does not depend on who ran beside it, on the draft length, or on the order of events. Of a tree the
draw says at each depth whether any of the candidates is right, which is all that counts tokens: the candidates exclude
each other, so their probabilities add up.
"""

from perfmodel.engine import Request, StepPlan
from perfmodel.sim.traffic.distributions import uniform_draws
from perfmodel.specs.engine.speculation import SpeculativeConfig

_MOST_REMEMBERED = 20_000  # requests


class SimulatedAcceptance:
    """Judges drafts by their acceptance in `config` (which must be given), from `seed`."""

    def __init__(self, config: SpeculativeConfig, seed: int) -> None:
        assert config.acceptance is not None
        rates = config.acceptance.rates(config.depth, config.tree)
        self._rates = (*rates, rates[-1])  # pipelined, there is a token after the deepest draft
        self._offered = max(config.acceptance.share_offered, rates[0])
        self._seed = seed
        self._is_pipelined = config.pipelined
        self._draws: dict[int, list[float]] = {}  # request id -> a draw for each of its output tokens

    def judge(self, plan: StepPlan) -> list[int] | None:
        """`Outcome.num_accepted` of the plan."""
        if not plan.draft_depths:
            return None
        rates, draws_of, extra = self._rates, self._draws, self._is_pipelined
        accepted = []
        for request, depth in zip(plan.decodes, plan.draft_depths, strict=True):
            draws = draws_of.get(request.request_id) or self._new_draws(request)
            first = request.num_output_tokens
            # Beyond its end nothing is drawn: what a verification finds there does not count.
            right, most = 0, min(depth, request.max_output_tokens - first - 1) + extra
            while right < most and draws[first + right] < rates[right]:
                right += 1
            accepted.append(right)
            if first + right + 2 >= request.max_output_tokens:  # it will not draft again
                del draws_of[request.request_id]
        return accepted

    def offered(self, plan: StepPlan) -> list[int]:
        """`StepPlan.draft_depths`, 0 where the drafter has nothing to offer: where a first token is not only wrong, but
        beyond the share of steps in which there is one."""
        if self._offered >= 1.0:
            return plan.draft_depths
        share = self._offered
        return [
            depth if self._draw_of(request) < share else 0
            for request, depth in zip(plan.decodes, plan.draft_depths, strict=True)
        ]

    def _draw_of(self, request: Request) -> float:
        """The draw of the next token of `request`; of its last where it has ended since the plan was made."""
        draws = self._draws.get(request.request_id) or self._new_draws(request)
        return draws[min(request.num_output_tokens, request.max_output_tokens - 1)]

    def _new_draws(self, request: Request) -> list[float]:
        if len(self._draws) >= _MOST_REMEMBERED:  # also of requests that ended without drafts
            self._draws.clear()
        draws = uniform_draws(self._seed, request.request_id, request.max_output_tokens)
        values: list[float] = draws.tolist()
        self._draws[request.request_id] = values
        return values
