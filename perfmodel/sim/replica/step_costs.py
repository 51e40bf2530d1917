"""Step costs shared by scenarios with the same steps: in sweeps, searches and validation."""

from collections import deque
from itertools import islice
from typing import Any

from perfmodel import cost
from perfmodel.cost import Calibration, EngineProfile, StepCosts, StepTables
from perfmodel.ops.attention.decode import ContextSpread
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs.scenario import Scenario

# Scheduler settings; no operator depends on them.
_SCHEDULING = {
    *("api_server_count", "media_loading_threads", "mm_processor_cache_gb"),
    *("attention_dp_timeout_iters", "batch_timeout_ms", "batching", "block_size", "enable_chunked_prefill"),
    *("enable_prefix_caching", "gpu_memory_utilization", "long_prefill_token_threshold", "max_model_len"),
    *("max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override", "poll_every", "prefill_exclusive"),
    *("disable_chunked_mm_input", "max_cpu_loras", "reserve_output", "scheduler_reserve_full_isl", "scheduling_policy"),
}
_REQUESTS_LOOKED_AT = 1000
_recent: deque[tuple[tuple[Any, ...], ContextSpread | None, StepTables]] = deque(maxlen=4)
_recent_spreads: deque[tuple[Scenario, ContextSpread | None]] = deque(maxlen=4)
_recent_drafts: deque[tuple[tuple[Any, ...], cost.DraftTables]] = deque(maxlen=4)


def shared_step_costs(
    scenario: Scenario, calibration: Calibration | None = None, profile: EngineProfile | None = None
) -> StepCosts:
    """Step costs, reusing recent equal tables. calibration, profile: both from `scenario_fits`, or neither."""
    if calibration is None or profile is None:
        calibration, profile = cost.scenario_fits(scenario)
    spread = _context_spread(scenario) if calibration.has_ragged_cost else None
    key = _key(scenario, calibration, profile, None)
    equal = [(known_spread, tables) for known, known_spread, tables in _recent if known == key]
    tables = next((tables for known_spread, tables in equal if known_spread == spread), None)
    if tables is None:
        timer = cost.OperatorTimer(scenario.hardware, calibration)
        like = equal[0][1] if equal else None
        tables = StepTables(cost.scenario_graph(scenario, profile, spread), timer, like)
        _recent.appendleft((key, spread, tables))
    config, drafts = scenario.engine.speculative_config, None
    if config is not None:
        key = _key(scenario, calibration, profile, config)
        drafts = next((drafts for known, drafts in _recent_drafts if known == key), None)
        if drafts is None:
            drafts = cost.scenario_drafts(scenario, calibration, profile, tables.graph)
            assert drafts is not None
            _recent_drafts.appendleft((key, drafts))
    return StepCosts(tables, profile, drafts)


def _key(scenario: Scenario, calibration: Calibration, profile: EngineProfile, own: Any) -> tuple[Any, ...]:
    """Cache key: equal for scenarios with equal costs. `own`: further inputs."""
    method = scenario.sampling.method
    logits = method, profile.bytes_per_logit(method, scenario.model)
    engine = scenario.engine.model_dump(exclude=_SCHEDULING | {"speculative_config"}), scenario.engine.plans_ahead
    named = scenario.routing, scenario.traffic.adapters
    return (*logits, *named, *engine, scenario.hardware, scenario.model, calibration, own)


def _context_spread(scenario: Scenario) -> ContextSpread | None:
    """Spread of decode contexts over the scenario's requests; cached for recent traffic, as draws share it."""
    for other, spread in _recent_spreads:
        is_same = other.traffic is scenario.traffic and other.model is scenario.model and other.seed == scenario.seed
        if is_same and (other.engine, other.prompt_compression) == (scenario.engine, scenario.prompt_compression):
            return spread
    drafts = islice(Workload(scenario).drafts(), _REQUESTS_LOOKED_AT)
    spread = ContextSpread.of((draft.num_prompt_tokens, draft.num_output_tokens) for draft in drafts)
    _recent_spreads.appendleft((scenario, spread))
    return spread
