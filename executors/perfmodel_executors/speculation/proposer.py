"""What a drafter is asked and what it answers; the shape of a draft: a chain is a tree with one candidate a depth."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from perfmodel_executors.models.batch import TokenSegment, TreeNodes, first_rows
from perfmodel_executors.runner import Passes, StepRunner

Part = TypeVar("Part")


class Drafting(NamedTuple):
    """A sequence of this step, by its request, whose tokens but the last are computed. depth: how deep to draft, 0: not
    at all; is_prompt: whether its last token is of the prompt (others may find its block from now on); draws: random
    numbers of the tokens behind, by depth; ahead: pipelined: tokens to draft behind its draft."""

    key: int
    tokens: Sequence[int]
    block_table: Sequence[int]
    depth: int
    is_prompt: bool = False
    draws: Sequence[int] = ()
    ahead: int = 0

    @property
    def num_computed(self) -> int:
        return len(self.tokens) - 1


class Round(NamedTuple):
    """A step to verify: sequences, their drafts, and all segments, those of `drafting` with their drafts first."""

    drafting: Sequence[Drafting]
    drafts: Sequence[Sequence[int]]
    segments: Sequence[TokenSegment]


class DraftShape:
    """Nodes behind the last known token, which is node 0. widths: candidates by depth; parents: the node before each of
    those that are judged, which come first; ancestors: bit j is set if a node sees node j, itself included; is_chain:
    the nodes are a text; has_ranks: candidates of one depth are distinguished."""

    is_chain = False
    has_ranks = False

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self.depth = len(self.widths)
        self.parents, self.depths, self.ancestors = [-1], [0], [1]

    def _add(self, depth: int, seen_by: int, is_judged: bool = True) -> None:
        self.depths.append(depth)
        self.ancestors.append(self.ancestors[seen_by] | 1 << len(self.ancestors))
        if is_judged:
            self.parents.append(seen_by)

    def path(self, node: int) -> list[int]:
        """The nodes from below node 0 to `node`; empty for node 0."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def rank(self, node: int) -> int:
        return 0

    def nodes(self, first: int, stop: int) -> TreeNodes:
        """Nodes [first, stop) as a segment's, those before them being computed."""
        return TreeNodes(first, self.depths[first:stop], self.ancestors[first:stop])


class DraftTree(DraftShape):
    """`widths[0]` candidates for the next token, and so on; `levels`: the nodes of each depth."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__(widths)
        self.is_chain = all(width == 1 for width in self.widths)
        self.has_ranks = not self.is_chain
        self.levels: list[range] = [range(1)]
        for depth, width in enumerate(self.widths, start=1):
            for parent in self.levels[-1]:
                for _ in range(width):
                    self._add(depth, parent)
            self.levels.append(range(self.levels[-1].stop, len(self.parents)))

    def rank(self, node: int) -> int:
        depth = self.depths[node]
        return (node - self.levels[depth].start) % self.widths[depth - 1]

    def level_of(self, drafting: Drafting, draft: Sequence[int], depth: int) -> TokenSegment:
        """The drafted nodes of `depth`, at least 1, behind the newest token; `draft`: all down to there."""
        if self.is_chain:
            return TokenSegment([draft[-1]], drafting.num_computed + depth, drafting.block_table)
        level = self.levels[depth]
        tokens, nodes = draft[level.start - 1 : level.stop - 1], self.nodes(level.start, level.stop)
        return TokenSegment(tokens, drafting.num_computed, drafting.block_table, is_verified=True, nodes=nodes)


class Proposer:
    """Drafts tokens; `propose` may be called twice in a step. depends_on_text: only the text says how many."""

    depends_on_text = False
    runner: Passes | None = None

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Make room for what the step will write."""

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        """For each sequence the nodes behind its last token, by depth; chunks: the parts of prompts in the step."""
        raise NotImplementedError

    def verify(self, runner: StepRunner, round_: Round, is_warm_up: bool = False) -> list[int]:
        return runner.run(round_.segments, is_warm_up)

    def finalize(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        """These nodes of each were right."""

    def release(self, key: int) -> None:
        """A request is done, or has lost its KV."""


def draft_by_level(
    drafting: Sequence[Drafting], candidates: Callable[[int, list[int], list[list[int]]], Sequence[Sequence[int]]]
) -> list[list[int]]:
    """Drafts that grow by one level of nodes a pass. candidates: (depth, sequences that draft deeper, drafts down to
    there) -> the likeliest tokens behind each of their nodes of that depth, sequence by sequence."""
    drafts: list[list[int]] = [[] for _ in drafting]
    for depth in range(max((sequence.depth for sequence in drafting), default=0)):
        active = [i for i, sequence in enumerate(drafting) if sequence.depth > depth]
        rows = candidates(depth, active, drafts)
        num_rows = len(rows) // len(active)
        for place, i in enumerate(active):
            drafts[i] += [token for row in rows[place * num_rows : (place + 1) * num_rows] for token in row]
    return drafts


def by_row(segments: Sequence[TokenSegment], parts: Sequence[Part]) -> list[Part]:
    """What each segment has, in the order of the segments' rows in their batch."""
    starts = first_rows(segments)
    return [parts[i] for i in sorted(range(len(starts)), key=starts.__getitem__)]


def split_tokens(segments: Sequence[TokenSegment], tokens: Sequence[int]) -> list[list[int]]:
    """Those of each segment, of all that a step gave."""
    left = iter(tokens)
    return [[next(left) for _ in range(segment.num_wanted)] for segment in segments]
