"""Lookahead decoding: n-grams from a Jacobi iteration beside the text, verified in the step that goes on with it.

Fu et al. 2024, section 3. A window of W columns and N - 1 rows: row r of column w is a guess of the token r + w behind
the newest one, which is row 0 of column 0. What the model says behind the last row is the new last row, the first one
is dropped, and each column with what came of it is an n-gram of the pool, found again by its first token. G of those
that begin with the newest token are guesses; where the pool has fewer, the newest others, or at first the columns.

A row of the window sees row 0 up to its column and its column's rows before it; a guess sees the newest token and its
own tokens. Nothing sees the guesses but themselves, so what the model says of them is what it says of a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.specs.engine.speculation import Lookahead
from perfmodel_executors.models.batch import TokenSegment, TreeNodes
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.proposer import Drafting

_MOST_NGRAMS = 4096  # of a sequence; the oldest are forgotten


class LookaheadBranches:
    """Nodes of a step: 0 is the newest token, then those of the guesses, one after the other, then the window's others,
    row by row. Guesses alone are judged."""

    is_chain = False
    has_ranks = False

    def __init__(self, lookahead: Lookahead) -> None:
        self.window, self.guesses = lookahead.window, lookahead.guesses
        self.depth = lookahead.ngram - 1
        self.widths = (1,) * self.depth
        self.parents = [-1]
        self.depths, self.ancestors = [0], [1]
        for _ in range(self.guesses):
            for depth in range(1, self.depth + 1):
                self.parents.append(0 if depth == 1 else len(self.parents) - 1)
                self._add(depth, self.ancestors[self.parents[-1]])
        self._places = {(0, 0): 0}  # row and column -> node
        for row in range(self.depth):
            for column in range(not row, self.window):
                self._places[row, column] = len(self.depths)
                self._add(row + column, self.ancestors[self._places[(row - 1, column) if row else (0, column - 1)]])

    def _add(self, depth: int, seen: int) -> None:
        self.depths.append(depth)
        self.ancestors.append(seen | 1 << len(self.ancestors))

    def size(self, depth: int) -> int:
        """All nodes, however deep."""
        return len(self.depths)

    def path(self, node: int) -> list[int]:
        """The nodes of its guess down to `node`; empty for node 0."""
        first = node - (node - 1) % self.depth
        return list(range(first, node + 1)) if node else []

    def rank(self, node: int) -> int:
        """Guesses are not distinguished."""
        return 0

    def nodes(self, first: int, stop: int) -> TreeNodes:
        """Nodes [first, stop) as a segment's, those before them being computed."""
        return TreeNodes(first, self.depths[first:stop], self.ancestors[first:stop])

    def last_row(self, values: Sequence[int]) -> list[int]:
        """The values of the window's last row; `values`: one for each node."""
        return [values[self._places[self.depth - 1, column]] for column in range(self.window)]


class NgramPool:
    """N-grams of one sequence by their first token, the newest last."""

    def __init__(self) -> None:
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}
        self._order: dict[tuple[int, ...], None] = {}  # whole n-grams

    def add(self, ngram: tuple[int, ...]) -> None:
        tails = self._tails.setdefault(ngram[0], {})
        tails.pop(ngram[1:], None)
        tails[ngram[1:]] = None
        self._order.pop(ngram, None)
        self._order[ngram] = None
        if len(self._order) > _MOST_NGRAMS:
            oldest = next(iter(self._order))
            del self._order[oldest], self._tails[oldest[0]][oldest[1:]]

    def guesses(self, first: int, count: int) -> list[tuple[int, ...]]:
        """At most `count` different tails: of n-grams that begin with `first`, then of others, the newest first."""
        found = dict.fromkeys(reversed(self._tails.get(first, {})))
        for ngram in reversed(self._order):
            if len(found) >= count:
                break
            found[ngram[1:]] = None
        return list(found)[:count]


@dataclass
class _Iteration:
    """The window of one sequence, row by row, and the n-grams that came of it."""

    rows: list[list[int]]
    pool: NgramPool

    @classmethod
    def begin(cls, tokens: Sequence[int], branches: LookaheadBranches) -> "_Iteration":
        """A window whose first guesses are tokens of the text."""
        window = branches.window
        places = [[row * window + column for column in range(window)] for row in range(branches.depth)]
        return cls([[tokens[place % len(tokens)] for place in row] for row in places], NgramPool())

    def columns(self) -> list[tuple[int, ...]]:
        return list(zip(*self.rows, strict=True))

    def advance(self, said: list[int], num_accepted: int) -> None:
        """The model has said this behind the last row, and the text has grown by a token and those accepted."""
        for column, token in zip(self.columns(), said, strict=True):
            self.pool.add((*column, token))
        rows = [*self.rows[1:], said]
        self.rows = [row[num_accepted:] + row[:num_accepted] for row in rows]


class LookaheadProposer:
    """Needs no model; a step of the model is the draft of the next ones."""

    depends_on_text = False
    runner = None

    def __init__(self, branches: LookaheadBranches) -> None:
        self._branches = branches
        self._iterations: dict[int, _Iteration] = {}  # by sequence
        self._said: list[list[int]] = []

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        """The model's cache is the only one."""

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        return [self._draft(each) if each.depth else [] for each in drafting]

    def verify(
        self,
        runner: StepRunner,
        drafting: Sequence[Drafting],
        drafts: Sequence[Sequence[int]],
        segments: Sequence[TokenSegment],
        is_warm_up: bool = False,
    ) -> list[int]:
        tokens, start = runner.run(segments, is_warm_up), 0
        self._said = []
        for segment in segments[: len(drafting)]:
            self._said.append(tokens[start : start + segment.num_wanted])
            start += segment.num_wanted
        return tokens

    def settle(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        for each, said, path in zip(drafting, self._said, paths, strict=True):
            if each.depth:
                self._iterations[each.key].advance(self._branches.last_row(said), len(path) % self._branches.window)

    def release(self, key: int) -> None:
        self._iterations.pop(key, None)

    def _draft(self, drafting: Drafting) -> list[int]:
        """The guesses' tokens, then the window's."""
        iteration = self._iterations.get(drafting.key)
        if iteration is None:
            iteration = self._iterations[drafting.key] = _Iteration.begin(drafting.tokens, self._branches)
        newest, count = drafting.tokens[-1], self._branches.guesses
        iteration.rows[0][0] = newest
        guesses = iteration.pool.guesses(newest, count) or iteration.columns()
        tokens = [token for i in range(count) for token in guesses[i % len(guesses)]]
        return tokens + [token for row in iteration.rows for token in row][1:]
