"""The records of a run as columns: one row per request, one per step."""

__all__ = ["RequestColumns", "StepColumns"]

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

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
    # Only where a limit asks for them: how long a reader waited for tokens, and the longest gap between two
    reader_wait_s: Floats | None = None
    max_itl_s: Floats | None = None
    # Only of turns of conversations: which one, and the turn's number from 0
    session: Ints | None = None
    turn: Ints | None = None

    def __len__(self) -> int:
        return len(self.request_id)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are there."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    def some(self, rows: Ints) -> "RequestColumns":
        """The requests of these rows."""
        return RequestColumns(**{name: getattr(self, name)[rows] for name in self.names})

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
    num_drafts: Ints
    num_draft_tokens: Ints
    num_accepted_tokens: Ints

    def __len__(self) -> int:
        return len(self.index)
