"""`SimulatedAcceptance`: draws which drafted tokens are accepted.

Each draw is a hash of seed, request and output position, so it does not depend on batch mates, draft length or event
order. For trees a draw says at each depth whether any candidate is right: candidates exclude each other, so their
probabilities add up, and only the count matters. For suffix decoding it meets the rate after so many right ones in a
row."""

from perfmodel.engine import Request, StepPlan
from perfmodel.sim.traffic.distributions import uniform_draws
from perfmodel.specs.engine.speculation import SpeculativeConfig

_MAX_REMEMBERED = 20_000  # requests


class SimulatedAcceptance:
    """Judges drafts by the acceptance rates of `config` (required), with draws from `seed`."""

    def __init__(self, config: SpeculativeConfig, seed: int) -> None:
        assert config.acceptance is not None
        self._by_match = bool(config.depth_by_match)
        longest = max(config.depth, len(config.acceptance.per_position or ()) if self._by_match else 0)
        rates = config.acceptance.rates(longest, config.tree)
        extra = 1 + config.depth * self._by_match  # there may be a token after the deepest draft
        self._rates, self._last = (*rates, *rates[-1:] * extra), longest
        self._offered = max(config.acceptance.share_offered, rates[0])
        self._seed = seed
        self._runs_on = config.pipelined or self._by_match
        self._draws: dict[int, list[float]] = {}  # request id -> a draw per output token

    def judge(self, plan: StepPlan) -> list[int] | None:
        """`Outcome.num_accepted` for `plan`."""
        if not plan.draft_depths:
            return None
        rates, draws_of, extra, by_match = self._rates, self._draws, self._runs_on, self._by_match
        accepted = []
        for request, depth in zip(plan.decodes, plan.draft_depths, strict=True):
            draws = draws_of.get(request.request_id) or self._new_draws(request)
            first = request.num_output_tokens
            # Nothing is drawn beyond the end of the answer: verifications there do not count.
            right, most = 0, min(depth, request.max_output_tokens - first - 1) + extra
            run = min(request.num_matched, self._last) if by_match else 0
            while right < most and draws[first + right] < rates[run + right]:
                right += 1
            accepted.append(right)
            if first + right + 2 >= request.max_output_tokens:  # it will not draft again
                del draws_of[request.request_id]
        return accepted

    def offered(self, plan: StepPlan) -> list[int]:
        """`StepPlan.draft_depths`, 0 where the first token's draw is beyond the share of steps with a proposal."""
        if self._offered >= 1.0:
            return plan.draft_depths
        share = self._offered
        return [
            depth if self._draw_of(request) < share else 0
            for request, depth in zip(plan.decodes, plan.draft_depths, strict=True)
        ]

    def _draw_of(self, request: Request) -> float:
        """Draw for the next token of `request`; for its last if it ended since the plan was made."""
        draws = self._draws.get(request.request_id) or self._new_draws(request)
        return draws[min(request.num_output_tokens, request.max_output_tokens - 1)]

    def _new_draws(self, request: Request) -> list[float]:
        if len(self._draws) >= _MAX_REMEMBERED:  # requests that end without drafts are never removed
            self._draws.clear()
        values: list[float] = uniform_draws(self._seed, request.request_id, request.max_output_tokens).tolist()
        self._draws[request.request_id] = values
        return values
