"""Batching disciplines: when waiting requests may join, and what they must reserve to do so.

| discipline | joins                                            | KV reserved on joining | prompt            |
|------------|--------------------------------------------------|------------------------|-------------------|
| none       | when nothing runs, alone                         | longest possible       | whole             |
| static     | when nothing runs, all that wait up to the limit | longest possible       | whole             |
| dynamic    | as static, once the batch is full or a wait over | longest possible       | whole             |
| iteration  | at any step (Orca)                               | longest possible       | whole             |
| continuous | at any step, within the token budget (vLLM)      | what it holds          | whole or in chunks|

A static or dynamic batch keeps its slots and its KV until its last request is done; rows that are done are not
computed further.
"""

__all__ = ["DISCIPLINES", "Discipline"]

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Discipline:
    """One row of the table above.

    joins_running:   new requests may join while others run
    waits_to_fill:   an idle engine waits for a full batch, or until the oldest has waited `batch_timeout`
    reserves_all:    a request is given KV blocks for the longest sequence the engine allows when it joins
    uses_budget:     `max_num_batched_tokens` limits a step (and chunked prefill applies)
    frees_together:  slots and blocks are released when the whole batch is done
    max_batch:       an upper limit on the batch beside max_num_seqs
    """

    joins_running: bool
    waits_to_fill: bool = False
    reserves_all: bool = True
    uses_budget: bool = False
    frees_together: bool = False
    max_batch: int | None = None


DISCIPLINES: dict[str, Discipline] = {
    "none": Discipline(joins_running=False, frees_together=True, max_batch=1),
    "static": Discipline(joins_running=False, frees_together=True),
    "dynamic": Discipline(joins_running=False, waits_to_fill=True, frees_together=True),
    "iteration": Discipline(joins_running=True),
    "continuous": Discipline(joins_running=True, reserves_all=False, uses_budget=True),
}
