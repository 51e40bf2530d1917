"""KV blocks in a radix tree, as in SGLang: a block is free, private to a request, or in the tree.

A node is a run of blocks behind its parent's. A request that holds a node holds its parents. Unheld leaves are evicted
whole, least recently accessed first. Requests give computed blocks to the tree at certain moments (`checkpoint`); where
it already has the contents, the request goes on with the tree's blocks and its own are freed.

`num_free` counts free and evictable blocks."""

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from perfmodel.engine.kv_blocks import KVBlockManager
from perfmodel.engine.request import Request, num_common


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """`blocks` with consecutive `contents` behind those of `parent`."""

    parent: "RadixNode | None"
    contents: Sequence[Hashable]
    blocks: list[int]
    last_access: float  # on the tree's own clock
    children: "dict[Hashable, RadixNode]" = field(default_factory=dict)  # by their first contents
    num_locks: int = 0  # requests that hold it or a descendant


class RadixKVBlocks(KVBlockManager):
    """`num_blocks` blocks of `block_size` tokens, with a radix tree (`enable_prefix_caching`) or without.

    root: of the tree, without blocks; num_evictable: unheld tree blocks, counted as free"""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching, reuses_partial_first=False)
        self.num_evictable = 0
        self._wanted = 0  # blocks wanted free before those set aside were taken
        self._begin()

    def _begin(self) -> None:
        self._clock = 0.0
        self.root = RadixNode(None, (), [], 0.0)
        self.root.num_locks = 1
        self._node_of: dict[Request, RadixNode] = {}
        self._leaves: set[RadixNode] = set()  # evictable leaves
        self._oldest: list[tuple[float, int, RadixNode]] = []  # heap; entries may be stale
        self._num_entered = 0

    def match(self, request: Request, num_tokens: int) -> RadixNode:
        """End of the longest cached prefix of the first `num_tokens` of `request`; marks its path as accessed."""
        self.catch_up()
        if not self.enable_prefix_caching or num_tokens < self.block_size:
            return self.root
        contents = request.contents[: num_tokens // self.block_size]
        node, depth = self.root, 0
        while depth < len(contents):
            child = node.children.get(contents[depth])
            if child is None:
                break
            length = num_common(child.contents, contents, depth)
            node, depth = child, depth + length
            if length < len(child.contents):
                node = self._split(child, length)
                break
        self._clock = time = self._clock + 1
        at: RadixNode | None = node
        while at is not None:
            at.last_access = time
            time -= 1e-5
            at = at.parent
        return node

    def depth(self, node: RadixNode) -> int:
        """Blocks from the root to `node`."""
        return sum([len(at.blocks) for at in _upwards(node)])

    def num_unheld(self, node: RadixNode) -> int:
        """Unheld blocks up to `node`: no longer free once a request takes it."""
        return sum([len(at.blocks) for at in _upwards(node) if not at.num_locks])  # who holds a node holds its parents

    def adopt(self, request: Request, node: RadixNode) -> None:
        """Start `request` with the blocks up to `node`."""
        self._lock(node)
        self._node_of[request] = node
        request.block_ids = self._path(node)
        request.num_hashed_blocks = len(request.block_ids)

    def _path(self, node: RadixNode) -> list[int]:
        return [block for at in reversed(list(_upwards(node))) for block in at.blocks]

    def checkpoint(self, request: Request, num_tokens: int) -> None:
        """Give the full blocks of the first `num_tokens` of `request`, computed, to the tree."""
        self.catch_up()
        if not self.enable_prefix_caching:
            return
        num_full = num_tokens // self.block_size
        if len(request.contents) < num_full:
            request.contents = request.name_blocks(num_full)
        node, num_there = self._insert(request, num_full)
        num_prompt = request.num_prompt_tokens // self.block_size
        if 0 < num_prompt < num_full:
            self._insert(request, num_prompt)  # answers are evicted before prompts
        first = request.num_hashed_blocks
        if num_there > first:
            self._give_back(request.block_ids[first:num_there], False)
        request.block_ids[:num_full] = self._path(node)
        self._unlock(self._node_of.get(request))
        self._lock(node)
        self._node_of[request] = node
        request.num_hashed_blocks = num_full

    def _insert(self, request: Request, num_blocks: int) -> tuple[RadixNode, int]:
        """(node that ends the first blocks of `request`, how many were there before)."""
        contents, node, depth = request.contents[:num_blocks], self.root, 0
        self._touch(node)
        while depth < num_blocks:
            child = node.children.get(contents[depth])
            if child is None:
                break
            self._touch(child)
            length = num_common(child.contents, contents, depth)
            node = self._split(child, length) if length < len(child.contents) else child
            depth += length
        if depth == num_blocks:
            return node, depth
        self._clock += 2
        leaf = RadixNode(node, contents[depth:], request.block_ids[depth:num_blocks], self._clock - 2)
        node.children[contents[depth]] = leaf
        self._leaves.discard(node)
        self.num_evictable += len(leaf.blocks)
        self.num_free += len(leaf.blocks)
        self._offer(leaf)
        if self.listener is not None:
            self.listener.on_stored(leaf.contents, contents[depth - 1] if depth else None, 0)
        return leaf, depth

    def _touch(self, node: RadixNode) -> None:
        node.last_access = self._clock
        self._clock += 1

    def _split(self, child: RadixNode, length: int) -> RadixNode:
        assert child.parent is not None
        parent = RadixNode(child.parent, child.contents[:length], child.blocks[:length], self._clock)
        self._clock += 2
        parent.num_locks = child.num_locks
        parent.children[child.contents[length]] = child
        child.parent.children[child.contents[0]] = parent
        child.parent, child.contents, child.blocks = parent, child.contents[length:], child.blocks[length:]
        self._touch(child)
        return parent

    def _lock(self, node: RadixNode) -> None:
        for at in _upwards(node):
            if not at.num_locks:
                self.num_evictable -= len(at.blocks)
                self.num_free -= len(at.blocks)
                self._leaves.discard(at)
            at.num_locks += 1

    def _unlock(self, node: RadixNode | None) -> None:
        for at in _upwards(node or self.root):
            at.num_locks -= 1
            if not at.num_locks:
                self.num_evictable += len(at.blocks)
                self.num_free += len(at.blocks)
                if not at.children:
                    self._offer(at)

    def _offer(self, node: RadixNode) -> None:
        self._leaves.add(node)
        self._num_entered += 1
        heapq.heappush(self._oldest, (node.last_access, self._num_entered, node))

    def free(self, request: Request, num_tokens: int | None = None) -> None:
        """Free all blocks of `request`; tree blocks stay until evicted."""
        self.catch_up()
        self._give_back(request.block_ids[request.num_hashed_blocks :], False)
        self._unlock(self._node_of.pop(request, None))
        request.block_ids = []
        request.num_hashed_blocks = 0

    def publish(self, request: Request, num_computed: int | None = None) -> None:
        """No-op: the tree gets blocks by `checkpoint`."""

    def publish_own(self, request: Request, num_tokens: int) -> None:
        """No-op: tree blocks of a request that loses its blocks stay."""

    def can_have(self, num_blocks: int) -> bool:
        """Whether `num_blocks` more are available; if not, everything evictable is evicted, as they were asked for."""
        return num_blocks <= self.num_free or self.evict(num_blocks)

    def want(self, num_blocks: int) -> None:
        """Ensure `num_blocks` free beyond those set aside, once these are taken."""
        self._wanted = max(self._wanted, self._num_to_pop + num_blocks)

    def evict(self, num_blocks: int) -> bool:
        """Evict until `num_blocks` are free, if possible; return whether they are."""
        self.catch_up()
        self._evict(num_blocks)
        return self.num_free - self.num_evictable >= num_blocks

    def _evict(self, num_blocks: int) -> None:
        while self.num_free - self.num_evictable + self._num_to_pop < num_blocks and self._leaves:
            time, _, node = heapq.heappop(self._oldest)
            if node not in self._leaves:
                continue
            if node.last_access != time:
                self._num_entered += 1
                heapq.heappush(self._oldest, (node.last_access, self._num_entered, node))
                continue
            parent = node.parent
            assert parent is not None
            self._leaves.discard(node)
            self.num_evictable -= len(node.blocks)
            self.num_free -= len(node.blocks)
            self._give_back(node.blocks, False)
            del parent.children[node.contents[0]]
            if parent.parent is not None and not parent.children and not parent.num_locks:
                self._offer(parent)
            for content in node.contents if self.listener is not None else ():
                self._tell_removed(content)

    def _take(self, count: int, into: list[int]) -> None:
        self.catch_up()
        self._evict(count)
        super()._take(count, into)

    def catch_up(self) -> None:
        if self._wanted or self._num_to_pop:
            self._evict(max(self._wanted, self._num_to_pop))
            self._wanted = 0
        super().catch_up()

    def forget_all(self) -> None:
        """Clear all content; no request may hold a block."""
        self.evict(self.num_blocks)
        super().forget_all()
        self._begin()


def _upwards(node: RadixNode) -> Iterator[RadixNode]:
    """`node` and its parents, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent
