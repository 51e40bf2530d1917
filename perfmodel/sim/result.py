"""`RunResult`: what came of serving a workload, simulated or executed, in vLLM's `bench serve` names."""

__all__ = ["RequestColumns", "RunResult", "StepColumns"]

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.specs.scenario import Scenario

if TYPE_CHECKING:
    from perfmodel.sim.ensemble import Ensemble

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RequestColumns:
    """One row per request that finished, in order of finishing. Times in seconds since the start of the run."""

    request_id: Ints
    arrival_s: Floats
    first_scheduled_s: Floats
    first_token_s: Floats
    finished_s: Floats
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    num_cached_tokens: Ints
    num_preemptions: Ints
    replica: Ints

    def __len__(self) -> int:
        return len(self.request_id)

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> Floats:
        return self.finished_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """(E2E - TTFT) / (output tokens - 1); nan for one-token answers, which have no TPOT."""
        later, nans = self.num_output_tokens - 1, np.full(len(self), np.nan)
        tpot_s: Floats = np.divide(self.finished_s - self.first_token_s, later, out=nans, where=later > 0)
        return tpot_s


@dataclass(frozen=True)
class StepColumns:
    """One row per step record (see `perfmodel.engine.StepRecord`); times in seconds."""

    replica: Ints
    index: Ints
    num_steps: Ints
    start_s: Floats
    end_s: Floats
    first_duration_s: Floats
    num_tokens: Ints
    num_decodes: Ints
    decode_context: Ints
    num_chunks: Ints
    num_running: Ints
    num_waiting: Ints
    used_blocks: Ints

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class RunResult:
    """The summary (design section 3.3, JSON-ready) with the records behind it.

    `requests` and `steps` are None when the records were streamed to disk instead of kept.
    """

    scenario: Scenario
    clock: str  # simulated | executed
    summary: dict[str, Any]
    requests: RequestColumns | None = None
    steps: StepColumns | None = None
    num_blocks: int = 0  # KV blocks of one replica
    notes: tuple[str, ...] = field(default=())
    ensemble: "Ensemble | None" = None  # what the intervals came from

    def to_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {"scenario": self.scenario.name, "clock": self.clock, **self.summary, "notes": list(self.notes)}
