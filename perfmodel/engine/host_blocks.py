"""`HostBlocks`: KV blocks offloaded to a second tier, from which they can be restored.

It has all blocks of preempted requests until they run again, and shared blocks evicted from the device's prefix cache
(LRU). The former evict the latter."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request


class HostCopies:
    """Block copies of each plan to the tier, (block, slot), and back, (slot, block), for backends with tensors.

    Slots are numbers from 0, as few as possible. A plan's copies out precede its copies in, both precede its tokens: a
    block is read before its new owner writes it. A freed slot is reused from the next plan on, so a plan can restore
    what it evicts."""

    def __init__(self) -> None:
        self.out: list[tuple[int, int]] = []
        self.back: list[tuple[int, int]] = []
        self._slot_of: dict[Hashable, int] = {}
        self._leaving: dict[Hashable, int] = {}  # evicted since `take`
        self._free: list[int] = []
        self._num_slots = 0

    def store(self, content: Hashable, block: int) -> None:
        """Copy `content` from device `block` to the tier."""
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._slot_of[content] = slot
        self.out.append((block, slot))

    def restore(self, content: Hashable, block: int) -> None:
        """Copy `content` to device `block`; it is in the tier, or was when this plan was begun."""
        slot = self._slot_of.get(content)
        self.back.append((self._leaving[content] if slot is None else slot, block))

    def drop(self, content: Hashable) -> None:
        """Evict `content` from the tier."""
        slot = self._slot_of.pop(content)
        if content in self._leaving:  # twice within a plan
            self._free.append(slot)
        else:
            self._leaving[content] = slot

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Copies (out, back) of the plan just made."""
        copies = self.out, self.back
        self.out, self.back = [], []
        self._free += self._leaving.values()
        self._leaving.clear()
        return copies


class HostBlocks:
    """A tier of `capacity` blocks; sequences with fewer than `least_tokens` to restore are recomputed.

    is_awaited: a step waits for the copies of blocks that it reuses; else they overlap it
    copies:     records block copies for plans with tensors
    num_stored, num_restored: blocks copied out and in so far; num_restored_tokens: tokens of the latter"""

    is_async = False  # see `TieredBlocks`
    can_wait = False
    prefetches = False
    passes_on = False

    def __init__(
        self, capacity: int, least_tokens: int = 1, is_awaited: bool = False, copies: HostCopies | None = None
    ) -> None:
        self.capacity, self.least_tokens, self.is_awaited = capacity, least_tokens, is_awaited
        self._copies = copies
        self._num_planned = 0  # part of `num_stored` that plans know of
        self.num_stored = self.num_restored = self.num_restored_tokens = 0
        self._contents: OrderedDict[Hashable, None] = OrderedDict()
        self._parked: dict[Request, tuple[int, int]] = {}  # request -> tokens, blocks
        self._num_parked = 0

    @property
    def num_used(self) -> int:
        return len(self._contents) + self._num_parked

    def keep(self, content: Hashable, block: int) -> None:
        """The device reuses `block`: keep its `content`."""
        if content in self._contents:
            self._contents.move_to_end(content)
        elif self._make_room(1):
            self._contents[content] = None
            self.num_stored += 1
            if self._copies is not None:
                self._copies.store(content, block)

    def park(self, request: Request, num_tokens: int, num_blocks: int) -> bool:
        """Park a preempted request's KV if worthwhile and there is room; return whether it was."""
        if num_tokens < self.least_tokens or not num_blocks or not self._make_room(num_blocks):
            return False
        self._parked[request] = num_tokens, num_blocks
        self._num_parked += num_blocks
        self.num_stored += num_blocks
        if self._copies is not None:
            for index, block in enumerate(request.block_ids[:num_blocks]):
                self._copies.store((request.request_id, index), block)
        return True

    def forget(self, request: Request) -> None:
        """Drop what `request` parked."""
        _, num_blocks = self._parked.pop(request, (0, 0))
        self._num_parked -= num_blocks
        if self._copies is not None:
            for index in range(num_blocks):
                self._copies.drop((request.request_id, index))

    def forget_all(self) -> None:
        """Clear the tier."""
        while self._contents:
            self._push_out()
        for request in list(self._parked):
            self.forget(request)

    def num_ready(self, request: Request, num_cached: int, block_size: int) -> int:
        """Leading tokens of `request` available if all possible blocks behind `num_cached` tokens were restored."""
        parked = self._parked.get(request)
        if parked is not None:
            return max(num_cached, parked[0])
        limit = self.num_reusable(request, block_size)
        number = num_cached // block_size
        while number < limit and request.contents[number] in self._contents:
            number += 1
        num_ready = max(number * block_size, num_cached)
        return num_ready if num_ready - num_cached >= self.least_tokens else num_cached

    def must_wait(self, request: Request, num_cached: int, block_size: int) -> bool:
        """Whether `request`, whose turn it is, waits for KV on its way (`can_wait`)."""
        return False

    def prefetch(self, request: Request, num_cached_blocks: int) -> None:
        """`request` has arrived (`prefetches`); the device has `num_cached_blocks` of it."""

    def end_load(self, request: Request) -> None:
        """The KV of `request` has come to the device beside steps."""

    def num_reusable(self, request: Request, block_size: int) -> int:
        """Leading blocks of `request` that may come from here. Steps compute its last token; loads beside steps do not
        care, since it is computed again."""
        return min((request.num_tokens - (not self.is_async)) // block_size, len(request.contents))

    def restore(self, request: Request, num_cached: int, num_ready: int, block_size: int) -> int:
        """Admit `request` with `num_ready` tokens: all but the first `num_cached` from here, in `block_size` blocks."""
        parked, tokens, blocks = self._parked.get(request), num_ready - num_cached, 0
        if tokens > 0:
            first, blocks = num_cached // block_size, -(-tokens // block_size)
            contents: Sequence[Hashable] = request.contents[first : first + blocks]
            if parked is None:
                for content in contents:
                    if content in self._contents:  # an allocated block may have evicted it
                        self._contents.move_to_end(content)
            else:
                blocks = min(blocks, parked[1])
                contents = [(request.request_id, index) for index in range(first, first + blocks)]
            if self._copies is not None:
                for content, block in zip(contents, request.block_ids[first:], strict=False):
                    self._copies.restore(content, block)
            self.num_restored += blocks
            self.num_restored_tokens += tokens
        if parked is not None:
            self.forget(request)
        return blocks

    def finalize(self, plan: StepPlan) -> None:
        """Tell the finished `plan` its copies and the stores that it waits for."""
        if self.is_awaited:
            plan.num_stored_blocks = self.num_stored - self._num_planned
            self._num_planned = self.num_stored
        if self._copies is not None:
            plan.copied_out, plan.copied_back = self._copies.take()

    def _make_room(self, count: int) -> bool:
        if self._num_parked + count > self.capacity:
            return False
        while self.num_used + count > self.capacity:
            self._push_out()
        return True

    def _push_out(self) -> None:
        content, _ = self._contents.popitem(last=False)
        if self._copies is not None:
            self._copies.drop(content)
