"""`technique`: what a scenario shows of a technique, against the same scenario without it.

`perfmodel validate techniques` simulates and executes both and compares the two speedups.
"""

__all__ = ["Technique"]

from typing import Any

from pydantic import Field, field_validator

from perfmodel.files.base import Spec
from perfmodel.planning.metrics import ALIASES, Metric, metric_named


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
