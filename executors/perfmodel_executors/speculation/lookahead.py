"""Drafting from text alone: prompt lookup, and lookahead decoding.

Prompt lookup (Saxena 2023, as in vLLM): what followed the earliest place at which the longest suffix of `longest` to
`shortest` tokens came before; nothing where none did.

Lookahead (Fu et al. 2024, section 3): n-grams from a Jacobi iteration beside the text, verified in the step that goes
on with it. A window of W columns and N - 1 rows: row r of column w is a guess of the token r + w behind the newest one,
which is row 0 of column 0. What the model says behind the last row is the new last row, the first one is dropped, and
each column with what came of it is an n-gram of the pool, found again by its first token. G of those that begin with
the newest token are guesses; where the pool has fewer, the newest others, or at first the columns. A row of the window
sees row 0 up to its column and its column's rows before it; a guess sees the newest token and its own tokens. Nothing
sees the guesses but themselves, so what the model says of them is what it says of a text.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from perfmodel.specs.engine.speculation import Lookahead
from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.proposer import Drafting, DraftShape, Proposer, Round, split_tokens

_BYTES = array("i").itemsize
_MAX_NGRAMS = 4096  # of a sequence; the oldest are forgotten


def lookup(tokens: Sequence[int], longest: int, shortest: int, count: int) -> list[int]:
    """At most `count` tokens that followed the longest earlier suffix; searched as bytes, in microseconds."""
    text = array("i", tokens).tobytes()
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = text[-length * _BYTES :]
        place = text.find(suffix, 0, len(text) - _BYTES)  # at least one token must have followed
        while place >= 0 and place % _BYTES:
            place = text.find(suffix, place + 1, len(text) - _BYTES)
        if place >= 0:
            follows = place // _BYTES + length
            return list(tokens[follows : follows + count])
    return []


class NgramProposer(Proposer):
    """Needs no model and no KV."""

    depends_on_text = True

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = (longest, shortest)

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        return [lookup(s.tokens, *self._lengths, s.depth) if s.depth else [] for s in drafting]


class LookaheadBranches(DraftShape):
    """Nodes of a step: 0 is the newest token, then the guesses, which alone are judged, then the window's rows."""

    def __init__(self, lookahead: Lookahead) -> None:
        super().__init__((1,) * (lookahead.ngram - 1))
        self.window, self.guesses = lookahead.window, lookahead.guesses
        for _ in range(self.guesses):
            for depth in range(1, self.depth + 1):
                self._add(depth, 0 if depth == 1 else len(self.depths) - 1)
        self._places = {(0, 0): 0}  # row and column -> node
        for row in range(self.depth):
            for column in range(not row, self.window):
                self._places[row, column] = len(self.depths)
                self._add(row + column, self._places[(row - 1, column) if row else (0, column - 1)], is_judged=False)

    def last_row(self, values: Sequence[int]) -> list[int]:
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
        if len(self._order) > _MAX_NGRAMS:
            oldest = next(iter(self._order))
            del self._order[oldest], self._tails[oldest[0]][oldest[1:]]

    def guesses(self, first: int, count: int) -> list[tuple[int, ...]]:
        """At most `count` different tails: of n-grams that begin with `first`, then of others, the newest first."""
        result = dict.fromkeys(reversed(self._tails.get(first, {})))
        for ngram in reversed(self._order):
            if len(result) >= count:
                break
            result[ngram[1:]] = None
        return list(result)[:count]


@dataclass
class _Iteration:
    rows: list[list[int]]
    pool: NgramPool = field(default_factory=NgramPool)

    def columns(self) -> list[tuple[int, ...]]:
        return list(zip(*self.rows, strict=True))

    def advance(self, predicted: list[int], num_accepted: int) -> None:
        """The model has predicted this behind the last row, and the text has grown by a token and those accepted."""
        for column, token in zip(self.columns(), predicted, strict=True):
            self.pool.add((*column, token))
        self.rows = [row[num_accepted:] + row[:num_accepted] for row in (*self.rows[1:], predicted)]


class LookaheadProposer(Proposer):
    """Needs no model; a step of the model is the draft of the next ones."""

    def __init__(self, branches: LookaheadBranches) -> None:
        self._branches = branches
        self._iterations: dict[int, _Iteration] = {}  # by sequence
        self._predicted: list[list[int]] = []

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        return [self._draft(sequence) if sequence.depth else [] for sequence in drafting]

    def verify(self, runner: StepRunner, round_: Round, is_warm_up: bool = False) -> list[int]:
        tokens = runner.run(round_.segments, is_warm_up)
        self._predicted = split_tokens(round_.segments[: len(round_.drafting)], tokens)
        return tokens

    def finalize(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        branches = self._branches
        for sequence, predicted, path in zip(drafting, self._predicted, paths, strict=True):
            if sequence.depth:
                self._iterations[sequence.key].advance(branches.last_row(predicted), len(path) % branches.window)

    def release(self, key: int) -> None:
        self._iterations.pop(key, None)

    def _draft(self, drafting: Drafting) -> list[int]:
        """The guesses' tokens, then the window's, whose first guesses are tokens of the text."""
        tokens, window = drafting.tokens, self._branches.window
        iteration = self._iterations.get(drafting.key)
        if iteration is None:
            starts = range(0, window * self._branches.depth, window)
            rows = [[tokens[(start + column) % len(tokens)] for column in range(window)] for start in starts]
            iteration = self._iterations[drafting.key] = _Iteration(rows)
        newest, count = tokens[-1], self._branches.guesses
        iteration.rows[0][0] = newest
        guesses = iteration.pool.guesses(newest, count) or iteration.columns()
        drafted = [token for i in range(count) for token in guesses[i % len(guesses)]]
        return drafted + [token for row in iteration.rows for token in row][1:]
