"""From a scenario to its engines: the one place that turns engine arguments into scheduler settings, for both clocks.

The lag of a freed slot (1 to 2 steps in recorded closed loops) follows from the serve loop: asynchronous scheduling
plans step N+1 when N starts, so a slot freed by N stays empty during N+1; synchronously it is refilled at once."""

from dataclasses import replace
from typing import NamedTuple

from perfmodel import engine as eng
from perfmodel.cost import SpeculativeCostModel, StepCosts
from perfmodel.cost.memory.groups import kv_groups
from perfmodel.cost.memory.offload import RestoreCost, least_restored_tokens, restore_cost
from perfmodel.cost.memory.plan import num_buffers
from perfmodel.engine import (
    AdapterLimits,
    EncoderRules,
    Estimates,
    HostBlocks,
    KVBlockManager,
    SchedulerConfig,
    ServeLoop,
    Slots,
)
from perfmodel.engine.token_watch import TokenWatch
from perfmodel.errors import SpecError
from perfmodel.kv_groups import KVGroup
from perfmodel.ops.formats import served_model
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.sim.clock import TickEnvironment, to_ticks
from perfmodel.sim.replica.backend import SimulatedBackend
from perfmodel.sim.replica.lockstep import Lockstep, PromptBalance, RankPadding
from perfmodel.sim.replica.pipeline import Pipeline
from perfmodel.sim.traffic.distributions import class_shares
from perfmodel.sim.traffic.draft_lengths import speculation_of
from perfmodel.sim.traffic.workload import ImagePlan
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario


class SecondTier(NamedTuple):
    """capacity: blocks; least_tokens: shorter prefixes are recomputed; cost: of copies on one device's link"""

    capacity: int
    least_tokens: int
    cost: RestoreCost

    def blocks(self, has_tensors: bool = False) -> HostBlocks:
        """An empty tier; with `has_tensors` plans list block copies."""
        copies = eng.HostCopies() if has_tensors else None
        return HostBlocks(self.capacity, self.least_tokens, self.cost.is_awaited, copies)


def second_tier(scenario: Scenario, costs: StepCosts) -> SecondTier | None:
    """Second KV tier of each engine of `scenario` under `costs`; None without one. Raises SpecError for slots."""
    offload = scenario.engine.kv_offload
    if offload is None:
        return None
    if _slots_of(scenario.engine) is not None:
        raise SpecError(
            f"{scenario.name}: got engine.kv_offload with slots ({scenario.engine.profile}), which keep the prompts of "
            f"free slots in the host's memory by themselves; leave it out."
        )
    cost = restore_cost(scenario, offload, costs.graph)
    capacity = int(offload.capacity_bytes // cost.block_bytes) if cost.block_bytes else 0
    return SecondTier(capacity, least_restored_tokens(scenario, offload, costs.graph, costs.timer), cost)


def scheduler_config(
    scenario: Scenario, record_positions: bool = False, cost_model: SpeculativeCostModel | None = None
) -> SchedulerConfig:
    """Scheduler settings; `max_model_len` defaults to the model's maximum. cost_model: see `speculation_of`."""
    engine, model = scenario.engine, served_model(scenario.model, scenario.engine)
    config = engine_scheduler_config(engine, engine.max_model_len or model.max_position_embeddings)
    slots = config.slots
    if slots is not None and record_positions:  # a slot counts its tokens but holds no blocks: recomputed
        slots = replace(slots, reuses=False)
    adapters = scenario.traffic.adapters
    if config.adapters is not None and adapters is not None:
        config = replace(config, adapters=replace(config.adapters, num_adapters=adapters.count))
    return replace(
        config,
        slots=slots,
        stays_of_preempted="nothing" if model.has_states else config.stays_of_preempted,  # a state is not in blocks
        spans=model.attention_spans,
        speculation=speculation_of(scenario, cost_model),
        record_positions=record_positions,
        encoder=_encoder_rules(scenario),
        has_shapes=scenario.traffic.structured_outputs is not None,
    )


def _encoder_rules(scenario: Scenario) -> EncoderRules | None:
    """What a step encodes, and what is cached: as many tokens as a step may compute, at least a largest image.

    Source: vLLM, v1/core/encoder_cache_manager.py, `compute_mm_encoder_budget`."""
    engine, vision = scenario.engine, scenario.model.vision
    if scenario.traffic.images is None or vision is None:
        return None
    budget = max(engine.max_num_batched_tokens, vision.max_tokens, ImagePlan(scenario).longest)
    is_whole, is_alone = engine.disable_chunked_mm_input, engine.mm_encoder_only
    return EncoderRules(budget, budget, is_whole, engine.plans_ahead, is_alone)


def engine_scheduler_config(engine: EngineSpec, max_model_len: int) -> SchedulerConfig:
    """Scheduler settings that do not depend on the model, for sequences up to `max_model_len` tokens."""
    is_contiguous = engine.kv_cache == "contiguous"
    rules, (max_num_seqs, max_plan_seqs) = engine.rules, engine.sequence_limits
    # Admission by estimates needs plain blocks and a single plan in flight.
    is_plain = engine.kv_cache == "paged" and engine.batching == "continuous" and not rules.reserves_output
    is_plain = is_plain and engine.pipeline_parallel_size == 1 and engine.speculative_config is None
    is_estimated = is_plain and engine.scheduling_policy != "shortest-first"
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=engine.kv_block_tokens,
        enable_chunked_prefill=rules.chunks_prompts,
        prefill_exclusive=rules.prefill_exclusive,
        reserves_output=bool(engine.reserve_output) if is_contiguous else rules.reserves_output,
        stays_of_preempted=rules.stays_of_preempted,
        caps_lone_prompts=rules.caps_lone_prompts,
        pads_lone_tokens=rules.pads_lone_tokens,
        waits_to_be_padded=rules.waits_to_be_padded,
        loads_need_slot=rules.loads_need_slot,
        rounds_output=engine.reserve_output == "pow2",
        keeps_kv=engine.kv_cache != "off",
        is_contiguous=is_contiguous,
        poll_every=engine.poll_every,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        scheduler_reserve_full_isl=engine.scheduler_reserve_full_isl,
        scheduling_policy=engine.scheduling_policy,
        batching=engine.batching,
        batch_timeout=to_ticks(engine.batch_timeout_ms / 1e3),
        pipeline_parallel_size=engine.pipeline_parallel_size,
        max_plan_seqs=max_plan_seqs,
        estimates=Estimates(**rules.estimates.model_dump()) if is_estimated and rules.estimates is not None else None,
        slots=_slots_of(engine),
        adapters=AdapterLimits(engine.max_loras, engine.num_host_adapters) if engine.enable_lora else None,
    )


def _slots_of(engine: EngineSpec) -> Slots | None:
    """Slots of an engine that has them and keeps KV between steps."""
    rules = engine.rules.slots
    can_have = engine.batching == "continuous" and engine.kv_cache == "paged" and engine.speculative_config is None
    if rules is None or not can_have or engine.pipeline_parallel_size > 1:
        return None
    is_unified = rules.is_unified_by_default and "max_num_seqs" not in engine.model_fields_set
    return Slots(rules.least_similarity, engine.enable_prefix_caching, rules.saves_prompts, is_unified)


class CacheLayout(NamedTuple):
    """What the KV blocks of all engines of a scenario are like. span, buffers, groups: see `kv_block_manager`"""

    span: int | None
    buffers: int
    groups: tuple[KVGroup, ...]


def cache_layout(scenario: Scenario) -> CacheLayout:
    """The layout, from the model as served; worked out once for all engines of a pool."""
    engine, model = scenario.engine, served_model(scenario.model, scenario.engine)
    is_off = engine.kv_cache == "off"
    buffers = 0 if is_off else num_buffers(model, scenario.hardware, engine)
    groups = kv_groups(scenario.model, scenario.hardware, engine)
    return CacheLayout(0 if is_off else model.rolling_span, buffers, groups)


def build_serve_loop(
    scenario: Scenario,
    num_blocks: int,
    record_positions: bool = False,
    host: HostBlocks | None = None,
    config: SchedulerConfig | None = None,
    layout: CacheLayout | None = None,
) -> ServeLoop:
    """Serve loop of an empty engine with `num_blocks` KV blocks and the optional second tier `host`.

    record_positions: plans list token positions; config, layout: default: those of the scenario"""
    engine = scenario.engine
    config = config or scheduler_config(scenario, record_positions)
    span, buffers, groups = layout or cache_layout(scenario)
    if span is not None and config.speculation is not None:
        span += config.speculation.nodes[-1]  # a drafted token must not evict one that is still visible
    blocks = kv_block_manager(engine, num_blocks, groups, span, buffers, host, config.estimates is not None)
    return ServeLoop(eng.scheduler_for(config, blocks, token_watch(scenario)), engine.plans_ahead)


def kv_block_manager(
    engine: EngineSpec,
    num_blocks: int,
    groups: tuple[KVGroup, ...] = (),
    span: int | None = None,
    num_buffers: int = 0,
    host: HostBlocks | None = None,
    by_estimates: bool = False,
) -> KVBlockManager:
    """`num_blocks` free KV blocks under the rules of `engine`.

    groups: layer groups that keep different parts of a sequence; span, num_buffers, host: see `KVBlockManager`
    by_estimates: admission by estimates, which needs a radix tree and plain blocks"""
    can_share = engine.enable_prefix_caching and engine.kv_cache == "paged" and _slots_of(engine) is None
    size, partial_first = engine.kv_block_tokens, engine.rules.reuses_partial_first
    if groups:
        most_under_way = 2 if engine.plans_ahead else engine.pipeline_parallel_size
        in_flight = most_under_way * engine.max_num_batched_tokens
        longest = engine.max_model_len
        return eng.GroupedKVBlocks(num_blocks, size, groups, can_share, in_flight, longest, partial_first)
    if by_estimates and span is None and host is None and not num_buffers:
        return eng.RadixKVBlocks(num_blocks, size, can_share)
    return KVBlockManager(num_blocks, size, can_share, span, num_buffers, host, partial_first)


def build_locksteps(
    engine: EngineSpec,
    num_engines: int,
    num_ranks: int,
    env: TickEnvironment,
    backend: SimulatedBackend,
    graph: StepGraph,
    can_leap: bool,
) -> list[Lockstep]:
    """Clocks of `num_engines` engines of `engine` over `backend` in `env`: one per `num_ranks` data-parallel ranks that
    share operators of `graph`, else one each. can_leap: price equal decode steps together.

    `num_ranks` counts the simulated ranks of a replica; experts see the whole group's tokens."""
    together = num_ranks if graph.has_group else 1
    timeout = engine.attention_dp_timeout_iters if together > 1 else 0
    facts = engine.described.facts
    sizes = facts.graphs.sizes_up_to(engine.captured_tokens)
    padding = RankPadding(*engine.padded_rank_tokens, sizes, engine.overlap_from, facts.batching.halves_alike)
    leaper = backend if can_leap and backend.can_leap else None
    locksteps: list[Lockstep] = []
    for _ in range(num_engines // together):
        balance = PromptBalance(timeout) if timeout else None
        if graph.stages:
            clock: Lockstep = Pipeline(env, backend, balance, graph.shard.dp, padding)
        else:
            clock = Lockstep(env, backend, leaper, balance, graph.shard.dp, padding=padding)
        locksteps += [clock] * together
    return locksteps


def token_watch(scenario: Scenario) -> TokenWatch | None:
    """Token watch for reader SLOs of the scenario and its classes; None if no limit needs it."""
    if not scenario.needs_token_times:
        return None
    limits = [kind.slo or scenario.slo for kind in scenario.traffic.classes] or [scenario.slo]
    paces = [None if slo.reading_speed is None else to_ticks(1 / slo.reading_speed) for slo in limits]
    if len(set(paces)) == 1:
        return TokenWatch(lambda _: paces[0])
    shares = class_shares(scenario)
    return TokenWatch(lambda request: paces[shares.of(request.request_id)])
