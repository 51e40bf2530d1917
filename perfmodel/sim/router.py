"""Routers: which replica a request goes to. One function each, entered in ROUTERS."""

__all__ = ["ROUTERS", "Router", "least_outstanding", "prefix_affinity", "round_robin"]

from collections.abc import Callable, Sequence
from itertools import count

from perfmodel.engine import Request
from perfmodel.sim.replica import Replica

Router = Callable[[Request], Replica]


def round_robin(replicas: Sequence[Replica]) -> Router:
    """Each replica in turn."""
    turn = count()
    return lambda request: replicas[next(turn) % len(replicas)]


def least_outstanding(replicas: Sequence[Replica]) -> Router:
    """The replica with the fewest requests that wait or run; the first among equals."""
    return lambda request: min(replicas, key=lambda replica: replica.num_outstanding)


def prefix_affinity(replicas: Sequence[Replica]) -> Router:
    """Requests whose prompts begin with the same block share a replica; others go where the fewest are outstanding."""
    homes: dict[object, Replica] = {}
    fewest = least_outstanding(replicas)

    def route(request: Request) -> Replica:
        if not request.block_hashes:
            return fewest(request)
        beginning = request.block_hashes[0]
        home = homes.get(beginning)
        if home is None:
            home = homes[beginning] = fewest(request)
        return home

    return route


ROUTERS: dict[str, Callable[[Sequence[Replica]], Router]] = {
    "least_outstanding": least_outstanding,
    "prefix_affinity": prefix_affinity,
    "round_robin": round_robin,
}
