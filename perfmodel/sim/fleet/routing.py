"""Routers: which of several equal targets (replicas, or ranks of one) a request goes to; one row each in ROUTERS.

No router looks at all targets for each request, and none draws from a common stream: chance is a hash of the seed and
the request's number, so what becomes of one request does not change where the next goes.
"""

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from perfmodel.engine import Request
from perfmodel.sim.traffic.distributions import hashed

_POINTS = 128  # on a hash ring, per target: shares of the keys then differ by 1 / sqrt(128), 9 %
# Beginnings of prompts that are remembered per target: as many blocks as the prefix scorer of the Gateway API inference
# extension remembers of a server unless told otherwise (its lruCapacityPerServer).
_MOST_HOMES = 31_250


class Target(Protocol):
    """What a router looks at."""

    index: int
    block_size: int  # tokens of a KV block

    @property
    def num_outstanding(self) -> int:
        """Requests that wait or run there, or are on their way."""

    @property
    def num_prompt_blocks(self) -> int:
        """KV blocks that the prompts of those requests fill."""

    def watch(self, on_less: Callable[[int], None]) -> None:
        """Call `on_less` with the target's index whenever it has fewer requests than before."""


T = TypeVar("T", bound=Target)


class Router(ABC, Generic[T]):
    """Chooses among the targets that have joined and not left; `seed`: of what is left to chance."""

    def __init__(self, targets: Iterable[T] = (), seed: int = 0) -> None:
        self.targets: list[T] = []
        self._seed = seed
        for target in targets:
            self.join(target)

    @abstractmethod
    def __call__(self, request: Request) -> T:
        """The target that `request` goes to. There must be a target."""

    def join(self, target: T) -> None:
        """`target` takes requests from now on."""
        self.targets.append(target)

    def leave(self, target: T) -> None:
        """`target` takes no more requests, until it joins again."""
        self.targets.remove(target)


class RoundRobin(Router[T]):
    """Each target in turn."""

    _turn = -1

    def __call__(self, request: Request) -> T:
        self._turn += 1
        return self.targets[self._turn % len(self.targets)]


class RandomChoice(Router[T]):
    """Any target, all alike."""

    def __call__(self, request: Request) -> T:
        return self.targets[hashed(self._seed, request.request_id) % len(self.targets)]


class PowerOfTwo(Router[T]):
    """Picks the one with fewer requests of two targets drawn at random, the first in a tie (Mitzenmacher 2001)."""

    def __call__(self, request: Request) -> T:
        targets, drawn = self.targets, hashed(self._seed, request.request_id)
        count = len(targets)
        if count == 1:
            return targets[0]
        first, drawn = drawn % count, drawn // count
        a, b = targets[first], targets[(first + 1 + drawn % (count - 1)) % count]
        return b if b.num_outstanding < a.num_outstanding else a


class LeastLoaded(Router[T]):
    """The target that has least of what it calls `load`; among equals the one with the lowest index.

    A heap with lazy entries: a load that has grown is noticed when its entry comes to the top, and entered anew; one
    that has shrunk is entered when the target says so. Each change costs O(log n), amortised.
    """

    def __init__(self, load: str, targets: Iterable[T] = (), seed: int = 0) -> None:
        self._load: Callable[[T], int] = attrgetter(load)
        self._live: dict[int, T] = {}
        self._entered: dict[int, int] = {}  # index -> the least load under which the heap has it
        self._heap: list[tuple[int, int]] = []
        self._watched: set[int] = set()
        super().__init__(targets, seed)

    def __call__(self, request: Request) -> T:
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

    def join(self, target: T) -> None:
        super().join(target)
        self._live[target.index] = target
        if target.index not in self._watched:
            self._watched.add(target.index)
            target.watch(self._shrunk)
        self._enter(target.index, self._load(target))

    def leave(self, target: T) -> None:
        super().leave(target)
        del self._live[target.index]
        self._entered.pop(target.index, None)

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


def _beginning(request: Request, block_size: int) -> Hashable | None:
    """The first block of its prompt, if that fills one: then come those of the answer, which no router has seen."""
    return request.block_hashes[0] if request.block_hashes and request.num_prompt_tokens >= block_size else None


class PrefixAffinity(Router[T]):
    """Requests whose prompts begin with the same block share a target; others go where the fewest are outstanding.

    The beginnings that were used last are remembered, `_MOST_HOMES` for each target.
    """

    def __init__(self, targets: Iterable[T] = (), seed: int = 0) -> None:
        self._homes: OrderedDict[Hashable, T] = OrderedDict()
        self._fewest: LeastLoaded[T] = LeastLoaded("num_outstanding")
        super().__init__(targets, seed)

    def __call__(self, request: Request) -> T:
        beginning, homes = _beginning(request, self.targets[0].block_size), self._homes
        if beginning is None:
            return self._fewest(request)
        home = homes.get(beginning)
        if home is None:
            home = homes[beginning] = self._fewest(request)
            if len(homes) > _MOST_HOMES * len(self.targets):
                homes.popitem(last=False)
        else:
            homes.move_to_end(beginning)
        return home

    def join(self, target: T) -> None:
        super().join(target)
        self._fewest.join(target)

    def leave(self, target: T) -> None:
        super().leave(target)
        self._fewest.leave(target)
        self._homes = OrderedDict((beginning, home) for beginning, home in self._homes.items() if home is not target)


class SessionAffinity(Router[T]):
    """Requests of one session share a target, by consistent hashing: a target that leaves moves its own sessions only.

    Without a session, those whose prompts begin with the same block do; without either, a request goes by its number.
    Each target owns the arcs of a ring that end at its points; a key belongs to the arc that its hash falls on
    (Karger et al. 1997).
    """

    def __init__(self, targets: Iterable[T] = (), seed: int = 0) -> None:
        self._points: list[int] = []
        self._owners: dict[int, T] = {}
        super().__init__(targets, seed)

    def __call__(self, request: Request) -> T:
        key: tuple[str, Hashable] = ("request", request.request_id)
        if request.session is not None:
            key = ("session", request.session)
        elif (beginning := _beginning(request, self.targets[0].block_size)) is not None:
            key = ("prefix", beginning)
        place = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest())
        return self._owners[self._points[bisect_left(self._points, place) % len(self._points)]]

    def join(self, target: T) -> None:
        super().join(target)
        for point in self._points_of(target):
            if point not in self._owners:
                insort(self._points, point)
                self._owners[point] = target

    def leave(self, target: T) -> None:
        super().leave(target)
        for point in self._points_of(target):
            if self._owners.get(point) is target:
                del self._owners[point]
                del self._points[bisect_left(self._points, point)]

    def _points_of(self, target: T) -> list[int]:
        seed = hashed(self._seed, target.index)
        return [hashed(seed, number) for number in range(_POINTS)]


ROUTERS: dict[str, Callable[..., Router[Any]]] = {
    # KV blocks in the prompts of its requests: what answers add is not known to a router when it sends a request.
    "least_kv": partial(LeastLoaded, "num_prompt_blocks"),
    "least_outstanding": partial(LeastLoaded, "num_outstanding"),
    "power_of_two": PowerOfTwo,
    "prefix_affinity": PrefixAffinity,
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "session_affinity": SessionAffinity,
}
