"""`AcceptanceCounts`: how many drafted tokens were right, by depth and candidate, as `acceptance.measured` reads it."""

from collections.abc import Sequence
from pathlib import Path

from perfmodel.specs.engine.speculation import Acceptance, MeasuredAcceptance
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.speculation.proposer import DraftShape


class AcceptanceCounts:
    """Counts over a run. A token is examined when all before it were right; a drafter that had none to offer counts as
    wrong. num_steps: of a sequence that drafts; num_offered: of these, with something to verify."""

    def __init__(self, tree: DraftShape, method: str = "", model: str = "") -> None:
        self._tree, self._method, self._model = tree, method, model
        self.examined = [0] * tree.depth
        self.by_rank = [[0] * width for width in tree.widths]
        self._num_guessed, self._has_guesses = 0, False  # pipelined: of `accepted`, the model's own tokens
        self.num_steps = self.num_offered = 0

    def add(self, depth: int, path: Sequence[int], num_drafted: int, guess: bool | None = None) -> None:
        """A sequence was to draft `depth` deep, had `num_drafted` tokens verified, and those of `path` were right.
        guess: pipelined: whether the drafter has guessed the model's token behind them; None: it was not judged. It
        counts with the tokens drafted in its place, the deepest ones at last, and brings nothing."""
        self.num_steps += bool(depth)
        self.num_offered += bool(num_drafted)
        if guess is not None:
            place = min(len(path), self._tree.depth - 1)
            self.examined[place] += 1
            self.by_rank[place][0] += guess
            self._num_guessed += guess
            self._has_guesses = True
        for i in range(min(depth, len(path) + 1)):
            self.examined[i] += 1
        for i, node in enumerate(path):
            self.by_rank[i][self._tree.rank(node)] += 1

    @property
    def accepted(self) -> list[int]:
        return [sum(ranks) for ranks in self.by_rank]

    @property
    def rates(self) -> list[float]:
        """Conditional acceptance by depth, as far as anything was examined."""
        return [a / n for a, n in zip(self.accepted, self.examined, strict=True) if n]

    @property
    def mean_length(self) -> float:
        """Tokens that a drafting sequence got from a step on average, the one that comes in any case included."""
        return 1 + (sum(self.accepted) - self._num_guessed) / max(1, self.num_steps)

    def in_words(self) -> str:
        rates = ", ".join(f"{rate:.2f}" for rate in self.rates) or "nothing was drafted"
        return (
            f"Acceptance measured with {self._method}, by position and given that all before was right: {rates}; "
            f"{self.mean_length:.2f} tokens a step of a sequence that drafts."
        )

    def measured(self) -> MeasuredAcceptance | None:
        if not any(self.examined):
            return None
        return MeasuredAcceptance(
            method=self._method,
            model=self._model,
            examined=tuple(self.examined),
            accepted=tuple(self.accepted),
            by_rank=tuple(map(tuple, self.by_rank)) if self._tree.has_ranks else None,
            offered=None if self._has_guesses else self.num_offered,
        )

    def acceptance(self) -> Acceptance | None:
        """What was counted, for a simulation; None if nothing was drafted. Depths that nothing got to are left out."""
        if not any(self.examined):
            return None
        if not self._tree.has_ranks:
            offered = 1.0 if self._has_guesses else self.num_offered / self.num_steps
            return Acceptance(per_position=tuple(self.rates), offered=offered)
        counted = [(n, ranks) for n, ranks in zip(self.examined, self.by_rank, strict=True) if n]
        return Acceptance(per_rank=tuple(tuple(a / n for a in ranks) for n, ranks in counted))

    def write(self, path: Path) -> None:
        measured = self.measured()
        if measured is not None:
            path.write_text(measured.model_dump_json(indent=2) + "\n", encoding="utf-8", newline="\n")


def with_acceptance(scenario: Scenario, acceptance: Acceptance | None) -> Scenario:
    config = scenario.engine.speculative_config
    if acceptance is None or config is None:
        return scenario
    config = config.model_copy(update={"acceptance": acceptance})
    return scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"speculative_config": config})})
