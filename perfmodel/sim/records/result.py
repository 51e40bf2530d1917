"""`RunResult`: what came of serving a workload, simulated or executed, in vLLM's `bench serve` names."""

__all__ = ["RunResult"]

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.sim.records.ensemble import Ensemble
from perfmodel.specs.scenario import Scenario

if TYPE_CHECKING:
    from perfmodel.sim.records.lives import Lives


@dataclass(frozen=True)
class RunResult:
    """The summary, JSON-ready (`perfmodel.sim.records.summary` has its keys), with the records behind it.

    `requests` and `steps` are None when the records were streamed to disk instead of kept.
    """

    scenario: Scenario
    clock: str  # simulated | executed
    summary: dict[str, Any]
    requests: RequestColumns | None = None
    steps: StepColumns | None = None
    num_blocks: int = 0  # KV blocks of one replica
    notes: tuple[str, ...] = field(default=())
    ensemble: "Ensemble | Lives | None" = None  # what the intervals came from

    def to_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {"scenario": self.scenario.name, "clock": self.clock, **self.summary, "notes": list(self.notes)}
