"""`DraftShape`, the shape of a draft, and `DraftTree`. A chain is a tree with one candidate at each depth."""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from perfmodel_executors.models.batch import TreeNodes


class DraftShape(Protocol):
    """Nodes behind the last known token, which is node 0, and what each sees.

    parents: the node before each of those that are judged, which come first; -1 for node 0
    depths:  how far each is behind node 0
    widths:  candidates by depth, as far as they are counted
    """

    parents: list[int]
    widths: tuple[int, ...]

    @property
    def depth(self) -> int:
        """How many drafted tokens can be right."""
        ...

    @property
    def depths(self) -> list[int]: ...

    @property
    def is_chain(self) -> bool:
        """Whether the nodes are a text."""
        ...

    @property
    def has_ranks(self) -> bool:
        """Whether candidates of one depth are distinguished."""
        ...

    def path(self, node: int) -> list[int]:
        """The nodes from below node 0 to `node`; empty for node 0."""
        ...

    def rank(self, node: int) -> int:
        """Which candidate of its parent a node is, the likeliest first."""
        ...

    def nodes(self, first: int, stop: int) -> TreeNodes:
        """Nodes [first, stop) as a segment's, those before them being computed."""
        ...


class DraftTree:
    """Nodes by depth: 0 is the last known token, then `widths[0]` candidates for the next one, and so on.

    parents: the node before each; -1 for node 0
    levels:  the nodes of each depth; levels[0] is node 0 alone
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self.parents: list[int] = [-1]
        self.levels: list[range] = [range(1)]
        for width in self.widths:
            first = len(self.parents)
            self.parents += [parent for parent in self.levels[-1] for _ in range(width)]
            self.levels.append(range(first, len(self.parents)))

    @property
    def depth(self) -> int:
        return len(self.widths)

    @property
    def is_chain(self) -> bool:
        return all(width == 1 for width in self.widths)

    @property
    def has_ranks(self) -> bool:
        return not self.is_chain

    @cached_property
    def depths(self) -> list[int]:
        """Depth of each node."""
        return [depth for depth, level in enumerate(self.levels) for _ in level]

    @cached_property
    def ancestors(self) -> list[int]:
        """Ancestors of each node as a bit mask: bit j is set if node j is on its path, itself included."""
        bits = [1]
        for node, parent in enumerate(self.parents[1:], start=1):
            bits.append(bits[parent] | 1 << node)
        return bits

    def size(self, depth: int) -> int:
        """Nodes down to `depth`."""
        return self.levels[depth].stop

    def path(self, node: int) -> list[int]:
        """The nodes from below node 0 to `node`; empty for node 0."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def rank(self, node: int) -> int:
        """Which candidate of its parent a node is, the likeliest first."""
        depth = self.depths[node]
        return (node - self.levels[depth].start) % self.widths[depth - 1]

    def nodes(self, first: int, stop: int) -> TreeNodes:
        """Nodes [first, stop) as a segment's, those before them being computed."""
        return TreeNodes(first, self.depths[first:stop], self.ancestors[first:stop])
