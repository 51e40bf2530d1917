"""Step tables for scenarios, shared by those that run the same steps: of a sweep, a search, a validation."""

__all__ = ["step_tables_of"]

from collections import deque
from itertools import islice
from typing import Any

from perfmodel.cost import Calibration, EngineProfile, OperatorTimer, StepTables, scenario_graph
from perfmodel.ops.ragged import ContextSpread
from perfmodel.sim.workload import Workload
from perfmodel.specs.scenario import Scenario

# What the engine schedules by; no operator depends on it.
_SCHEDULING = {
    "attention_dp_timeout_iters",
    "batch_timeout_ms",
    "batching",
    "block_size",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "long_prefill_token_threshold",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks_override",
    "poll_every",
    "prefill_exclusive",
    "reserve_output",
    "scheduler_reserve_full_isl",
    "scheduling_policy",
}
_REQUESTS_LOOKED_AT = 1000
_recent: deque[tuple[tuple[Any, ...], StepTables]] = deque(maxlen=4)


def step_tables_of(scenario: Scenario, calibration: Calibration, profile: EngineProfile) -> StepTables:
    """The costs of the scenario's steps; the tables of one of the last few scenarios if they are the same."""
    method = scenario.sampling.method
    bytes_per_logit = profile.bytes_per_logit(method, scenario.model)
    engine = scenario.engine.model_dump(exclude=_SCHEDULING)
    spread = _context_spread(scenario) if calibration.minds_ragged_batches else None
    key = (method, bytes_per_logit, scenario.routing, spread, engine, scenario.hardware, scenario.model, calibration)
    for known, tables in _recent:
        if known == key:
            return tables
    tables = StepTables(scenario_graph(scenario, profile, spread), OperatorTimer(scenario.hardware, calibration))
    _recent.appendleft((key, tables))
    return tables


def _context_spread(scenario: Scenario) -> ContextSpread | None:
    """Of the contexts that the scenario's requests have while they decode."""
    drafts = islice(Workload(scenario).drafts(), _REQUESTS_LOOKED_AT)
    return ContextSpread.of((draft.num_prompt_tokens, draft.num_output_tokens) for draft in drafts)
