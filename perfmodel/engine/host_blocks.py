"""`HostBlocks`: KV blocks that left the device and lie in a second tier, where they can be restored from.

Two kinds: all blocks of a preempted request, until it runs again; and blocks of shared content that the device's prefix
cache has reused for something else, least recently used first out. Room for the first is made by dropping the second.
How long a copy takes is not known here; from how many tokens on it is worth it is a rule that the engine is given.
"""

__all__ = ["HostBlocks"]

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from perfmodel.engine.request import Request


class HostBlocks:
    """`capacity` blocks; sequences with fewer than `least_tokens` to restore are computed again instead.

    num_stored, num_restored: blocks copied out and in so far; num_restored_tokens: what the latter held
    """

    def __init__(self, capacity: int, least_tokens: int = 1) -> None:
        self.capacity = capacity
        self.least_tokens = least_tokens
        self.num_stored = self.num_restored = self.num_restored_tokens = 0
        self._contents: OrderedDict[Hashable, None] = OrderedDict()
        self._parked: dict[Request, tuple[int, int]] = {}  # request -> tokens, blocks
        self._num_parked = 0

    @property
    def num_used(self) -> int:
        return len(self._contents) + self._num_parked

    def keep(self, content: Hashable) -> None:
        """The device reuses its block with `content`."""
        if content in self._contents:
            self._contents.move_to_end(content)
        elif self._make_room(1):
            self._contents[content] = None
            self.num_stored += 1

    def park(self, request: Request, num_tokens: int, num_blocks: int) -> None:
        """`request`, about to be preempted, has KV of `num_tokens` in `num_blocks`; kept if that is worth it."""
        if num_tokens >= self.least_tokens and num_blocks and self._make_room(num_blocks):
            self._parked[request] = num_tokens, num_blocks
            self._num_parked += num_blocks
            self.num_stored += num_blocks

    def forget(self, request: Request) -> None:
        """`request` is not coming back for what it parked."""
        _, num_blocks = self._parked.pop(request, (0, 0))
        self._num_parked -= num_blocks

    def forget_all(self) -> None:
        """Nothing is in memory any more."""
        self._contents.clear()
        self._parked.clear()
        self._num_parked = 0

    def num_ready(self, request: Request, num_cached: int, block_size: int) -> int:
        """The leading tokens of `request` that would be there if all that can be were restored behind `num_cached`."""
        parked = self._parked.get(request)
        if parked is not None:
            return max(num_cached, parked[0])
        limit = min((request.num_tokens - 1) // block_size, len(request.block_hashes))
        number = num_cached // block_size
        while number < limit and request.block_hashes[number] in self._contents:
            number += 1
        found = max(number * block_size, num_cached)
        return found if found - num_cached >= self.least_tokens else num_cached

    def restore(self, request: Request, num_cached: int, num_ready: int, block_size: int) -> int:
        """`request` is admitted with `num_ready` tokens there, all but the first `num_cached` from here; the blocks, of
        `block_size` tokens."""
        parked = self._parked.pop(request, None)
        if parked is not None:
            self._num_parked -= parked[1]
        tokens = num_ready - num_cached
        if tokens <= 0:
            return 0
        if parked is None:
            self._touch(request.block_hashes[num_cached // block_size : num_ready // block_size])
        blocks = -(-tokens // block_size) if parked is None else min(-(-tokens // block_size), parked[1])
        self.num_restored += blocks
        self.num_restored_tokens += tokens
        return blocks

    def _touch(self, contents: Sequence[Hashable]) -> None:
        for content in contents:
            if content in self._contents:  # the blocks that it now comes to may have pushed it out
                self._contents.move_to_end(content)

    def _make_room(self, count: int) -> bool:
        if self._num_parked + count > self.capacity:
            return False
        while self.num_used + count > self.capacity:
            self._contents.popitem(last=False)
        return True
