"""What a scenario shows of a technique, what it and its baseline gave on both clocks, how far speedups are apart.

speedup = how many times better the scenario's metric is than its baseline's
quotient = simulated speedup / executed speedup

    right           both speedups lie on the same side of 1, and the quotient within 15 % of it
    proves nothing  hardly any speedup is simulated, and the quotient lies within 15 %: any model would be as right
    missed          all others
"""

__all__ = ["CLOSE", "LEAST_GAIN", "Outcome", "Sides", "Technique", "TechniqueRun", "TechniqueVerdict", "outcome_of"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator

from perfmodel.files.base import Spec
from perfmodel.planning.metrics import ALIASES, Metric, metric_named

Outcome = Literal["right", "missed", "proves nothing"]

CLOSE = 0.15  # how far a quotient of speedups may be from 1
LEAST_GAIN = 0.05  # a simulated speedup nearer to 1 is less than what repeated runs of one pair differ by


def outcome_of(simulated: float, executed: float, quotient: float) -> Outcome:
    """What a pair has shown: by the `simulated` and the `executed` speedup, and their `quotient`."""
    is_close = abs(quotient - 1.0) <= CLOSE
    if is_close and abs(simulated - 1.0) < LEAST_GAIN:
        return "proves nothing"
    return "right" if is_close and (simulated > 1.0) == (executed > 1.0) else "missed"


class Technique(Spec):
    """A technique and what it is compared with.

    name:     of the technique, any text
    page:     its page in docs/techniques, without the suffix; none where there is none yet
    baseline: `--set` overrides that take the technique out of the scenario
    metric:   of a run, by which both are compared; a speedup says how many times better the scenario is
    """

    name: str = Field(min_length=1)
    page: str | None = Field(default=None, pattern="^[a-z0-9-]+$")
    baseline: tuple[str, ...] = Field(min_length=1)
    metric: str = "mean_e2el_ms"

    @field_validator("baseline", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("metric")
    @classmethod
    def _is_of_a_run(cls, value: str) -> str:
        name = ALIASES.get(value, value)
        metric_named(name, "run")
        return name

    @property
    def found(self) -> Metric:
        """The metric."""
        return metric_named(self.metric, "run")

    def speedup(self, value: float, baseline: float) -> float:
        """How many times better `value` of the metric is than the baseline's."""
        return baseline / value if self.found.is_better_low else value / baseline


class Sides(NamedTuple):
    """A figure with the technique and of the baseline."""

    scenario: float
    baseline: float


@dataclass(frozen=True)
class TechniqueRun:
    """One workload: the metric on both clocks, and the bias of the executed steps' predicted durations."""

    simulated: Sides
    executed: Sides
    step_bias: Sides

    def to_json(self) -> dict[str, list[float]]:
        return {name: list(getattr(self, name)) for name in ("simulated", "executed", "step_bias")}

    @classmethod
    def from_json(cls, row: Mapping[str, Sequence[float]]) -> "TechniqueRun":
        """What `to_json` gave. Raises KeyError or TypeError for anything else."""
        return cls(Sides(*row["simulated"]), Sides(*row["executed"]), Sides(*row["step_bias"]))


@dataclass(frozen=True)
class TechniqueVerdict:
    """A technique over its runs, each of another seed: medians, since a run on a shared machine may go astray.

    simulated, executed: speedups
    quotients: simulated over executed speedup of each run, compared with itself
    step_bias: how much longer steps are predicted to take than they take, of the scenario and of the baseline
    key:       of the pair as it was run (`pair_key`); date: of the runs, ISO
    """

    technique: Technique
    file: str
    simulated: float
    executed: float
    quotients: Sequence[float]
    step_bias: Sides
    key: str
    date: str

    @classmethod
    def of(cls, technique: Technique, file: str, runs: Sequence[TechniqueRun], key: str, date: str) -> Self:
        """What `runs` of the pair of `technique` and `file` have shown; `key` and `date` as of the class."""
        simulated, executed = (
            [technique.speedup(*getattr(run, clock)) for run in runs] for clock in ("simulated", "executed")
        )
        quotients = [one / other for one, other in zip(simulated, executed, strict=True)]
        bias = Sides(*(median(run.step_bias[side] for run in runs) for side in range(2)))
        return cls(technique, file, median(simulated), median(executed), quotients, bias, key, date)

    @classmethod
    def from_json(cls, row: Mapping[str, Any], technique: Technique) -> Self:
        """What `to_json` gave. Raises KeyError or TypeError for anything else."""
        bias = Sides(row["step_bias"], row["baseline_step_bias"])
        shown = row["simulated"], row["executed"], row["quotients"]
        return cls(technique, row["file"], *shown, bias, row["key"], row["date"])

    @property
    def quotient(self) -> float:
        """Simulated over executed speedup: the median over the runs."""
        return median(self.quotients)

    @property
    def outcome(self) -> Outcome:
        """Whether the simulator was right."""
        return outcome_of(self.simulated, self.executed, self.quotient)

    def __str__(self) -> str:
        found = f"simulated {self.simulated:.3f}, executed {self.executed:.3f}, quotient {self.quotient:.3f}"
        return f"{self.file}: {found}: {self.outcome}"

    def to_json(self) -> dict[str, Any]:
        bias = self.step_bias
        return {
            "technique": self.technique.name,
            "file": self.file,
            "page": self.technique.page,
            "metric": self.technique.metric,
            "simulated": self.simulated,
            "executed": self.executed,
            "quotient": self.quotient,
            "verdict": self.outcome,
            "quotients": list(self.quotients),
            "step_bias": bias.scenario,
            "baseline_step_bias": bias.baseline,
            "key": self.key,
            "date": self.date,
        }
