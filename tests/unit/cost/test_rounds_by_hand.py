"""Rounds of drafting and verification by hand: draft passes, what they read, and the cost of rejection sampling."""

import pytest

from perfmodel.cost import OperatorTimer, SpeculativeCostModel, StepTables, datasheet, step_costs
from perfmodel.cost.steps.speculation import Pass, draft_tables, passes_of
from perfmodel.ops import BatchShape, build_graph, decode_shape
from perfmodel.ops.graphs.drafting import Drafter, drafter_of, medusa_weights, rejection
from perfmodel.ops.sharding import Sharding
from perfmodel.specs import load_hardware, load_model, load_scenario
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import SpeculativeConfig

LLAMA, SMALL = load_model("llama-3.1-8b"), load_model("qwen3-0.6b")
CHAIN = SpeculativeConfig(method="draft_model", model=SMALL, num_speculative_tokens=3)
PIPELINED = SpeculativeConfig(method="draft_model", model=SMALL, num_speculative_tokens=3, pipelined=True)
TREE = SpeculativeConfig(method="self_quantized", quantization="w4a16", tree=(4, 2))
EAGLE = SpeculativeConfig(method="eagle", num_speculative_tokens=3)
MEDUSA = SpeculativeConfig(method="medusa", tree=(4, 2))


def served(config: SpeculativeConfig, **engine: object) -> EngineSpec:
    return EngineSpec(speculative_config=config, **engine)  # type: ignore[arg-type]


def drafter(config: SpeculativeConfig) -> Drafter:
    built = drafter_of(LLAMA, served(config), "greedy")
    assert built is not None
    return built


@pytest.mark.parametrize(
    ("config", "drafting", "passes"),
    [
        # The first pass reads the model's own token and the drafter's last one; later passes read one token.
        (CHAIN, (5, 5, 5), [(5, 2, 5, 500), (5, 1, 5, 505), (5, 1, 5, 510)]),
        # Two of the five sequences draft a third token.
        (CHAIN, (5, 5, 2), [(5, 2, 5, 500), (5, 1, 5, 505), (2, 1, 2, 204)]),
        # A pipelined drafter has already read its last token.
        (PIPELINED, (5, 5, 5), [(5, 1, 5, 500), (5, 1, 5, 505), (5, 1, 5, 510)]),
        # A tree of four children with two children each: the second pass reads four tokens.
        (TREE, (5, 5), [(5, 1, 5, 500), (5, 4, 20, 520)]),
        # A round accepts up to three drafts and one token of the model's own; all are read.
        (EAGLE, (5, 5, 5), [(5, 4, 5, 500), (5, 1, 5, 505), (5, 1, 5, 510)]),
        # All Medusa heads run in one pass.
        (MEDUSA, (5, 5), [(5, 1, 5, 500)]),
    ],
)
def test_a_pass_reads_what_the_one_before_it_drafted(config, drafting, passes):
    """(sequences, tokens per sequence, rows of logits, total context), five sequences of 100 tokens."""
    shape = BatchShape(5, 5, (), 5, 500, drafting=drafting)
    assert passes_of(config, drafter(config), shape) == [Pass(*row) for row in passes]


def tables(config: SpeculativeConfig, **engine: object):
    hardware, spec = load_hardware("h100-sxm-80gb"), served(config, **engine)
    graph = build_graph(LLAMA, spec)
    drafts = draft_tables(LLAMA, spec, hardware, datasheet(hardware), graph, sampling="random")
    assert drafts is not None
    return StepTables(graph, OperatorTimer(hardware, datasheet(hardware))), drafts


def test_a_pipelined_drafter_also_drafts_the_models_own_token():
    for config, deep in ((CHAIN, 3), (PIPELINED, 4)):
        _, drafts = tables(config)
        shape = drafts.with_drafts(decode_shape(5, 100), 3)
        assert (shape.drafting, shape.num_draft_tokens) == ((5,) * deep, 5 * 3)
        assert drafts.with_drafts(decode_shape(5, 100), 0) == decode_shape(5, 100)


def test_verification_covers_the_newest_token_and_its_drafts():
    """All of them need logits and add to the context and to the tokens of all ranks."""
    _, drafts = tables(CHAIN)
    group = drafts.with_drafts(decode_shape(5, 100)._replace(group_tokens=20), 3)
    verified = group.verified(())
    assert (verified.num_tokens, verified.num_samples, verified.num_queries) == (20, 20, 20)
    assert (verified.decode_context, verified.group_tokens) == (515, 35)


@pytest.mark.parametrize(
    ("method", "has_distribution", "read"), [("greedy", True, 0), ("random", True, 8), ("random", False, 4)]
)
def test_rejection_sampling_reads_the_probabilities_of_model_and_drafter(method, has_distribution, read):
    """fp32 probabilities over 1,000 words; two token ids in any case."""
    assert rejection(6, 1000, method, has_distribution).hbm_bytes == 6 * (read * 1000 + 8)


def test_usage_includes_rejection_sampling():
    """Two rounds of equal size: twice as many FLOPs and bytes as one."""
    cost_models = [SpeculativeCostModel(*tables(CHAIN)) for _ in range(2)]
    shape = cost_models[0].drafting_step(4, 3, 500)
    for cost_model, rounds in zip(cost_models, (1, 2), strict=True):
        for _ in range(rounds):
            cost_model.duration_ps(shape)
    one, two = (cost_model.usage() for cost_model in cost_models)
    for count in ("flops", "hbm_bytes", "peak_compute_s", "busy_s"):
        assert getattr(two, count) == pytest.approx(2 * getattr(one, count))
    judging = cost_models[0].explain(shape)
    assert one.flops == pytest.approx(judging.flops, rel=1e-6)
    assert any(row.name == "rejection_sampling" and row.flops for row in judging.rows)


def test_equal_draft_passes_share_a_row_with_a_count():
    """A chain of k tokens has k - 1 passes after the first; the round includes their time."""
    for depth in (3, 5):
        config = SpeculativeConfig(method="draft_model", model=SMALL, num_speculative_tokens=depth)
        cost_model = SpeculativeCostModel(*tables(config))
        shape = cost_model.drafting_step(4, depth, 500)
        estimate = cost_model.explain(shape)
        assert sum(row.count for row in estimate.rows if row.name == "draft: lm_head") == depth - 1
        assert cost_model.duration_ps(shape) / 1e12 == pytest.approx(estimate.duration_s, rel=3e-3)


def test_eagle_projects_a_feature_and_an_embedding():
    """2 d inputs and d outputs at 2 FLOPs; also for DeepSeek with its latent attention."""
    for name in ("llama-3.1-8b", "deepseek-v2-lite"):
        model = load_model(name)
        eagle = drafter_of(model, served(EAGLE), "greedy")
        assert eagle is not None
        projection = next(node for node in eagle.graph.nodes if node.name == "eagle_fc")
        assert projection.work(BatchShape(7, 7)).flops == 2 * 7 * 2 * model.hidden_size**2


def test_medusa_has_a_block_and_a_head_for_each_depth():
    """4 heads of d x d weights each, and vocabulary projections split over the ranks."""
    d, vocabulary = LLAMA.hidden_size, LLAMA.vocab_size
    assert medusa_weights(LLAMA, Sharding(), 4) == 4 * (d * d + d * vocabulary)
    assert medusa_weights(LLAMA, Sharding(tp=2), 4) == 4 * (d * d + d * vocabulary / 2)


def test_layers_that_drafted_verify_the_newest_token_only():
    """LayerSkip on two ranks: draft tokens skip the first layers, also in the tokens of all ranks."""
    config = SpeculativeConfig(method="self_skip", num_speculative_tokens=4, draft_layers=8)
    cost_model = SpeculativeCostModel(*tables(config))
    shape = cost_model.drafts.with_drafts(decode_shape(6, 100)._replace(group_tokens=12), 4)
    first, rest = (part.shape for part in cost_model._verification(shape))
    assert (first.num_tokens, first.num_samples, first.decode_tokens) == (6, 0, 0)
    assert first.group_tokens == 6 * shape.group_tokens // 30
    assert (rest.num_tokens, rest.num_samples) == (30, 30)


@pytest.mark.parametrize(("batch", "depth"), [(1, 3), (8, 3), (9, 0)])
def test_drafting_stops_above_disable_by_batch_size(batch, depth):
    drafts = "{method: ngram, num_speculative_tokens: 3, disable_by_batch_size: 8, acceptance: {rate: 0.7}}"
    costs = step_costs(load_scenario("llama-3.1-8b-a100", [f"engine.speculative_config={drafts}"]))
    assert costs.draft_depth(decode_shape(batch, 500)) == depth


@pytest.mark.parametrize("batch", [1, 32, 256])
def test_an_adaptive_depth_maximizes_tokens_per_second(batch):
    """Against all depths, one by one."""
    drafts = "{method: ngram, num_speculative_tokens: 5, adaptive: true, acceptance: {rate: 0.6}}"
    costs = step_costs(load_scenario("llama-3.1-8b-a100", [f"engine.speculative_config={drafts}"]))
    config, cost_model = costs.drafts.config, costs.speculative_cost_model()
    rates = [config.expected_tokens(depth) / cost_model.expected_time(batch, depth, 500) for depth in range(6)]
    assert rates[costs.draft_depth(decode_shape(batch, 500))] == max(rates)
