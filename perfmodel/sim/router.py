"""Routers: which of several equal targets (replicas, or ranks of one) a request goes to. One function each."""

__all__ = ["ROUTERS", "MakeRouter", "Router", "Target", "least_outstanding", "prefix_affinity", "round_robin"]

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol, TypeVar

from perfmodel.engine import Request
from perfmodel.sim.replica import Replica


class Target(Protocol):
    """What a router looks at."""

    @property
    def num_outstanding(self) -> int:
        """Requests that wait or run there."""
        ...


T = TypeVar("T", bound=Target)
Router = Callable[[Request], Replica]


def round_robin(targets: Sequence[T]) -> Callable[[Request], T]:
    """Each target in turn."""
    turn = count()
    return lambda request: targets[next(turn) % len(targets)]


def least_outstanding(targets: Sequence[T]) -> Callable[[Request], T]:
    """The target with the fewest requests that wait or run; the first among equals."""
    return lambda request: min(targets, key=lambda target: target.num_outstanding)


def prefix_affinity(targets: Sequence[T]) -> Callable[[Request], T]:
    """Requests whose prompts begin with the same block share a target; others go where the fewest are outstanding."""
    homes: dict[object, T] = {}
    fewest = least_outstanding(targets)

    def route(request: Request) -> T:
        if not request.block_hashes:
            return fewest(request)
        beginning = request.block_hashes[0]
        home = homes.get(beginning)
        if home is None:
            home = homes[beginning] = fewest(request)
        return home

    return route


class MakeRouter(Protocol):
    """One of the functions above."""

    def __call__(self, targets: Sequence[T], /) -> Callable[[Request], T]: ...


ROUTERS: dict[str, MakeRouter] = {
    "least_outstanding": least_outstanding,
    "prefix_affinity": prefix_affinity,
    "round_robin": round_robin,
}
