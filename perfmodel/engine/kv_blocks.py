"""KV blocks: ownership, prefix cache and order of reuse, by vLLM v1's rules.

A block is private until its content has a hash, then shared by reference count. Freed blocks stay cached until reused,
least recently freed first and a request's last block first. Private blocks have no per-block state: they move between
requests and the free queue as list slices.

Where every layer overwrites keys that left its window (`span`), a request holds at most one window of blocks and its
prefix is not reusable. A span of 0 holds nothing. `num_buffers` blocks per request hold newest tokens in wider formats.

Without tensors it does not matter which private block a request gets. So blocks are set aside by number (`set_aside`)
and handed out later (`hand_out`); they leave the queue, in the same order, when someone next looks at it or the cache.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perfmodel.engine.host_blocks import HostBlocks
from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request

_NUMBERS: list[int] = []


def _numbers(first: int, count: int) -> list[int]:
    """Numbers from `first` on, always the same objects: a thousand engines number as many blocks."""
    if first + count > len(_NUMBERS):
        _NUMBERS.extend(range(len(_NUMBERS), first + count))
    return _NUMBERS[first : first + count]


class BlockListener(Protocol):
    """Follows the contents of the prefix cache. `group`: the layer group where groups have separate blocks, else 0."""

    def on_stored(self, contents: Sequence[Hashable], parent: Hashable | None, group: int) -> None:
        """Consecutive blocks with `contents` are cached behind `parent`."""

    def on_removed(self, content: Hashable, group: int) -> None:
        """The block with `content` was reused."""

    def on_cleared(self) -> None:
        """The cache is empty."""


@dataclass(slots=True, eq=False)
class _Lot:
    """Blocks freed together, taken from the end of `blocks`. `has_hashed`: some may have been claimed back since."""

    blocks: list[int]
    has_hashed: bool


class KVBlockManager:
    """`num_blocks` blocks of `block_size` tokens, with or without a prefix cache (`enable_prefix_caching`).

    span, num_buffers: a request's limit in tokens, and blocks of it beyond that
    host: second tier for reused cached blocks; listener: follows the cache
    reuses_partial_first: partly filled freed blocks are reused first, the last freed before the others (vLLM since
                          0.23, with a prefix cache); else in order of freeing"""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        span: int | None = None,
        num_buffers: int = 0,
        host: HostBlocks | None = None,
        reuses_partial_first: bool = True,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching and span is None
        self.most_per_request: int | None = None if span is None else -(-span // block_size)
        self.num_buffers, self.host = num_buffers, host
        self._reuses_partial_first = reuses_partial_first and self.enable_prefix_caching
        self.listener: BlockListener | None = None
        self.most_weight = 1  # upper bound of `weight`
        self.rereads_last_block = False  # the last block of a cached prefix is recomputed
        self.gives_up_rows = False  # requests release blocks while they run (`release`)
        self.num_free = num_blocks
        self._num_fresh = num_blocks  # never used blocks, taken before the queue
        self._partial: list[int] = []  # freed before they were full; the last one is reused first
        self._queue: deque[_Lot] = deque()
        self._num_entries = 0  # in all lots, including those claimed back since
        self._block_of: dict[Hashable, int] = {}  # hash -> first block with this content
        self._copies: dict[Hashable, list[int]] = {}  # hash -> further blocks, computed concurrently, in order
        self._hash_of: dict[int, Hashable] = {}  # block -> hash
        self._owners: dict[int, int] = {}  # hashed block -> number of requests that hold it
        self._lot_of: dict[int, _Lot] = {}  # free hashed block -> the lot it waits in
        self._aside: list[int] = []  # set aside, not handed out yet
        self._num_to_pop = 0  # also set aside, but still in the queue

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_free_unawaited(self) -> int:
        """Free blocks whose reuse begins no copy that a step waits for or that goes on to stores; a lower bound."""
        if self.host is None or not (self.host.is_awaited or self.host.passes_on) or not self._lot_of:
            return self.num_free
        return max(self._num_fresh - self._num_to_pop, 0)

    def num_needed(self, request: Request, num_tokens: int) -> int:
        """Blocks that `request` lacks for `num_tokens` tokens."""
        missing = self.num_filled(num_tokens) - len(request.block_ids)
        return missing + self.num_buffers if self.num_buffers and not request.buffer_ids else missing

    def num_filled(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request fill."""
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks if self.most_per_request is None else min(num_blocks, self.most_per_request)

    def num_due(self, request: Request, num_tokens: int) -> int:
        """Blocks set aside for `request`, which has reached `num_tokens` by decoding."""
        return self.num_filled(num_tokens) - len(request.block_ids)

    def weight(self, num_rows: int) -> int:
        """Blocks for the next `block_size` tokens of a decode that has `num_rows` rows."""
        return 0 if num_rows == self.most_per_request else 1

    def next_change(self, num_rows: int) -> int | None:
        """Rows at which `weight` next changes, or blocks are released; None: never."""
        return self.most_per_request

    def cached_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the prompt's prefix, short of its last token."""
        if not self.enable_prefix_caching or not request.contents:
            return []
        self.catch_up()
        blocks: list[int] = []
        limit = (request.num_tokens - 1) // self.block_size
        for content in request.contents[:limit]:
            block = self._block_of.get(content)
            if block is None:
                break
            blocks.append(block)
        return blocks[:-1] if self.rereads_last_block else blocks

    def can_allocate(self, request: Request, num_tokens: int, cached: Iterable[int] = ()) -> bool:
        """Whether `request` can hold `num_tokens` tokens, with the blocks `cached` already there."""
        claimed_back = num_cached = 0
        for block in cached:
            num_cached += 1
            claimed_back += self._owners[block] == 0
        return self.num_needed(request, num_tokens) - num_cached <= self.num_free - claimed_back

    def allocate(self, request: Request, num_tokens: int, cached: Iterable[int] = ()) -> None:
        """Give `request` the `cached` blocks and new ones for `num_tokens` tokens (`can_allocate` first)."""
        for block in cached:
            if self._owners[block] == 0:
                self.num_free -= 1
                del self._lot_of[block]
            self._owners[block] += 1
            request.block_ids.append(block)
            request.num_hashed_blocks += 1
        if self.num_buffers and not request.buffer_ids:
            self._take(self.num_buffers, request.buffer_ids)
        missing = self.num_needed(request, num_tokens)
        if missing > 0:
            self._take(missing, request.block_ids)

    def can_admit(self, request: Request, num_tokens: int, num_whole: int, cached: Sequence[int]) -> bool:
        """Whether a new `request`, with `cached` blocks, can hold `num_tokens` now and `num_whole` tokens in time."""
        return self.can_allocate(request, max(num_tokens, num_whole), cached)

    def release(self, request: Request, num_done: int) -> int | None:
        """Release invisible blocks, with `num_done` tokens computed by finished steps; none here.

        Returns for how many tokens there is next more to release; None: never."""
        return None

    def set_aside(self, count: int) -> None:
        """Take `count` free blocks for requests that `hand_out` names."""
        self.num_free -= count
        self._num_to_pop += count

    def hand_out(self, request: Request, count: int) -> None:
        """Give `request` `count` of the blocks set aside."""
        if len(self._aside) < count:
            self.catch_up()
        request.block_ids += self._aside[-count:]
        del self._aside[-count:]

    def publish(self, request: Request, num_computed: int | None = None) -> None:
        """Cache the full blocks that are computed, or planned to be."""
        if not self.enable_prefix_caching:
            return
        num_computed = request.num_computed_tokens if num_computed is None else num_computed
        last = min(num_computed // self.block_size, len(request.contents))
        if last <= request.num_hashed_blocks:
            return
        self.catch_up()
        first = request.num_hashed_blocks
        for i in range(first, last):
            self._enter(request.contents[i], request.block_ids[i])
        request.num_hashed_blocks = last
        self._tell_stored(request.contents, first, last, 0)

    def _enter(self, content: Hashable, block: int) -> None:
        """Name `block`, which one request owns; it may be a copy."""
        if content in self._block_of:
            self._copies.setdefault(content, []).append(block)
        else:
            self._block_of[content] = block
        self._hash_of[block] = content
        self._owners[block] = 1

    def publish_own(self, request: Request, num_tokens: int) -> None:
        """Cache all full blocks of the first `num_tokens` of `request`, about to lose them. Those without contents get
        names of their own, so that only it can find them again before they are reused."""
        if not self.enable_prefix_caching:
            return
        if len(request.contents) < num_tokens // self.block_size:
            request.contents = request.name_blocks(num_tokens // self.block_size)
        self.publish(request, num_tokens)

    def _tell_stored(self, contents: Sequence[Hashable], first: int, end: int, group: int) -> None:
        if self.listener is not None and first < end:
            self.listener.on_stored(contents[first:end], contents[first - 1] if first else None, group)

    def free(self, request: Request, num_tokens: int | None = None) -> None:
        """Free all blocks of `request`; hashed ones stay cached until reused.

        num_tokens: leading tokens whose full blocks are reused last; default: all computed ones"""
        if request.buffer_ids:
            self._enqueue(_Lot(request.buffer_ids, False))
            request.buffer_ids = []
        self._give_back_rows(request.block_ids, self._num_full(request, num_tokens), request.num_hashed_blocks > 0)
        request.block_ids = []
        request.num_hashed_blocks = 0

    def _num_full(self, request: Request, num_tokens: int | None) -> int:
        """Leading full rows with `num_tokens` computed; None: all computed ones."""
        num_tokens = request.num_computed_tokens if num_tokens is None else num_tokens
        return max(num_tokens // self.block_size, request.num_hashed_blocks)

    def _give_back_rows(self, blocks: list[int], num_full: int, has_hashed: bool) -> None:
        """Drop one owner of `blocks`, the first `num_full` of which are full and may have hashes."""
        if self._reuses_partial_first:
            partial = blocks[num_full:]
            if partial:
                self.catch_up()  # of what was free before these
            self._partial += partial
            self.num_free += len(partial)
            del blocks[num_full:]
        self._give_back(blocks, has_hashed)

    def _give_back(self, blocks: list[int], has_hashed: bool) -> None:
        """Drop one owner of `blocks`, some of which may have hashes."""
        if not blocks:
            return
        if not has_hashed:
            lot = _Lot(blocks, False)
        else:
            lot = _Lot([], True)
            for block in blocks:
                owners = self._owners.get(block)
                if owners is not None:
                    self._owners[block] = owners - 1
                    if owners > 1:
                        continue
                    self._lot_of[block] = lot
                lot.blocks.append(block)
        self._enqueue(lot)

    def _enqueue(self, lot: _Lot) -> None:
        self.num_free += len(lot.blocks)
        self._num_entries += len(lot.blocks)
        self._queue.append(lot)
        if self._num_entries > 4 * self.num_blocks + 1024:
            self._compact()

    def _take(self, count: int, into: list[int]) -> None:
        self.catch_up()
        self.num_free -= count
        self._pop(count, into)

    def finalize(self, plan: StepPlan) -> None:
        """Tell the finished `plan` its copies to and from a second tier."""
        if self.host is not None:
            self.catch_up()
            self.host.finalize(plan)

    def catch_up(self) -> None:
        """Take the blocks set aside off the queue, before anyone looks at it, at the cache or at its events."""
        if self._num_to_pop:
            self._pop(self._num_to_pop, self._aside)
            self._num_to_pop = 0

    def _pop(self, count: int, into: list[int]) -> None:
        """Move `count` blocks from the queue's head, never used ones first, to the end of `into`."""
        if self._partial and count:
            taken = self._partial[-count:]
            del self._partial[-count:]
            taken.reverse()
            into.extend(taken)
            count -= len(taken)
        if self._num_fresh and count:
            first = self.num_blocks - self._num_fresh
            fresh = min(count, self._num_fresh)
            into.extend(_numbers(first, fresh))
            self._num_fresh -= fresh
            count -= fresh
        while count:
            lot = self._queue[0]
            blocks = lot.blocks
            if not lot.has_hashed:
                taken = blocks[-count:]
                del blocks[-count:]
                taken.reverse()
                into.extend(taken)
                self._num_entries -= len(taken)
                count -= len(taken)
            else:
                while blocks and count:
                    block = blocks.pop()
                    self._num_entries -= 1
                    if self._is_waiting_in(block, lot):
                        self._forget(block)
                        into.append(block)
                        count -= 1
            if not blocks:
                self._queue.popleft()

    def _is_waiting_in(self, block: int, lot: _Lot) -> bool:
        """Whether a hashed block is still in this lot: not claimed back, nor freed again into a later one."""
        return block not in self._hash_of or self._lot_of.get(block) is lot

    def _forget(self, block: int) -> None:
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._owners[block], self._lot_of[block]
            copies = self._copies.get(content)
            if copies is None:
                del self._block_of[content]
            elif self._block_of[content] == block:
                self._block_of[content] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                self._copies.pop(content, None)
            if self.host is not None:
                self.host.keep(content, block)
            if self.listener is not None:
                self._tell_removed(content)

    def _tell_removed(self, content: Hashable) -> None:
        assert self.listener is not None
        self.listener.on_removed(content, 0)

    def forget_all(self) -> None:
        """Clear all content; no request may hold a block."""
        assert self.num_free == self.num_blocks, "a request still holds blocks"
        self.catch_up()
        self._compact()
        for known in (self._block_of, self._copies, self._hash_of, self._owners, self._lot_of):
            known.clear()
        if self.host is not None:
            self.host.forget_all()
        if self.listener is not None:
            self.listener.on_cleared()

    def _compact(self) -> None:
        """Drop entries claimed back, to bound the queue."""
        for lot in self._queue:
            if lot.has_hashed:
                lot.blocks = [block for block in lot.blocks if self._is_waiting_in(block, lot)]
        self._queue = deque(lot for lot in self._queue if lot.blocks)
        self._num_entries = sum(len(lot.blocks) for lot in self._queue)
