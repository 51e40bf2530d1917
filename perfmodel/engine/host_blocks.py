"""`HostBlocks`: KV blocks that left the device and lie in a second tier, where they can be restored from.

Two kinds: all blocks of a preempted request, until it runs again; and blocks of shared content that the device's prefix
cache has reused, least recently used first out. Room for the first is made by dropping the second.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request


class HostCopies:
    """Which blocks each plan copies to the tier, (block, slot), and back, (slot, block), for a backend with tensors.

    Slots are numbers from 0 on, as few as are in use at once and by one plan. Within a plan all copies out come before
    all copies in, both before its tokens are computed: a block that leaves the device is read before its new owner
    writes it. A slot whose content leaves is used again from the next plan on, so what a plan pushes out it can still
    bring back.
    """

    def __init__(self) -> None:
        self.out: list[tuple[int, int]] = []
        self.back: list[tuple[int, int]] = []
        self._slot_of: dict[Hashable, int] = {}
        self._leaving: dict[Hashable, int] = {}  # pushed out since `take`
        self._free: list[int] = []
        self._num_slots = 0

    def store(self, content: Hashable, block: int) -> None:
        """`content`, in `block` of the device, comes to the tier."""
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._slot_of[content] = slot
        self.out.append((block, slot))

    def restore(self, content: Hashable, block: int) -> None:
        """`block` of the device gets `content`, which is in the tier, or was when this plan was begun."""
        slot = self._slot_of.get(content)
        self.back.append((self._leaving[content] if slot is None else slot, block))

    def drop(self, content: Hashable) -> None:
        """`content` leaves the tier."""
        slot = self._slot_of.pop(content)
        if content in self._leaving:  # twice within a plan
            self._free.append(slot)
        else:
            self._leaving[content] = slot

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The copies (out, back) of the plan that has just been made."""
        copies = self.out, self.back
        self.out, self.back = [], []
        self._free += self._leaving.values()
        self._leaving.clear()
        return copies


class HostBlocks:
    """`capacity` blocks; sequences with fewer than `least_tokens` to restore are computed again instead.

    is_awaited: a step begins when the blocks that it takes from others have been copied here; else they are copied
                beside it
    copies:     notes which block goes where, for plans that are executed with tensors
    num_stored, num_restored: blocks copied out and in so far; num_restored_tokens: what the latter held
    """

    def __init__(
        self, capacity: int, least_tokens: int = 1, is_awaited: bool = False, copies: HostCopies | None = None
    ) -> None:
        self.capacity, self.least_tokens, self.is_awaited = capacity, least_tokens, is_awaited
        self._copies = copies
        self._num_planned = 0  # of `num_stored`, those that plans know of
        self.num_stored = self.num_restored = self.num_restored_tokens = 0
        self._contents: OrderedDict[Hashable, None] = OrderedDict()
        self._parked: dict[Request, tuple[int, int]] = {}  # request -> tokens, blocks
        self._num_parked = 0

    @property
    def num_used(self) -> int:
        return len(self._contents) + self._num_parked

    def keep(self, content: Hashable, block: int) -> None:
        """The device reuses its `block` with `content`."""
        if content in self._contents:
            self._contents.move_to_end(content)
        elif self._make_room(1):
            self._contents[content] = None
            self.num_stored += 1
            if self._copies is not None:
                self._copies.store(content, block)

    def park(self, request: Request, num_tokens: int, num_blocks: int) -> bool:
        """`request`, about to be preempted, has KV of `num_tokens` in `num_blocks`; kept if that is worth it, and there
        is room: whether it is."""
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
        """`request` is not coming back for what it parked."""
        _, num_blocks = self._parked.pop(request, (0, 0))
        self._num_parked -= num_blocks
        if self._copies is not None:
            for index in range(num_blocks):
                self._copies.drop((request.request_id, index))

    def forget_all(self) -> None:
        """Nothing is in memory any more."""
        while self._contents:
            self._push_out()
        for request in list(self._parked):
            self.forget(request)

    def num_ready(self, request: Request, num_cached: int, block_size: int) -> int:
        """The leading tokens of `request` that would be there if all that can be were restored behind `num_cached`."""
        parked = self._parked.get(request)
        if parked is not None:
            return max(num_cached, parked[0])
        limit = min((request.num_tokens - 1) // block_size, len(request.contents))
        number = num_cached // block_size
        while number < limit and request.contents[number] in self._contents:
            number += 1
        num_ready = max(number * block_size, num_cached)
        return num_ready if num_ready - num_cached >= self.least_tokens else num_cached

    def restore(self, request: Request, num_cached: int, num_ready: int, block_size: int) -> int:
        """`request` is admitted with `num_ready` tokens there, all but the first `num_cached` from here; the blocks, of
        `block_size` tokens."""
        parked, tokens, blocks = self._parked.get(request), num_ready - num_cached, 0
        if tokens > 0:
            first, blocks = num_cached // block_size, -(-tokens // block_size)
            contents: Sequence[Hashable] = request.contents[first : first + blocks]
            if parked is None:
                for content in contents:
                    if content in self._contents:  # the blocks that it now comes to may have pushed it out
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

    def settle(self, plan: StepPlan) -> None:
        """`plan` is made: it waits for what has been stored meanwhile, and is told of all copies."""
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
