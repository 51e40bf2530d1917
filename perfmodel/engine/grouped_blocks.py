"""`GroupedKVBlocks`: KV blocks where groups of layers keep different parts of a sequence (`perfmodel.kv_groups`).

vLLM's hybrid KV cache manager: each group has a table of blocks for each request, and all take blocks from one pool.
The table of the first group is `Request.block_ids`, of which the rows given up are `NO_BLOCK`; those of the others are
in `Request.tables`. Blocks that have left a window or a chunk go back when the request is next granted tokens; once it
decodes with others, the block that leaves a window becomes that of the next row, and only chunks are given back.

A prefix is found in the cache as far as every group has what a query behind it sees: all rows where all are seen, else
those of the window before it, or of its chunk so far.
"""

__all__ = ["NO_BLOCK", "GroupedKVBlocks"]

from collections.abc import Hashable, Iterable, Sequence
from typing import cast

from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.request import GroupTables, Request
from perfmodel.kv_groups import KVGroup, most_rows

NO_BLOCK = -1


class GroupedKVBlocks(KVBlockManager):
    """`num_blocks` blocks of `block_size` tokens in the layers of one of `groups`.

    enable_prefix_caching:  whether prompts find blocks that others have computed
    max_num_batched_tokens: that a step may compute of one request
    reuses_partial_first:   see `KVBlockManager`
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[KVGroup, ...],
        enable_prefix_caching: bool = True,
        max_num_batched_tokens: int = 2048,
        reuses_partial_first: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching, reuses_partial_first=reuses_partial_first)
        self.groups = groups
        self.most_weight = len(groups)
        self._chunk = max_num_batched_tokens

    # ---------------------------------------------------------------- how many

    def num_filled(self, num_tokens: int) -> int:
        """Blocks that one request of `num_tokens` tokens holds at most on its way there."""
        return most_rows(self.groups, -(-num_tokens // self.block_size), self.block_size, self._chunk)

    def num_needed(self, request: Request, num_tokens: int) -> int:
        """Blocks that `request` lacks to hold `num_tokens` tokens, with those gone that it no longer sees."""
        rows, computed, before = -(-num_tokens // self.block_size), _num_there(request), len(request.block_ids)
        needed = 0
        for number, group in enumerate(self.groups):
            first = self._first(group, computed, rows)
            needed += rows - max(first, before) - self._num_freed(request, number, first)
        return needed

    def _num_freed(self, request: Request, number: int, first: int) -> int:
        """Blocks that go free as the group of this number gives up its rows before `first`: not those of others."""
        tables = request.tables
        if tables is None or first <= tables.firsts[number]:
            return 0
        old = tables.firsts[number]
        gone = tables.others[number - 1][: first - old] if number else request.block_ids[old:first]
        return sum([self._owners.get(block, 1) == 1 for block in gone])

    def num_due(self, request: Request, num_tokens: int) -> int:
        rows = -(-num_tokens // self.block_size) - len(request.block_ids)
        return rows * self.weight(len(request.block_ids)) if rows > 0 else 0

    def weight(self, num_rows: int) -> int:
        return sum([group.takes_another(num_rows, self.block_size) for group in self.groups])

    def next_change(self, num_rows: int) -> int | None:
        changes = [group.next_change(num_rows, self.block_size) for group in self.groups]
        return min((rows for rows in changes if rows is not None), default=None)

    def _first(self, group: KVGroup, num_computed: int, num_rows: int) -> int:
        """The first row that `group` keeps while the tokens behind `num_computed` are computed, up to `num_rows`."""
        size = self.block_size
        return min(group.first_row(num_computed, size), group.first_kept(num_rows, size))

    # ---------------------------------------------------------------- prefixes

    def cached_prefix(self, request: Request) -> list[int]:
        """The first group's blocks of the longest beginning of the prompt that all groups have, at most all but its
        last token; `NO_BLOCK` for rows that it does not need."""
        if not self.enable_prefix_caching or not request.contents:
            return []
        self._pop_set_aside()
        contents = request.contents[: (request.num_tokens - 1) // self.block_size]
        num_rows = len(contents)
        for number, group in enumerate(self.groups):
            if group.span is None:
                num_rows = next((i for i in range(num_rows) if (number, contents[i]) not in self._block_of), num_rows)
        is_whole = False
        while num_rows and not is_whole:
            missing = [self._last_missing(number, contents, num_rows) for number in range(len(self.groups))]
            is_whole = max(missing) < 0
            num_rows = num_rows if is_whole else max(missing)  # a longer one would lack the same row
        kept = self._rows_behind(self.groups[0], num_rows)
        return [NO_BLOCK] * kept.start + [self._block_of[0, contents[i]] for i in kept]

    def _rows_behind(self, group: KVGroup, num_rows: int) -> range:
        """The rows that `group` needs to go on behind the first `num_rows`."""
        return range(group.first_row(num_rows * self.block_size, self.block_size), num_rows)

    def _last_missing(self, number: int, contents: Sequence[Hashable], num_rows: int) -> int:
        """The last row needed behind `num_rows` that the group of this number does not have; -1: none."""
        kept = reversed(self._rows_behind(self.groups[number], num_rows))
        return next((i for i in kept if (number, contents[i]) not in self._block_of), -1)

    # ---------------------------------------------------------------- taking and giving back

    def can_allocate(self, request: Request, num_tokens: int, cached: Iterable[int] = ()) -> bool:
        """Whether `request` can hold `num_tokens` tokens, computed in steps, with the rows `cached` already there."""
        hit, size = len(list(cached)), self.block_size
        if request.tables is not None:
            return self.num_needed(request, num_tokens) <= self.num_free
        rows, computed = -(-num_tokens // size), max(_num_there(request), hit * size)
        needed = 0
        for number, group in enumerate(self.groups):
            kept = rows - self._first(group, computed, rows)
            if group.span is not None:
                kept = min(kept, group.most_kept(size, self._chunk))
            if hit:
                blocks = self._cached_blocks(request, number, hit)
                needed += kept - len(blocks) + sum([not self._owners[block] for block in blocks])
            else:
                needed += kept
        return needed <= self.num_free

    def _cached_blocks(self, request: Request, number: int, num_rows: int) -> list[int]:
        """Blocks of the group of this number for what is seen behind `num_rows` cached rows."""
        kept = self._rows_behind(self.groups[number], num_rows)
        return [self._block_of[number, request.contents[i]] for i in kept]

    def allocate(self, request: Request, num_tokens: int, cached: Iterable[int] = ()) -> None:
        """Give `request` the cached rows and what `num_tokens` tokens need (`can_allocate` first); take back before
        that what it no longer sees."""
        if request.tables is None:
            request.tables = GroupTables(len(self.groups))
        hit = len(list(cached))
        if hit:
            self._claim(request, hit)
        computed, rows = _num_there(request), -(-num_tokens // self.block_size)
        computed = max(computed, hit * self.block_size)
        if rows > len(request.block_ids):
            firsts = [self._first(group, computed, rows) for group in self.groups]
            self._give_up(request, firsts)
            self._extend(request, firsts, rows)

    def _claim(self, request: Request, num_rows: int) -> None:
        tables = request.tables
        assert tables is not None
        for number, group in enumerate(self.groups):
            blocks = self._cached_blocks(request, number, num_rows)
            for block in blocks:
                if self._owners[block] == 0:
                    self.num_free -= 1
                    del self._lot_of[block]
                self._owners[block] += 1
            tables.firsts[number] = first = self._rows_behind(group, num_rows).start
            if number:
                tables.others[number - 1] += blocks
            else:
                request.block_ids += [NO_BLOCK] * first + blocks
        request.num_hashed_blocks = num_rows

    def _extend(self, request: Request, firsts: Sequence[int], num_rows: int) -> None:
        """Blocks for each group from what it has to `num_rows`, none for rows before its first of `firsts`."""
        tables, before = request.tables, len(request.block_ids)
        assert tables is not None
        for number, first in enumerate(firsts):
            if first > before:  # computed elsewhere, and never seen here
                tables.firsts[number] = first
            into = tables.others[number - 1] if number else request.block_ids
            if not number:
                into += [NO_BLOCK] * (max(first, before) - before)
            self._take(num_rows - max(first, before), into)

    def _give_up(self, request: Request, firsts: Sequence[int]) -> None:
        """Take back the blocks of rows before those of `firsts`, of each group."""
        tables = request.tables
        assert tables is not None
        has_hashed = request.num_hashed_blocks > 0
        for number, (old, new) in enumerate(zip(tables.firsts, firsts, strict=True)):
            new = min(new, len(request.block_ids))
            if new <= old:
                continue
            if number:
                blocks = tables.others[number - 1]
                gone, tables.others[number - 1] = blocks[: new - old], blocks[new - old :]
            else:
                gone = request.block_ids[old:new]
                request.block_ids[old:new] = [NO_BLOCK] * (new - old)
            tables.firsts[number] = new
            self._give_back(gone, has_hashed)

    def trim(self, request: Request) -> None:
        """`request` decodes from now on: back goes what it held for a long chunk of its prompt."""
        if request.tables is not None:
            rows = len(request.block_ids)
            self._give_up(request, [group.first_kept(rows, self.block_size) for group in self.groups])

    def hand_out(self, request: Request, count: int) -> None:
        """As of the base, `count` for all groups; where a window is full, its oldest block becomes the newest."""
        tables, rows = request.tables, len(request.block_ids)
        assert tables is not None
        each = count // self.weight(rows)
        for number, group in enumerate(self.groups):
            blocks = tables.others[number - 1] if number else request.block_ids
            if group.takes_another(rows, self.block_size):
                if len(self._aside) < each:
                    self._pop_set_aside()
                blocks += self._aside[-each:]
                del self._aside[-each:]
                continue
            if not number:
                blocks[tables.firsts[0] : tables.firsts[0]] = [NO_BLOCK] * each
            tables.firsts[number] += each
        self.trim(request)

    def publish(self, request: Request, num_computed: int | None = None) -> None:
        """Enter the full blocks that are computed, or planned to be, into the prefix cache, group by group."""
        num_computed = request.num_computed_tokens if num_computed is None else num_computed
        last = min(num_computed // self.block_size, len(request.contents))
        tables = request.tables
        if not self.enable_prefix_caching or tables is None or last <= request.num_hashed_blocks:
            return
        self._pop_set_aside()
        for number, first in enumerate(tables.firsts):
            blocks, offset = (tables.others[number - 1], first) if number else (request.block_ids, 0)
            since = max(request.num_hashed_blocks, first)
            for i in range(since, end := min(last, offset + len(blocks))):
                content, block = (number, request.contents[i]), blocks[i - offset]
                if content not in self._block_of and block not in self._hash_of:
                    self._block_of[content] = block
                    self._hash_of[block] = content
                    self._owners[block] = 1
                elif self.listener is not None:  # what is new is told in runs
                    self._tell_stored(request.contents, since, i, number)
                    since = i + 1
            if self.listener is not None:
                self._tell_stored(request.contents, since, end, number)
        request.num_hashed_blocks = last

    def _tell_removed(self, content: Hashable) -> None:
        assert self.listener is not None
        number, block_hash = cast(tuple[int, Hashable], content)  # as `publish` entered it
        self.listener.on_removed(block_hash, number)

    def free(self, request: Request, num_tokens: int | None = None) -> None:
        tables = request.tables
        if tables is None:
            return
        has_hashed = request.num_hashed_blocks > 0
        self._give_back(request.block_ids[tables.firsts[0] :], has_hashed)
        for blocks in tables.others:
            self._give_back(blocks, has_hashed)
        request.block_ids, request.tables = [], None
        request.num_hashed_blocks = 0

    def blocks_of(self, request: Request) -> list[int]:
        blocks = [block for block in request.block_ids if block != NO_BLOCK]
        if request.tables is not None:
            for number, others in enumerate(request.tables.others, start=1):
                first, rows = request.tables.firsts[number], len(request.block_ids)
                assert len(others) == rows - first, f"{request}: a group has {len(others)} blocks for {rows - first}"
                blocks += others
        return blocks


def _num_there(request: Request) -> int:
    """Tokens of `request` whose KV is computed, here or elsewhere."""
    return max(request.num_computed_tokens, request.num_transferred_tokens)
