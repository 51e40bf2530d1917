"""`SimulatedAcceptance`: which drafted tokens are right, drawn.

Whether the draft of an output token is right is a matter of the token: its draw is a hash of seed, request and position
in the answer, so it does not depend on who ran beside it, on the draft length, or on the order of events. Of a tree the
draw says at each depth whether any of the candidates is right, which is all that counts tokens: the candidates exclude
each other, so their probabilities add up.
"""

__all__ = ["SimulatedAcceptance", "uniform_draws"]

import numpy as np
from numpy.typing import NDArray

from perfmodel.engine import Request, StepPlan
from perfmodel.specs.engine.speculation import SpeculativeConfig

_MOST_REMEMBERED = 20_000  # requests
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class SimulatedAcceptance:
    """Judges drafts by their acceptance in `config` (which must be given), from `seed`."""

    def __init__(self, config: SpeculativeConfig, seed: int) -> None:
        assert config.acceptance is not None
        rates = config.acceptance.rates(config.depth, config.tree)
        self._rates = (*rates, rates[-1])  # pipelined, there is a token after the deepest draft
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
            right, most = 0, depth + extra
            while right < most and draws[first + right] < rates[right]:
                right += 1
            accepted.append(right)
            if first + right + 2 >= request.max_output_tokens:  # it will not draft again
                del draws_of[request.request_id]
        return accepted

    def _new_draws(self, request: Request) -> list[float]:
        if len(self._draws) >= _MOST_REMEMBERED:  # also of requests that ended without drafts
            self._draws.clear()
        draws = uniform_draws(self._seed, request.request_id, request.max_output_tokens)
        values: list[float] = draws.tolist()
        self._draws[request.request_id] = values
        return values


def uniform_draws(seed: int, request_id: int, count: int) -> NDArray[np.float64]:
    """`count` draws from [0, 1): splitmix64 (Steele et al. 2014) of a start that seed and request give."""
    start = _mixed(_mixed(seed & _MASK) + request_id & _MASK)
    state = np.uint64(start) + np.uint64(_GOLDEN) * np.arange(1, count + 1, dtype=np.uint64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    result: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _mixed(number: int) -> int:
    number = number + _GOLDEN & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
