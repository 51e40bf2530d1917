"""`StepCosts`: a scenario's operators, timer and engine profile, set up once for simulator, `explain` and reports."""

from dataclasses import dataclass

from perfmodel.cost.calibrations.backends import engine_calibration
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.calibrations.draws import Draw
from perfmodel.cost.calibrations.engine_profile import EngineProfile, profile_of
from perfmodel.cost.calibrations.for_all import routing_of
from perfmodel.cost.calibrations.host_work import grammar_fit
from perfmodel.cost.memory.adapters import load_adapter_fits
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.cost.steps.cost_model import StepCostModel
from perfmodel.cost.steps.explain import StepEstimate
from perfmodel.cost.steps.speculation import DraftTables, SpeculativeCostModel, draft_tables
from perfmodel.cost.steps.stages import LayerSplit, SplitCostModel, estimate_step, layer_split_of, step_cost_model
from perfmodel.cost.steps.tables import StepTables
from perfmodel.models.architecture import LatentAttention
from perfmodel.ops.attention.decode import ContextSpread
from perfmodel.ops.formats import on_device
from perfmodel.ops.graphs.step import StepGraph, build_graph
from perfmodel.ops.work import BatchShape
from perfmodel.specs.engine.description import GraphObstacle
from perfmodel.specs.scenario import Overheads, Scenario

_SPREAD_OTHER_VERSION = 1.3  # as of kernels measured under another engine [assumed]


@dataclass(frozen=True)
class StepCosts:
    """A scenario's step costs, and what the engine adds.

    tables: costs of the model's own steps, shared by all cost models
    drafts: costs of drafting and verifying, with speculation
    split:  of layers over several devices"""

    tables: StepTables
    profile: EngineProfile
    drafts: DraftTables | None = None
    split: LayerSplit | None = None

    @property
    def graph(self) -> StepGraph:
        return self.tables.graph

    @property
    def timer(self) -> OperatorTimer:
        return self.tables.timer

    @property
    def calibration(self) -> Calibration:
        """The calibration in use, with the profile's host time and launches."""
        return self.tables.timer.calibration

    def cost_model(self, draw: Draw | None = None) -> StepCostModel:
        """Cost model of the steps, staged and speculative as needed. draw: error factors, for ensembles"""
        cost_model = step_cost_model(self.tables, draw) if self.drafts is None else self.speculative_cost_model(draw)
        return cost_model if self.split is None else SplitCostModel(cost_model, self.split)

    def speculative_cost_model(self, draw: Draw | None = None) -> SpeculativeCostModel:
        """Cost model of drafting and verifying rounds; needs `drafts`. draw: as of `cost_model`"""
        assert self.drafts is not None
        return SpeculativeCostModel(self.tables, self.drafts, draw)

    def draft_depth(self, shape: BatchShape) -> int:
        """Draft depth of the decodes of `shape`: full, none in large batches, or, adaptively, that of most tokens/s."""
        config = self.drafts.config if self.drafts is not None else None
        batch = shape.num_decodes
        if config is None or not batch or shape.decode_tokens:
            return 0
        if config.disable_by_batch_size is not None and batch > config.disable_by_batch_size:
            return 0
        if not config.adaptive or config.acceptance is None:
            return config.typical_depth
        cost_model, context = self.speculative_cost_model(), shape.decode_context // batch
        return max(
            range(config.depth + 1),
            key=lambda k: config.expected_tokens(k) / cost_model.expected_time(batch, k, context),
        )

    def tokens_per_decode(self, shape: BatchShape) -> float:
        """Mean tokens per decoding sequence of a step; 1 if acceptance is unknown."""
        config = self.drafts.config if self.drafts is not None else None
        return 1.0 if config is None or config.acceptance is None else config.expected_tokens(self.draft_depth(shape))

    def estimate(self, shape: BatchShape) -> StepEstimate:
        """A step of `shape` by operator; with drafting, verification and the drafter's prompts where it speculates."""
        if self.drafts is None:
            return estimate_step(self.graph, self.timer, shape)
        return self.speculative_cost_model().explain(self.drafts.with_drafts(shape, self.draft_depth(shape)))


def scenario_fits(
    scenario: Scenario, calibration: Calibration | None = None, profile: EngineProfile | None = None
) -> tuple[Calibration, EngineProfile]:
    """The calibration as the engine runs its kernels, and the profile; default: those of `engine.profile`.

    Intervals widen for engine versions older or newer than any described."""
    profile = profile or profile_of(scenario.engine)
    engine = scenario.engine
    calibration = calibration or engine_calibration(scenario.hardware, engine)
    if engine.described.version.age != "described":
        calibration = calibration.model_copy(update={"spread": calibration.spread * _SPREAD_OTHER_VERSION})
    if engine.rules.serves_adapters == "grouped" and engine.enable_lora and calibration.origin == "calibrated":
        families = {"lora": load_adapter_fits().kernels, **calibration.families}
        calibration = calibration.model_copy(update={"families": families})
    applied = profile.applied_to(calibration, is_eager=engine.enforce_eager)
    shapes, named = grammar_fit(scenario), scenario.traffic.structured_outputs
    if shapes is not None and named is not None:
        masks = {"mask_s": shapes.mask_s, "mask_share": named.share}
        applied = applied.model_copy(update={"host": applied.host.model_copy(update=masks)})
    captured = _captured_with_prompts(scenario)
    if applied.host.replays_graphs and captured != applied.host.captured_tokens:
        host = applied.host.model_copy(update={"captured_tokens": captured})
        applied = applied.model_copy(update={"host": host})
    if scenario.model.pooling is not None:
        server = profile.server.answering_whole(engine.described.facts.api_server_request_s)
        profile = profile.model_copy(update={"server": server})
    if scenario.traffic.beam_width > 1:
        beam_s = engine.described.facts.api_server_beam_s
        profile = profile.model_copy(update={"server": profile.server.model_copy(update={"beam_s": beam_s})})
    overheads = scenario.overheads
    if overheads == Overheads():
        return applied, profile
    update = {"kernel_overheads": overheads.kernels, "host_overheads": overheads.host}
    server = profile.server.times(overheads.host)
    return applied.model_copy(update=update), profile.model_copy(update={"server": server})


def _captured_with_prompts(scenario: Scenario) -> int:
    """Tokens of the largest captured step with prompts; 0 if none is."""
    model, engine = scenario.model, scenario.engine
    mixers = [layer.mixer for layer, _ in model.layers]
    has: dict[GraphObstacle, bool] = {
        "encoder": model.extra_params > 0,
        "indexer": any(getattr(mixer, "indexer", None) is not None for mixer in mixers),
        "data_parallel": engine.data_parallel_size > 1,
        "pipeline_parallel": engine.pipeline_parallel_size > 1,
        "all2all": engine.data_parallel_size > 1 and engine.enable_expert_parallel and not engine.gathers_tokens,
        "speculation": engine.speculative_config is not None,
    }
    has_latents = any(isinstance(mixer, LatentAttention) for mixer in mixers)
    names, limits = [name for name, is_there in has.items() if is_there], engine.described.facts.graphs
    return limits.most_with_prompts(engine.captured_tokens, engine.max_num_batched_tokens, has_latents, names)


def scenario_graph(scenario: Scenario, profile: EngineProfile, spread: ContextSpread | None = None) -> StepGraph:
    """The scenario's step graph, with the engine's sampling and the scenario's expert routing."""
    method = scenario.sampling.method
    return build_graph(
        on_device(scenario.model, scenario.hardware),
        scenario.engine,
        sampling=method,
        bytes_per_logit=profile.bytes_per_logit(method, scenario.model),
        routing=routing_of(scenario),
        spread=spread,
        hardware=scenario.hardware,
        adapters=scenario.traffic.adapters,
    )


def scenario_drafts(
    scenario: Scenario, calibration: Calibration, profile: EngineProfile, graph: StepGraph
) -> DraftTables | None:
    """Costs of drafting and verifying beside the steps of `graph`; None without speculation.

    calibration, profile: from `scenario_fits`. Raises SpecError for a model that the scenario's method cannot draft
    for."""
    method = scenario.sampling.method
    return draft_tables(
        scenario.model,
        scenario.engine,
        scenario.hardware,
        calibration,
        graph,
        sampling=method,
        bytes_per_logit=profile.bytes_per_logit(method, scenario.model),
        routing=routing_of(scenario),
    )


def step_costs(
    scenario: Scenario, calibration: Calibration | None = None, profile: EngineProfile | None = None
) -> StepCosts:
    """The costs of `scenario`; see `scenario_fits` for the defaults."""
    calibration, profile = scenario_fits(scenario, calibration, profile)
    graph = scenario_graph(scenario, profile)
    drafts = scenario_drafts(scenario, calibration, profile, graph)
    tables = StepTables(graph, OperatorTimer(scenario.hardware, calibration))
    return StepCosts(tables, profile, drafts, layer_split_of(scenario.engine))
