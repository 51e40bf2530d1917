"""How long users of a closed loop pause between an answer and their next request: drawn by the number of the request.

A draw depends on the seed and on the request that was answered, not on the order of events, so it is the same on every
clock, with leaps and without.
"""

__all__ = ["ThinkTime", "no_think_time", "think_time_of"]

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from perfmodel.sim.clock import TICKS_PER_S, to_ticks
from perfmodel.specs.traffic import Arrivals

ThinkTime = Callable[[int], int]  # number of the request that was answered -> ticks until the next is sent
_CHUNK = 1024
_CHUNKS_KEPT = 64  # requests in flight are near each other
_PURPOSE = 0x7468696E6B  # "think": a stream apart from those of the workload


def no_think_time(_: int) -> int:
    """The next request is sent at the tick of the answer."""
    return 0


def think_time_of(arrivals: Arrivals, seed: int) -> ThinkTime:
    """The pauses of a closed loop: of mean m and standard deviation s by a gamma distribution, which has no negative
    values; shape (m / s)^2, scale s^2 / m.

    arrivals: of the traffic; seed: of the scenario
    """
    mean, stddev = arrivals.think_time_s, arrivals.think_time_stddev_s
    if not stddev:
        ticks = to_ticks(mean)
        return no_think_time if not ticks else lambda _: ticks
    shape, scale = (mean / stddev) ** 2, stddev**2 / mean * TICKS_PER_S

    @lru_cache(_CHUNKS_KEPT)
    def chunk(number: int) -> list[int]:
        drawn = np.random.default_rng((_PURPOSE, seed, number)).gamma(shape, scale, _CHUNK)
        ticks: list[int] = np.rint(drawn).astype(np.int64).tolist()
        return ticks

    def draw(request_id: int) -> int:
        number, place = divmod(request_id, _CHUNK)
        return chunk(number)[place]

    return draw
