"""What speculation costs: laws of drafting and verifying, whatever the hardware."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from perfmodel.cost import (
    Calibration,
    FamilyFit,
    GraphCostModel,
    OperatorTimer,
    SpeculativeCostModel,
    StepTables,
    load_calibration,
    step_costs,
)
from perfmodel.cost.steps.speculation import draft_tables
from perfmodel.errors import SpecError
from perfmodel.ops import BatchShape, build_graph, decode_shape
from perfmodel.ops.graphs.drafting import drafter_of
from perfmodel.specs import load_hardware, load_model, load_scenario
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import Acceptance, Lookahead, SpeculativeConfig

H100 = load_hardware("h100-sxm-80gb")
LLAMA, SMALL, MIXTRAL = load_model("llama-3.1-8b"), load_model("qwen3-0.6b"), load_model("mixtral-8x7b")
ROOFLINE = Calibration(device="any", engine="any", default=FamilyFit(overhead_s=0.0))  # bytes and FLOPs alone
SERVED = load_calibration(H100, "vllm")
DRAFT = {"method": "draft_model", "model": SMALL, "num_speculative_tokens": 4}
METHODS: list[dict[str, Any]] = [
    DRAFT,
    DRAFT | {"pipelined": True},
    DRAFT | {"num_speculative_tokens": None, "tree": (4, 2, 1)},
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "self_skip", "num_speculative_tokens": 4, "draft_layers": 8},
    {"method": "self_quantized", "num_speculative_tokens": 4, "quantization": "w4a16"},
    {"method": "medusa", "tree": (4, 2, 2)},
    {"method": "eagle", "tree": (3, 2, 1)},
    {"method": "lookahead", "lookahead": Lookahead(window=5, ngram=4, guesses=5)},
]
IDS = [f"{each['method']}{'-tree' * ('tree' in each)}{'-pipelined' * ('pipelined' in each)}" for each in METHODS]


def cost_models(config: dict[str, Any] | None, model=LLAMA, engine=None, calibration=ROOFLINE) -> Any:
    """A cost_model with speculation, or a plain one."""
    engine = engine or EngineSpec()
    if config is not None:
        engine = engine.model_copy(update={"speculative_config": SpeculativeConfig(**config)})
    graph, timer = build_graph(model, engine), OperatorTimer(H100, calibration)
    tables = StepTables(graph, timer)
    if config is None:
        return GraphCostModel(tables)
    drafts = draft_tables(model, engine, H100, calibration, graph)
    assert drafts is not None
    return SpeculativeCostModel(tables, drafts)


def decodes(batch: int, context: int, **more: Any) -> BatchShape:
    """A step of `batch` decodes with `context` tokens in all."""
    return BatchShape(batch, batch, (), batch, context)._replace(**more)


def prompt(tokens: int, cached: int = 0) -> BatchShape:
    return BatchShape(tokens, 1, ((tokens, cached),))


def plain_step(batch: int, context: int, **arguments: Any) -> int:
    return cost_models(None, **arguments).duration_ps(decodes(batch, batch * context))


@pytest.mark.parametrize("config", METHODS, ids=IDS)
def test_without_drafts_a_step_is_a_plain_one_to_the_picosecond(config: dict[str, Any]) -> None:
    cost_model, plain = cost_models(config, calibration=SERVED), plain_step(7, 1000, calibration=SERVED)
    assert cost_model.duration_ps(decodes(7, 7000)) == plain
    assert cost_model.expected_time(7, 0, 1000) == plain


@pytest.mark.parametrize("config", METHODS, ids=IDS)
@pytest.mark.parametrize("chunk", [0, 700])
def test_a_round_is_its_operators(config: dict[str, Any], chunk: int) -> None:
    """Decodes alone, and with a prompt beside them, which may pass through the drafter."""
    cost_model = cost_models(config, calibration=SERVED)
    shape = cost_model.drafting_step(6, cost_model.drafts.config.depth, 1500)
    if chunk:
        shape = shape._replace(
            num_tokens=shape.num_tokens + chunk, num_samples=shape.num_samples + 1, prefills=((chunk, 300),)
        )
    assert cost_model.duration_ps(shape) / 1e12 == pytest.approx(cost_model.explain(shape).duration_s, rel=3e-3)


@pytest.mark.parametrize("config", METHODS, ids=IDS)
def test_usage_counts_what_a_round_did(config: dict[str, Any]) -> None:
    cost_model = cost_models(config)
    shape = cost_model.drafting_step(6, cost_model.drafts.config.depth, 1500)
    duration, usage, estimate = cost_model.duration_ps(shape), cost_model.usage(), cost_model.explain(shape)
    assert usage.flops == pytest.approx(estimate.flops, rel=1e-2)
    assert usage.hbm_bytes == pytest.approx(estimate.hbm_bytes, rel=1e-2)
    assert usage.busy_s == pytest.approx(duration / 1e12, rel=1e-2)


def test_one_sequence_takes_k_drafts_and_one_step_of_the_model() -> None:
    """Leviathan et al. 2023, theorem 3.8: where memory bounds, a round takes k c + 1 steps, c = draft / target."""
    target = plain_step(1, 200)
    draft = plain_step(1, 200, model=SMALL)
    for k in (1, 3, 6):
        chain = cost_models(DRAFT | {"num_speculative_tokens": k}).expected_time(1, k, 200)
        assert chain / target == pytest.approx(k * draft / target + 1, rel=0.02)
        expected = SpeculativeConfig(**DRAFT | {"acceptance": Acceptance(rate=0.8)}).expected_tokens(3)
        assert expected == pytest.approx((1 - 0.8**4) / (1 - 0.8))


def test_speculation_stops_paying_where_compute_bounds() -> None:
    config = SpeculativeConfig(**DRAFT | {"acceptance": Acceptance(rate=0.8)})
    cost_model = cost_models(DRAFT)
    speedups = [
        config.expected_tokens() * plain_step(batch, 200) / cost_model.expected_time(batch, 4, 200)
        for batch in (1, 64, 256, 1024)
    ]
    assert speedups[0] > 1.5
    assert all(later <= earlier for earlier, later in pairwise(speedups))
    assert speedups[-1] < 1


def test_n_grams_that_are_never_right_cost_the_tokens_that_are_verified() -> None:
    cost_model = cost_models({"method": "ngram", "num_speculative_tokens": 4})
    with_drafts = cost_model.expected_time(8, 4, 1000)
    verified = cost_models(None).duration_ps(decode_shape(8, 1004, queries=5))
    lookups = cost_model._scratch.host_wait
    assert 0 < lookups < 0.01 * with_drafts
    assert with_drafts - lookups == pytest.approx(verified, rel=1e-3)  # judging takes the rest
    assert cost_model.drafts.drafter is None


def test_better_drafts_never_hurt() -> None:
    for config in METHODS:
        spec = SpeculativeConfig(**config | {"acceptance": Acceptance(rate=0.5)})
        better = spec.model_copy(update={"acceptance": Acceptance(rate=0.6)})
        for depth in range(spec.depth + 1):  # what a round takes does not depend on what is right
            assert better.expected_tokens(depth) >= spec.expected_tokens(depth)


def test_pipelined_rounds_are_shorter_but_not_than_their_longest_part() -> None:
    apart = cost_models(DRAFT, calibration=SERVED)
    together = cost_models(DRAFT | {"pipelined": True}, calibration=SERVED)
    verification = cost_models(None, calibration=SERVED).duration_ps(decode_shape(4, 1004, queries=5))
    round_s, pipelined_s = (cost_model.expected_time(4, 4, 1000) for cost_model in (apart, together))
    assert max(verification, round_s - verification) * 0.999 <= pipelined_s < round_s


def test_a_drafter_on_its_own_device_takes_nothing_from_the_models() -> None:
    apart = cost_models(DRAFT, calibration=SERVED)
    own = cost_models(DRAFT | {"pipelined": True, "has_own_device": True}, calibration=SERVED)
    shape = own.drafting_step(4, 4, 1000)
    verification = apart._verify(apart.drafting_step(4, 4, 1000))
    assert own.duration_ps(shape) == max(verification, own.fresh()._draft(shape))
    assert own.explain(shape).duration_s == pytest.approx(own.duration_ps(shape) / 1e12)


def test_skipped_layers_are_not_verified_again() -> None:
    """LayerSkip: k passes of E layers, and one of all layers in which drafted tokens pass L - E of them."""
    config = {"method": "self_skip", "num_speculative_tokens": 4, "draft_layers": 8}
    cost_model = cost_models(config)
    cost_model.duration_ps(cost_model.drafting_step(1, 4, 200))
    layers = LLAMA.layers
    per_layer = build_graph(replace(LLAMA, layers=((layers[0][0], 1),)))
    head = 2 * LLAMA.hidden_size * LLAMA.vocab_size
    gemms = sum(
        n.work(decode_shape(1, 1)).flops for n in per_layer.nodes if n.work(decode_shape(1, 1)).family == "gemm"
    )
    layer = gemms - head
    assert cost_model.usage().flops == pytest.approx(layer * (4 * 8 + 8 + 5 * 24) + head * (4 + 5), rel=0.02)


def test_prompts_pass_through_drafters_that_have_a_cache_of_their_own() -> None:
    for config in METHODS:
        plain, drafted = cost_models(None).duration_ps(prompt(500)), cost_models(config).duration_ps(prompt(500))
        assert (drafted > plain) == (config["method"] in ("draft_model", "eagle")), config


def test_verifying_touches_more_experts() -> None:
    graph = build_graph(MIXTRAL)
    experts = next(node for node in graph.nodes if node.name == "experts")
    one, five = (experts.work(decode_shape(1, 100, (), queries)).weight_bytes for queries in (1, 5))
    assert five / one == pytest.approx(8 * (1 - 0.75**5) / 2)  # 2 of 8 experts each, drawn anew for each token


@pytest.mark.parametrize(
    "engine",
    [
        EngineSpec(tensor_parallel_size=2),
        EngineSpec(kv_cache_dtype="fp8"),
        EngineSpec(quantization="fp8"),
        EngineSpec(data_parallel_size=2, enable_expert_parallel=True),
        EngineSpec(enforce_eager=True),
    ],
)
@pytest.mark.parametrize("config", METHODS, ids=IDS)
def test_it_composes(config: dict[str, Any], engine: EngineSpec) -> None:
    """With other switches a round still takes longer than a step, and less than its tokens one after another."""
    cost_model = cost_models(config, MIXTRAL if engine.enable_expert_parallel else LLAMA, engine, SERVED)
    depth = len(cost_model.drafts.config.nodes_by_depth) - 1
    step, round_s = cost_model.expected_time(4, 0, 1000), cost_model.expected_time(4, depth, 1000)
    assert step < round_s
    if config["method"] in ("ngram", "medusa"):
        assert round_s < (depth + 1) * step


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v2-lite", "nemotron-3-nano-30b-a3b", "qwen3.5-27b"])
@pytest.mark.parametrize("method", ["ngram", "medusa", "eagle"])
def test_windows_latents_and_states_are_drafted_for(name: str, method: str) -> None:
    """Each token deeper takes longer, and less than a step of its own."""
    cost_model = cost_models({"method": method, "num_speculative_tokens": 4}, load_model(name), None, SERVED)
    times = [cost_model.expected_time(2, depth, 3000) for depth in range(5)]
    assert all(later > earlier for earlier, later in pairwise(times))
    assert times[4] - times[1] < 3 * times[0]


def test_prompts_and_drafts_share_a_step() -> None:
    """Chunked prefill: the chunk rides in the verification, and in the first pass of the drafter."""
    for config in METHODS:
        drafting = cost_models(config).drafting_step(6, SpeculativeConfig(**config).depth, 1500)
        beside = {"num_tokens": 506, "num_samples": 7, "prefills": ((500, 1000),)}
        apart = cost_models(config).duration_ps(prompt(500, 1000)) + cost_models(config).duration_ps(drafting)
        together = cost_models(config).duration_ps(drafting._replace(**beside))
        assert together < apart
        assert cost_models(config).duration_ps(decodes(6, 9000, **beside)) < together


def test_explained_prompts_pass_through_the_drafter_too() -> None:
    scenario = load_scenario(
        "llama-3.1-8b-a100", ["engine.speculative_config={method: eagle, num_speculative_tokens: 2}"]
    )
    estimate = step_costs(scenario).estimate(prompt(300))
    assert sum(row.flops for row in estimate.rows if row.name.startswith("draft")) > 0
    plain = step_costs(load_scenario("llama-3.1-8b-a100")).estimate(prompt(300))
    assert estimate.flops > plain.flops


@pytest.mark.parametrize("pipelined", [False, True])
def test_prompts_alone_are_explained_as_they_are_priced(pipelined: bool) -> None:
    """Nobody drafts; the drafter reads the prompt, launched kernel by kernel."""
    drafter = (
        f"{{method: draft_model, model: llama-3.2-1b, num_speculative_tokens: 4, pipelined: {str(pipelined).lower()}}}"
    )
    costs = step_costs(
        load_scenario("llama-3.1-8b-a100", [f"engine.speculative_config={drafter}", "engine.profile=sglang"])
    )
    explained = costs.estimate(prompt(200)).duration_s
    assert costs.cost_model().duration_ps(prompt(200)) / 1e12 == pytest.approx(explained, rel=1e-6)


def test_without_graphs_a_small_drafter_waits_for_its_launches() -> None:
    eager, graphs = (
        cost_models(DRAFT, engine=EngineSpec(enforce_eager=each), calibration=SERVED) for each in (True, False)
    )
    draft = {each: each.duration_ps(each.drafting_step(1, 4, 200)) for each in (eager, graphs)}
    kernels = sum(node.count for node in graphs.drafts.drafter.graph.nodes)
    assert draft[eager] - draft[graphs] > 4 * kernels * 2e6  # more than 2 us a kernel and pass


def test_what_cannot_be_drafted_for_is_refused() -> None:
    skipping = SpeculativeConfig(method="self_skip", num_speculative_tokens=4, draft_layers=32)
    with pytest.raises(SpecError, match="32 layers; draft with fewer"):
        drafter_of(LLAMA, EngineSpec(speculative_config=skipping), "greedy")
    hybrid, tree = load_model("nemotron-3-nano-30b-a3b"), SpeculativeConfig(method="medusa", tree=(3, 2))
    with pytest.raises(SpecError, match="recurrent state"):
        drafter_of(hybrid, EngineSpec(speculative_config=tree), "greedy")
    chain = SpeculativeConfig(method="medusa", num_speculative_tokens=2)
    assert drafter_of(hybrid, EngineSpec(speculative_config=chain), "greedy") is not None
    leaving = load_scenario("llama-3.1-8b-a100", ["model_changes.early_exit={expected_share: 0.6}"])
    with pytest.raises(SpecError, match="leave one of the two out"):
        drafter_of(leaving.model, EngineSpec(speculative_config=chain), "greedy")
