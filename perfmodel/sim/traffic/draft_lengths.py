"""Draft depths by batch size: the engine's `Speculation` settings, derived from the cost model.

Adaptive depth maximises tokens per second, E(k) / t(B, k), for B sequences and the acceptance recently observed. The
engine knows no seconds, so it gets a table."""

from dataclasses import replace
from itertools import islice
from math import prod

from perfmodel.cost import SpeculativeCostModel, step_costs
from perfmodel.engine import Speculation
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs.engine.description import BatchingRules
from perfmodel.specs.engine.speculation import SpeculativeConfig
from perfmodel.specs.scenario import Scenario

_REQUESTS_LOOKED_AT = 1000
_NUM_ESTIMATES = 20  # rows of the table: equal parts of [0, 1]
_ASSUMED_RATE = 0.7  # default: typical of chat and code with common drafters
_WITH_KV = ("draft_model", "eagle")  # drafters with KV of their own, in blocks like the model's
_ALL_BATCHES_UPTO = 16  # larger batches are evaluated in steps of an eighth


def speculation_of(scenario: Scenario, cost_model: SpeculativeCostModel | None = None) -> Speculation | None:
    """Scheduler settings; None without speculation.

    cost_model: step costs, for adaptive depth; default: the scenario's own"""
    config = scenario.engine.speculative_config
    if config is None:
        return None
    depths: tuple[tuple[int, ...], ...] = ()
    rates = _rates(config)
    if config.adaptive:
        depths = draft_lengths(scenario, config, cost_model or step_costs(scenario).speculative_cost_model())
    speculation = Speculation(
        nodes=config.nodes_by_depth,
        depths=depths,
        disable_by_batch_size=config.disable_by_batch_size,
        pipelined=config.pipelined,
        estimate=_judged_rate(rates),
        past_end=scenario.engine.rules.drafts_past_end,
        is_ahead=scenario.engine.plans_ahead,
        depth_by_match=config.depth_by_match,
    )
    return with_drafter(speculation, scenario.engine.rules, config.method)


def with_drafter(speculation: Speculation, rules: BatchingRules, method: str) -> Speculation:
    """`speculation` plus the needs of a drafter with its own KV under the engine's `rules`, by `method`."""
    if not rules.drafters_write_ahead or method not in _WITH_KV:
        return speculation
    reads_model = method == "eagle"
    return replace(
        speculation,
        num_lookahead=speculation.depth,
        num_input_tokens=0 if reads_model else 1,
        rereads_last_block=reads_model,
    )


def draft_lengths(
    scenario: Scenario, config: SpeculativeConfig, cost_model: SpeculativeCostModel
) -> tuple[tuple[int, ...], ...]:
    """`Speculation.depths` of `scenario` and `config` under `cost_model`: per interval of acceptance, depth by batch.

    All rates are scaled by estimated over expected acceptance."""
    rates, context, depths = _rates(config), mean_context(scenario), range(config.depth + 1)
    expected = _judged_rate(rates)
    most = scenario.engine.max_num_seqs
    batches = list(range(1, min(most, _ALL_BATCHES_UPTO) + 1))
    while batches[-1] < most:
        batches.append(min(batches[-1] + batches[-1] // 8, most))
    times = {batch: [cost_model.expected_time(batch, k, context) for k in depths] for batch in batches}
    rows = []
    for i in range(_NUM_ESTIMATES):
        factor = (i + 0.5) / _NUM_ESTIMATES / max(expected, 1e-9)
        profile = tuple(min(rate * factor, 1.0) for rate in rates)
        gains = [config.expected_tokens(k, profile) for k in depths]
        best = {b: max(depths, key=lambda k: gains[k] / times[b][k]) for b in batches}
        row, last = [], 0
        for batch in range(1, batches[-1] + 1):
            last = best.get(batch, last)
            row.append(last)
        rows.append(tuple(row))
    return tuple(rows)


def mean_context(scenario: Scenario) -> int:
    """Mean context of a decoding sequence in tokens."""
    drafts = list(islice(Workload(scenario).drafts(), _REQUESTS_LOOKED_AT))
    outputs = sum(draft.num_output_tokens for draft in drafts)
    seen = sum(draft.num_output_tokens * (draft.num_prompt_tokens + draft.num_output_tokens / 2) for draft in drafts)
    return max(1, round(seen / outputs)) if outputs else 1


def _rates(config: SpeculativeConfig) -> tuple[float, ...]:
    if config.acceptance is None:
        return (_ASSUMED_RATE,) * config.depth
    return config.acceptance.rates(config.depth, config.tree)


def _judged_rate(rates: tuple[float, ...]) -> float:
    """Share of judged tokens that are right; a token is judged if all before it were right."""
    judged = [prod(rates[:i]) for i in range(len(rates))]
    return sum(a * rate for a, rate in zip(judged, rates, strict=True)) / sum(judged)
