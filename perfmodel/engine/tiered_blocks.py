"""`TieredBlocks`: a second tier that is written through, loads beside steps, or has further tiers behind it.

Prompts' blocks are offered to the host when a plan has computed them, each once by each request, and copied with their
first or a later offer; or when the device reuses them. What is copied to the host is copied on to all tiers behind it.
From there it comes back through the host, which a request in the queue may have to wait for.
Source: vLLM 0.30 (v1/kv_offload/cpu/manager.py, tiering/manager.py, offloading/scheduler.py of its connectors);
SGLang's HiCache (policies of writing and prefetching)."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from perfmodel.engine.host_blocks import HostBlocks
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request

_MAX_COUNTED = 64_000  # contents whose offers are counted, the last ones (vLLM's max_tracker_size)
Arrive = Callable[[Sequence[Hashable]], None]
Stop = Callable[[], None]


class BlockStores(Protocol):
    """Tiers behind the host. How long their copies take is not the engine's to know."""

    def holds(self, content: Hashable) -> bool: ...

    def put(self, contents: Sequence[Hashable]) -> None:
        """Begin to copy `contents` from the host to all stores."""

    def fetch(self, contents: Sequence[Hashable], arrive: Arrive, done: Stop) -> Stop | None:
        """Begin to copy `contents` to the host, and return what stops that; None if computing them is faster. `arrive`
        is called with contents as they come, `done` at the end."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """What a request's fetch brings; `stop` ends it, None: it is over, or was not worthwhile."""

    contents: Sequence[Hashable]
    stop: Stop | None = None


class TieredBlocks(HostBlocks):
    """`HostBlocks` in an engine with blocks of `block_size` tokens; capacity, least_tokens, is_awaited: see there.

    is_async:    a request's KV comes into its blocks beside steps, and it waits (vLLM's WAITING_FOR_REMOTE_KVS)
    store_after: offers until a block is copied; 0: when the device reuses it
    stores:      tiers behind the host; prefetches: they are read from a request's arrival on, not from its turn
    passes_on:   what the device reuses begins its way to the stores in that step
    waits:       a request waits for what comes from them; else it takes what has come (best effort)
    is_shared:   what one request has loaded others find on the device, so they wait for it"""

    def __init__(
        self,
        capacity: int,
        block_size: int,
        least_tokens: int = 1,
        is_awaited: bool = False,
        is_async: bool = False,
        store_after: int = 0,
        stores: BlockStores | None = None,
        prefetches: bool = False,
        waits: bool = True,
        is_shared: bool = True,
    ) -> None:
        super().__init__(capacity, least_tokens, is_awaited)
        self.is_async, self.can_wait, self.prefetches = is_async, is_async or stores is not None, prefetches
        self._block_size, self._store_after, self._stores = block_size, store_after, stores
        self._waits, self._is_shared = waits, is_shared
        self.passes_on = stores is not None and not store_after
        self._num_offers: OrderedDict[Hashable, int] = OrderedDict()
        self._new: list[Hashable] = []  # copied here since the last plan
        self._loads: dict[Request, frozenset[Hashable]] = {}  # on their way to the device
        self._loading: set[Hashable] = set()  # of all loads
        self._fetches: dict[Request, _Fetch] = {}  # until the request gets its blocks; it has one at most
        self._coming: set[Hashable] = set()  # of all fetches
        self._blockers: dict[Request, Hashable] = {}  # what a request waits for, of these

    def keep(self, content: Hashable, block: int) -> None:
        if not self._store_after:
            self._store(content, block)

    def park(self, request: Request, num_tokens: int, num_blocks: int) -> bool:
        return not self._store_after and super().park(request, num_tokens, num_blocks)

    def finalize(self, plan: StepPlan) -> None:
        if self._store_after:
            for request in [*(grant.request for grant in plan.chunks), *plan.singles]:
                self._offer(request)
        if self._new and self._stores is not None:
            self._stores.put(self._new)
        self._new = []
        super().finalize(plan)

    def _offer(self, request: Request) -> None:
        first = request.num_offered_blocks
        last = min(request.num_computed_tokens, request.num_prompt_tokens) // self._block_size
        request.num_offered_blocks = max(first, last)
        for content in request.name_blocks(last)[first:]:
            if self._store_after == 1 or self._count(content) >= self._store_after:
                self._store(content, 0)

    def _count(self, content: Hashable) -> int:
        count = self._num_offers[content] = self._num_offers.pop(content, 0) + 1
        if len(self._num_offers) > _MAX_COUNTED:
            self._num_offers.popitem(last=False)
        return count

    def _store(self, content: Hashable, block: int) -> None:
        num_stored = self.num_stored
        super().keep(content, block)
        self._new += [content] * (self.num_stored - num_stored)

    def prefetch(self, request: Request, num_cached_blocks: int) -> None:
        if self._stores is None or request in self._parked:
            return
        contents: list[Hashable] = []
        for content in request.contents[num_cached_blocks : self.num_reusable(request, self._block_size)]:
            if content in self._contents:
                self._contents.move_to_end(content)  # else what comes may take its place
            elif self._stores.holds(content) and content not in self._coming:
                contents.append(content)
            elif content not in self._coming:
                break
        fetch = self._fetches[request] = _Fetch(contents)
        if contents:
            fetch.stop = self._stores.fetch(contents, self._arrive, partial(self._end_fetch, fetch))
        if fetch.stop is not None:
            self._coming.update(contents)

    def must_wait(self, request: Request, num_cached: int, block_size: int) -> bool:
        if self._blockers.get(request) in self._coming:
            return True
        first = num_cached // block_size
        if self._stores is not None and request not in self._fetches:
            self.prefetch(request, first)
        for content in request.contents[first : self.num_reusable(request, block_size)]:
            if self._waits and content in self._coming:
                self._blockers[request] = content
                return True
            if content not in self._contents:
                break
            if content in self._loading:
                return True
        self._stop_fetch(request)
        return False

    def _arrive(self, contents: Sequence[Hashable]) -> None:
        for content in contents:
            self._coming.discard(content)
            if content in self._contents:
                self._contents.move_to_end(content)
            elif self._make_room(1):
                self._contents[content] = None

    def _end_fetch(self, fetch: "_Fetch") -> None:
        fetch.stop = None
        self._coming.difference_update(fetch.contents)

    def _stop_fetch(self, request: Request) -> None:
        fetch = self._fetches.get(request)
        if fetch is not None and fetch.stop is not None:
            fetch.stop()
            self._end_fetch(fetch)

    def restore(self, request: Request, num_cached: int, num_ready: int, block_size: int) -> int:
        """As `HostBlocks`: `request` has `num_cached` tokens and gets `num_ready`, in blocks of `block_size`."""
        number = super().restore(request, num_cached, num_ready, block_size)
        self._fetches.pop(request, None)
        if num_ready > num_cached:  # those behind are offered, maybe again
            request.num_offered_blocks = num_ready // block_size
        if self.is_async and self._is_shared and num_ready > num_cached:
            contents = frozenset(request.contents[num_cached // block_size : num_ready // block_size])
            self._loads[request] = contents
            self._loading |= contents
        return number

    def end_load(self, request: Request) -> None:
        self._loading -= self._loads.pop(request, frozenset())

    def forget(self, request: Request) -> None:
        self._stop_fetch(request)
        self._fetches.pop(request, None)
        self._blockers.pop(request, None)
        self.end_load(request)
        super().forget(request)
