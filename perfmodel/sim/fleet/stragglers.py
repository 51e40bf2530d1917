"""`add_stragglers`: replicas that are slower than others for a while."""

__all__ = ["add_stragglers"]

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.fleet.fleet import Fleet
from perfmodel.specs.autoscaling import Slowdown


def add_stragglers(env: TickEnvironment, slowdowns: Sequence[Slowdown], fleets: Mapping[int, Fleet]) -> None:
    """Let replicas of `fleets`, by the numbers of their pools, be as slow as `slowdowns` say; several multiply."""
    factors: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def change(slowdown: Slowdown, is_over: bool) -> None:
        mine = factors[slowdown.pool, slowdown.replica]
        (mine.remove if is_over else mine.append)(slowdown.factor)
        for rank in fleets[slowdown.pool].pool.ranks[slowdown.replica]:
            rank.slow_down(prod(sorted(mine)))

    for each in slowdowns:
        begin = to_ticks(each.at_s)
        Alarm(env, begin, lambda _, each=each: change(each, is_over=False), ARRIVAL_PRIORITY)  # type: ignore[misc]
        if each.for_s is not None:
            end = begin + to_ticks(each.for_s)
            Alarm(env, end, lambda _, each=each: change(each, is_over=True), ARRIVAL_PRIORITY)  # type: ignore[misc]
