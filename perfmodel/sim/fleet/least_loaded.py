"""`LeastLoaded`: the target with the least load, without looking at all of them.

A heap with lazy entries. A load that has grown is noticed when its entry comes to the top, and entered anew; one that
has shrunk is entered when the target says so, and its old entry is passed over. Each change costs O(log n), amortised.
"""

__all__ = ["LeastLoaded"]

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class _Loaded(Protocol):
    """What has a load, and says when it has shrunk."""

    index: int

    def watch(self, on_less: Callable[[int], None]) -> None:
        """Call `on_less` with the index whenever the load has shrunk."""
        ...


T = TypeVar("T", bound=_Loaded)


class LeastLoaded(Generic[T]):
    """Targets by `load`; among equals the one with the lowest index is the least."""

    def __init__(self, load: Callable[[T], int]) -> None:
        self._load = load
        self._live: dict[int, T] = {}
        self._entered: dict[int, int] = {}  # index -> the least load under which the heap has it
        self._heap: list[tuple[int, int]] = []
        self._watched: set[int] = set()

    def join(self, target: T) -> None:
        """`target` counts from now on."""
        self._live[target.index] = target
        if target.index not in self._watched:
            self._watched.add(target.index)
            target.watch(self._shrunk)
        self._enter(target.index, self._load(target))

    def leave(self, target: T) -> None:
        """`target` does not count any more."""
        del self._live[target.index]
        self._entered.pop(target.index, None)

    def least(self) -> T:
        """The target with the least load. Raises IndexError if there is none."""
        heap, entered = self._heap, self._entered
        while True:
            entry = heap[0]
            load, index = entry
            if entered.get(index) != load:
                heapq.heappop(heap)  # out of date, or gone
                continue
            target = self._live[index]
            now = self._load(target)
            if now == load:
                return target
            entered[index] = now
            heapq.heapreplace(heap, (now, index))

    def _shrunk(self, index: int) -> None:
        target = self._live.get(index)
        if target is not None and (load := self._load(target)) < self._entered[index]:
            self._enter(index, load)

    def _enter(self, index: int, load: int) -> None:
        self._entered[index] = load
        if len(self._heap) > 4 * len(self._live) + 64:
            self._heap = [(known, i) for i, known in self._entered.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (load, index))
