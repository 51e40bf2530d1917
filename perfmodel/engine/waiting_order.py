"""In which order an engine with a radix tree looks at those that wait (SGLang's schedule policies).

The list of those that wait is sorted anew, and stably, before each admission; it begins in the order in which requests
came, or came back.
"""

from collections.abc import Callable

from perfmodel.engine.config import Estimates
from perfmodel.engine.radix_blocks import RadixKVBlocks, RadixNode
from perfmodel.engine.request import Request

Order = Callable[[list[Request], RadixKVBlocks, Estimates], None]


def sort_waiting(waiting: list[Request], policy: str, blocks: RadixKVBlocks, rules: Estimates) -> bool:
    """Bring `waiting` into the order of `policy`, under `rules`; whether the tree of `blocks` was asked for all."""
    asks_tree = policy in _ASK_TREE and blocks.enable_prefix_caching
    if asks_tree and policy == "lpm" and len(waiting) > rules.most_sorted:
        return False
    if asks_tree or policy not in _ASK_TREE:
        ORDERS[policy](waiting, blocks, rules)
    return asks_tree


def _as_they_came(waiting: list[Request], blocks: RadixKVBlocks, rules: Estimates) -> None:
    """First come, first served."""


def _by_priority(waiting: list[Request], blocks: RadixKVBlocks, rules: Estimates) -> None:
    waiting.sort(key=lambda request: request.priority)


def _by_longest_output(waiting: list[Request], blocks: RadixKVBlocks, rules: Estimates) -> None:
    waiting.sort(key=lambda request: -request.max_output_tokens)


def _by_longest_prefix(waiting: list[Request], blocks: RadixKVBlocks, rules: Estimates) -> None:
    keys = _prefixes(waiting, blocks, rules)
    waiting.sort(key=lambda request: keys[request][1])


def _by_subtree(waiting: list[Request], blocks: RadixKVBlocks, rules: Estimates) -> None:
    """Depth first through the tree, the child with most of them behind it first."""
    nodes: dict[RadixNode, list[Request]] = {}
    for request, (node, _) in _prefixes(waiting, blocks, rules).items():
        nodes.setdefault(node, []).append(request)
    weights = {node: len(requests) for node, requests in nodes.items()}
    for node in _children_first(blocks):
        weights[node] = weights.get(node, 0) + sum(weights.get(child, 0) for child in node.children.values())
    waiting.clear()
    for node in _children_first(blocks, weights):
        waiting += nodes.get(node, ())


def _children_first(blocks: RadixKVBlocks, weights: dict[RadixNode, int] | None = None) -> list[RadixNode]:
    """All nodes, each behind its children, and these by weight where there are any."""
    order: list[RadixNode] = []
    stack = [(blocks.root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
            continue
        children = list(node.children.values())
        if weights is not None:
            children.sort(key=lambda child: -weights.get(child, 0))
        stack.append((node, True))
        stack += [(child, False) for child in reversed(children)]
    return order


def _prefixes(
    waiting: list[Request], blocks: RadixKVBlocks, rules: Estimates
) -> dict[Request, tuple[RadixNode, float]]:
    """The node that each of `waiting` begins with, and its tokens found with the sign turned; those that begin as
    another one does which also waits have no turn before it."""
    seen: set[object] = set()
    num_same = -(-rules.duplicate_tokens // blocks.block_size)
    found: dict[Request, tuple[RadixNode, float]] = {}
    for request in waiting:
        node = blocks.match(request, request.num_tokens)
        num_tokens = blocks.depth(node) * blocks.block_size
        key = float(-min(num_tokens, request.num_tokens - 1))
        if num_tokens <= rules.duplicate_tokens:
            beginning = request.contents[:num_same]
            if len(beginning) == num_same and beginning in seen:
                key = float("inf")
            else:
                seen.add(beginning)
        found[request] = (node, key)
    return found


ORDERS: dict[str, Order] = {
    "fcfs": _as_they_came,
    "priority": _by_priority,
    "lof": _by_longest_output,
    "lpm": _by_longest_prefix,
    "dfs-weight": _by_subtree,
}
_ASK_TREE = ("lpm", "dfs-weight")
