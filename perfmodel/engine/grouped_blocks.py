"""`GroupedKVBlocks`: KV blocks where layer groups keep different parts of a sequence (`perfmodel.kv_groups`).

vLLM's hybrid KV cache manager: a block table per group and request over one pool, with `NO_BLOCK` for released rows
(`Request.tables`). Before a grant a request releases rows that are no longer visible, then takes a block per new row
and group. A prefix is cached as far as every group has what the next query sees: all rows, the window, or its chunk."""

from collections.abc import Hashable, Iterable, Sequence
from typing import cast

from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.request import GroupTables, Request
from perfmodel.kv_groups import KVGroup

NO_BLOCK = -1


class GroupedKVBlocks(KVBlockManager):
    """`num_blocks` blocks of `block_size` tokens in the layers of one of `groups`. `enable_prefix_caching` and
    `reuses_partial_first`: see `KVBlockManager`.

    max_in_flight_tokens: tokens of a request that running steps may compute
    max_model_len:        longest sequence in tokens; None: unlimited"""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[KVGroup, ...],
        enable_prefix_caching: bool = True,
        max_in_flight_tokens: int = 2048,
        max_model_len: int | None = None,
        reuses_partial_first: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching, reuses_partial_first=reuses_partial_first)
        self.groups = groups
        self.most_weight = len(groups)
        self.gives_up_rows = True
        longest = max_model_len if max_model_len is not None else 1 << 60
        self._most = [group.most_reserved(max_in_flight_tokens, longest, block_size) for group in groups]
        self._windowed = [(number, group) for number, group in enumerate(groups) if group.span is not None]
        # Groups that keep the same part are looked up together, full attention first.
        kinds: dict[tuple[bool, int, bool], list[int]] = {}
        for number, group in enumerate(groups):
            kinds.setdefault((group.span is not None, group.span or 0, group.is_chunk), []).append(number)
        self._kinds = sorted(kinds.values(), key=lambda numbers: groups[numbers[0]].span is not None)

    def num_filled(self, num_tokens: int) -> int:
        """Peak blocks of a request on its way to `num_tokens` tokens."""
        rows = -(-num_tokens // self.block_size)
        return sum(rows if most is None else min(rows, most) for most in self._most)

    def num_needed(self, request: Request, num_tokens: int) -> int:
        """Blocks that `request` lacks for `num_tokens` tokens, after `release`."""
        rows = -(-num_tokens // self.block_size)
        if request.tables is not None:
            return (rows - len(request.block_ids)) * len(self.groups)
        return sum(max(rows - first, 0) for first in self._firsts(_num_there(request)))

    def num_due(self, request: Request, num_tokens: int) -> int:
        return 0  # cohort members have their blocks when they are due

    def weight(self, num_rows: int) -> int:
        return len(self.groups)

    def _firsts(self, num_computed: int) -> list[int]:
        """First row that each group keeps behind `num_computed` tokens."""
        return [group.first_row(num_computed, self.block_size) for group in self.groups]

    def cached_prefix(self, request: Request) -> list[int]:
        """First group's blocks of the longest prompt prefix that all groups cache, short of its last token; `NO_BLOCK`
        for rows before its window."""
        if not self.enable_prefix_caching or not request.contents:
            return []
        contents = request.contents[: (request.num_tokens - 1) // self.block_size]
        num_rows = self._num_cached_rows(contents)
        first = self.groups[0].first_row(num_rows * self.block_size, self.block_size)
        return [NO_BLOCK] * first + [self._block_of[0, contents[row]] for row in range(first, num_rows)]

    def _num_cached_rows(self, contents: Sequence[Hashable]) -> int:
        """Cached rows common to all groups.

        Each kind of groups takes the agreed length or the longest below, repeated until all agree. Full attention and
        one other kind agree at once (vLLM, find_longest_cache_hit). Where the last block is recomputed, a kind looks
        once for one row more and leaves it out."""
        num_rows = before = len(contents)
        is_simple = len(self._kinds) == 2 and self.groups[self._kinds[0][0]].span is None
        all_kinds = set(range(len(self._kinds))) if self.rereads_last_block else set()
        leaving = set(all_kinds)  # kinds that still leave a row out
        seen: dict[int, int] = {}  # rows of full attention
        while True:
            for number, numbers in enumerate(self._kinds):
                if number in seen:
                    num_rows = min(num_rows, seen[number])
                    continue
                leaves_one = number in leaving
                length = self._longest(numbers, contents, min(num_rows + leaves_one, len(contents)), leaves_one)
                length = max(length - 1, 0) if leaves_one else length
                if self.groups[numbers[0]].span is None:
                    seen[number] = length
                leaving.discard(number)
                if not leaves_one and length < num_rows:
                    leaving = set(all_kinds)
                num_rows = length
            if num_rows >= before or is_simple:
                return min(num_rows, before)
            before = num_rows

    def _longest(self, numbers: Sequence[int], contents: Sequence[Hashable], most: int, leaves_one: bool) -> int:
        """Longest hit of equal groups `numbers`, up to `most` rows; `leaves_one`: its last row can be left out."""
        group, size = self.groups[numbers[0]], self.block_size

        def is_there(row: int) -> bool:
            return all((number, contents[row]) in self._block_of for number in numbers)

        if group.span is None or group.is_chunk:  # from the first visible row on, while cached
            start = group.first_row(most * size, size)
            return next((row for row in range(start, most) if not is_there(row)), most)
        wanted, length = -(-(group.span - 1) // size) + leaves_one, 0
        for row in reversed(range(most)):
            length = length + 1 if is_there(row) else 0
            if length and length >= wanted:
                return row + length
        return length  # from the first row on, however few

    def can_allocate(self, request: Request, num_tokens: int, cached: Iterable[int] = ()) -> bool:
        if request.tables is not None:
            return self.num_needed(request, num_tokens) <= self.num_free
        return self._num_taken(request, num_tokens, len(list(cached)), is_whole=False) <= self.num_free

    def can_admit(self, request: Request, num_tokens: int, num_whole: int, cached: Sequence[int]) -> bool:
        """As the base, for `request`, `num_tokens`, `num_whole` and `cached`, but for its peak blocks."""
        if num_whole > num_tokens and self._num_taken(request, num_whole, len(cached), is_whole=True) > self.num_free:
            return False
        return self._num_taken(request, num_tokens, len(cached), is_whole=False) <= self.num_free

    def _num_taken(self, request: Request, num_tokens: int, num_cached: int, is_whole: bool) -> int:
        """Free blocks that a new `request` takes for `num_tokens` tokens with `num_cached` rows cached."""
        rows, count = -(-num_tokens // self.block_size), 0
        firsts = self._firsts(max(_num_there(request), num_cached * self.block_size))
        for number, (first, most) in enumerate(zip(firsts, self._most, strict=True)):
            wanted = min(rows, most) if is_whole and most is not None else rows
            count += max(wanted - max(first, num_cached), 0)
            cached = (self._block_of[number, request.contents[row]] for row in range(first, num_cached))
            count += sum([not self._owners[block] for block in cached])
        return count

    def allocate(self, request: Request, num_tokens: int, cached: Iterable[int] = ()) -> None:
        """Give `request` the cached rows and the blocks for `num_tokens` tokens (`can_allocate` first)."""
        if request.tables is None:
            blocks_by_group = [request.block_ids, *([] for _ in self.groups[1:])]
            request.tables = GroupTables([0] * len(self.groups), blocks_by_group)
            self._claim(request, len(list(cached)))
        missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        if missing == 1:  # nearly always: a decode
            taken: list[int] = []
            self._take(len(self.groups), taken)
            for blocks, block in zip(request.tables.blocks, taken, strict=True):
                blocks.append(block)
        elif missing > 0:
            for blocks in request.tables.blocks:
                self._take(missing, blocks)

    def _claim(self, request: Request, num_cached: int) -> None:
        """Give a new `request` its cached rows, and none for invisible rows."""
        tables = request.tables
        assert tables is not None
        num_there = max(_num_there(request), num_cached * self.block_size)
        num_rows = max(-(-num_there // self.block_size), num_cached)  # KV computed elsewhere needs blocks, too
        tables.firsts = self._firsts(num_there)
        for number, first in enumerate(tables.firsts):
            shared = [self._block_of[number, request.contents[row]] for row in range(first, num_cached)]
            for block in shared:
                if self._owners[block] == 0:
                    self.num_free -= 1
                    del self._lot_of[block]
                self._owners[block] += 1
            tables.blocks[number] += [NO_BLOCK] * first + shared
        request.num_hashed_blocks = num_cached
        if num_rows > num_cached:
            for first, blocks in zip(tables.firsts, tables.blocks, strict=True):
                self._take(num_rows - max(first, num_cached), blocks)

    def release(self, request: Request, num_done: int) -> int | None:
        """As the base: rows that no query behind `num_done` tokens sees; a group's last row is reused first."""
        tables, size, next_done = request.tables, self.block_size, None
        if tables is None:
            return None
        for number, group in self._windowed:
            old, blocks = tables.firsts[number], tables.blocks[number]
            new = min(group.first_row(num_done, size), len(request.block_ids))
            if new > old:
                tables.firsts[number] = new
                gone, blocks[old:new] = blocks[old:new], [NO_BLOCK] * (new - old)
                self._give_up(request, old, gone)
                old = new
            done = group.given_up_at(old, size)
            if next_done is None or done < next_done:
                next_done = done
        return next_done

    def _give_up(self, request: Request, first: int, blocks: list[int]) -> None:
        """Free `blocks`, rows of `request` from `first` on. Rows without contents get none: they are reused before its
        other blocks, so they would be gone when it comes back."""
        hashed: list[int] = []
        if request.num_hashed_blocks > first:
            num_hashed = request.num_hashed_blocks - first
            hashed, blocks = blocks[:num_hashed], blocks[num_hashed:]
        self._give_back(blocks, False)
        self._give_back(hashed, True)

    def publish(self, request: Request, num_computed: int | None = None) -> None:
        """Cache the full blocks that are computed, or planned to be, group by group."""
        num_computed = request.num_computed_tokens if num_computed is None else num_computed
        last = min(num_computed // self.block_size, len(request.contents))
        tables = request.tables
        if not self.enable_prefix_caching or tables is None or last <= request.num_hashed_blocks:
            return
        for number, first in enumerate(tables.firsts):
            since = max(request.num_hashed_blocks, first)
            for row in range(since, last):
                self._enter((number, request.contents[row]), tables.blocks[number][row])
            self._tell_stored(request.contents, since, last, number)
        request.num_hashed_blocks = last

    def _tell_removed(self, content: Hashable) -> None:
        assert self.listener is not None
        number, block_hash = cast(tuple[int, Hashable], content)  # as entered by `publish`
        self.listener.on_removed(block_hash, number)

    def free(self, request: Request, num_tokens: int | None = None) -> None:
        tables = request.tables
        if tables is None:
            return
        has_hashed, num_full = request.num_hashed_blocks > 0, self._num_full(request, num_tokens)
        for first, blocks in zip(tables.firsts, tables.blocks, strict=True):
            self._give_back_rows(blocks[first:], max(num_full - first, 0), has_hashed)
        request.block_ids, request.tables = [], None
        request.num_hashed_blocks = 0


def _num_there(request: Request) -> int:
    """Tokens of `request` whose KV is computed, here or elsewhere."""
    return max(request.num_computed_tokens, request.num_transferred_tokens)
