"""Routers: pick one of several equal targets (replicas, or ranks of one) for a request; registered in ROUTERS.

No router scans all targets per request. Randomness is a hash of seed and request number, so one request's fate does
not change where the next goes."""

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Generic, TypeVar

from perfmodel.engine import Request
from perfmodel.sim.replica.replica import EngineRank, Replica
from perfmodel.sim.traffic.distributions import hashed

_POINTS = 128  # on a hash ring, per target: shares of the keys then differ by 1 / sqrt(128), 9 %
# Beginnings of prompts that are remembered per target: as many blocks as the prefix scorer of the Gateway API inference
# extension remembers of a server unless told otherwise (its lruCapacityPerServer).
_MAX_HOMES = 31_250


T = TypeVar("T", bound=EngineRank | Replica)


class Router(ABC, Generic[T]):
    """Chooses among the joined targets; `seed`: of random choices."""

    def __init__(self, targets: Iterable[T] = (), seed: int = 0) -> None:
        self.targets: list[T] = []
        self._seed = seed
        for target in targets:
            self.join(target)

    @abstractmethod
    def __call__(self, request: Request) -> T:
        """Target for `request`; there must be one."""

    def join(self, target: T) -> None:
        """Add `target`."""
        self.targets.append(target)

    def leave(self, target: T) -> None:
        """Remove `target` until it joins again."""
        self.targets.remove(target)


class RoundRobin(Router[T]):
    """Each target in turn."""

    _turn = -1

    def __call__(self, request: Request) -> T:
        self._turn += 1
        return self.targets[self._turn % len(self.targets)]

    def skip(self, num_turns: int) -> None:
        """Go on from the target `num_turns` later."""
        self._turn += num_turns


class RandomChoice(Router[T]):
    """A uniformly random target."""

    def __call__(self, request: Request) -> T:
        return self.targets[hashed(self._seed, request.request_id) % len(self.targets)]


class PowerOfTwo(Router[T]):
    """The less loaded of two random targets, the first in a tie (Mitzenmacher 2001)."""

    def __call__(self, request: Request) -> T:
        targets, drawn = self.targets, hashed(self._seed, request.request_id)
        count = len(targets)
        if count == 1:
            return targets[0]
        first, drawn = drawn % count, drawn // count
        a, b = targets[first], targets[(first + 1 + drawn % (count - 1)) % count]
        return b if b.num_outstanding < a.num_outstanding else a


class LeastLoaded(Router[T]):
    """Target with the least `load`, ties by lowest index.

    A heap with lazy entries: grown loads re-enter when at the top, shrunk ones when reported; O(log n) amortised."""

    def __init__(self, load: str, targets: Iterable[T] = (), seed: int = 0) -> None:
        self._load: Callable[[T], int] = attrgetter(load)
        self._live: dict[int, T] = {}
        self._entered: dict[int, int] = {}  # index -> least load among its heap entries
        self._heap: list[tuple[int, int]] = []
        self._watched: set[int] = set()
        super().__init__(targets, seed)

    def __call__(self, request: Request) -> T:
        heap, entered = self._heap, self._entered
        while True:
            entry = heap[0]
            load, index = entry
            if entered.get(index) != load:
                heapq.heappop(heap)  # stale
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


class FrontEnds(Router[T]):
    """Front ends that share the requests in turn, each with a router of its own, which knows nothing of the others'.

    make: one of ROUTERS; count: how many. Those that take turns begin anywhere, as earlier requests have left them."""

    def __init__(self, make: Callable[..., Router[T]], count: int, seed: int = 0) -> None:
        self._routers = [make(seed=hashed(seed, number)) for number in range(count)]
        for number, router in enumerate(self._routers):
            if isinstance(router, RoundRobin):
                router.skip(hashed(seed, number))
        self._turn = -1
        super().__init__(seed=seed)

    def __call__(self, request: Request) -> T:
        self._turn += 1
        return self._routers[self._turn % len(self._routers)](request)

    def join(self, target: T) -> None:
        super().join(target)
        for router in self._routers:
            router.join(target)

    def leave(self, target: T) -> None:
        super().leave(target)
        for router in self._routers:
            router.leave(target)


def _beginning(request: Request, block_size: int) -> Hashable | None:
    """First full block of the prompt; None for a shorter one (later blocks include the answer, unknown to routers)."""
    return request.block_hashes[0] if request.block_hashes and request.num_prompt_tokens >= block_size else None


class Affinity(Router[T]):
    """Requests with the same key share a target; those without one go to the least loaded target.

    The last `_MAX_HOMES` keys per target are remembered. key: of a request, given the tokens of a block"""

    def __init__(
        self, key: Callable[[Request, int], Hashable | None], targets: Iterable[T] = (), seed: int = 0
    ) -> None:
        self._key = key
        self._homes: OrderedDict[Hashable, T] = OrderedDict()
        self._fewest: LeastLoaded[T] = LeastLoaded("num_outstanding")
        super().__init__(targets, seed)

    def __call__(self, request: Request) -> T:
        key, homes = self._key(request, self.targets[0].block_size), self._homes
        if key is None:
            return self._fewest(request)
        home = homes.get(key)
        if home is None:
            home = homes[key] = self._fewest(request)
            if len(homes) > _MAX_HOMES * len(self.targets):
                homes.popitem(last=False)
        else:
            homes.move_to_end(key)
        return home

    def join(self, target: T) -> None:
        super().join(target)
        self._fewest.join(target)

    def leave(self, target: T) -> None:
        super().leave(target)
        self._fewest.leave(target)
        self._homes = OrderedDict((key, home) for key, home in self._homes.items() if home is not target)


class SessionAffinity(Router[T]):
    """Sessions stick to a target by consistent hashing (Karger et al. 1997): a leaving target moves only its own.

    Without a session the first prompt block is the key, else the request number. A key belongs to the ring arc that its
    hash falls on; each target owns the arcs that end at its points."""

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
    # KV blocks in the prompts of its requests: a router does not know answer lengths when it routes.
    "least_kv": partial(LeastLoaded, "num_prompt_blocks"),
    "least_outstanding": partial(LeastLoaded, "num_outstanding"),
    "lora_affinity": partial(Affinity, lambda request, _: request.adapter),
    "power_of_two": PowerOfTwo,
    "prefix_affinity": partial(Affinity, _beginning),
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "session_affinity": SessionAffinity,
}
