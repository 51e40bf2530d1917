"""`HashRing`: consistent hashing (Karger et al. 1997)."""

__all__ = ["HashRing", "Indexed"]

from bisect import bisect_left, insort
from collections.abc import Hashable
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

from perfmodel.sim.traffic.hashed import hashed

_POINTS = 128  # per target: shares of the keys then differ by 1 / sqrt(128), 9 %


class Indexed(Protocol):
    """What has a number of its own."""

    index: int


T = TypeVar("T", bound=Indexed)


class HashRing(Generic[T]):
    """Each target owns the arcs of a ring that end at its points; a key belongs to the arc that its hash falls on."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._points: list[int] = []
        self._owners: dict[int, T] = {}

    def join(self, target: T) -> None:
        """`target` takes its arcs from those who had them."""
        for point in self._points_of(target):
            if point not in self._owners:
                insort(self._points, point)
                self._owners[point] = target

    def leave(self, target: T) -> None:
        """The arcs of `target` fall to those behind them."""
        for point in self._points_of(target):
            if self._owners.get(point) is target:
                del self._owners[point]
                del self._points[bisect_left(self._points, point)]

    def at(self, key: Hashable) -> T:
        """The owner of `key`, which is hashed by its `repr`."""
        place = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest())
        return self._owners[self._points[bisect_left(self._points, place) % len(self._points)]]

    def _points_of(self, target: T) -> list[int]:
        seed = hashed(self._seed, target.index)
        return [hashed(seed, number) for number in range(_POINTS)]
