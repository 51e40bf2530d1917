"""What speculation costs: laws of drafting and verifying, whatever the hardware."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from perfmodel.cost import (
    Calibration,
    FamilyFit,
    OperatorTimer,
    SpeculationTimer,
    StepTables,
    StepTimer,
    load_calibration,
    step_costs,
)
from perfmodel.cost.drafts import draft_tables
from perfmodel.cost.speculation_estimate import estimate_speculation
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


def timers(config: dict[str, Any] | None, model=LLAMA, engine=None, calibration=ROOFLINE) -> Any:
    """A timer with speculation, or a plain one."""
    engine = engine or EngineSpec()
    if config is not None:
        engine = engine.model_copy(update={"speculative_config": SpeculativeConfig(**config)})
    graph, timer = build_graph(model, engine), OperatorTimer(H100, calibration)
    tables = StepTables(graph, timer)
    if config is None:
        return StepTimer(tables)
    drafts = draft_tables(model, engine, H100, calibration, graph)
    assert drafts is not None
    return SpeculationTimer(tables, drafts)


def plain_step(batch: int, context: int, **arguments: Any) -> int:
    return timers(None, **arguments).step(batch, batch, (), batch, batch * context)


@pytest.mark.parametrize("config", METHODS, ids=IDS)
def test_without_drafts_a_step_is_a_plain_one_to_the_picosecond(config: dict[str, Any]) -> None:
    timer, plain = timers(config, calibration=SERVED), plain_step(7, 1000, calibration=SERVED)
    assert timer.step(0, 0, (), 7, 7000) == plain
    assert timer.expected_time(7, 0, 1000) == plain


@pytest.mark.parametrize("config", METHODS, ids=IDS)
def test_a_round_is_its_operators(config: dict[str, Any]) -> None:
    engine = EngineSpec(speculative_config=SpeculativeConfig(**config))
    timer = timers(config)
    shape = decode_shape(6, 1500)
    estimate = estimate_speculation(
        timer.tables.graph, timer.tables.timer, timer.drafts, shape, engine.speculative_config.depth
    )
    assert timer.expected_time(6, engine.speculative_config.depth, 1500) / 1e12 == pytest.approx(
        estimate.duration_s, rel=3e-3
    )


@pytest.mark.parametrize("config", METHODS, ids=IDS)
def test_usage_counts_what_a_round_did(config: dict[str, Any]) -> None:
    spec = SpeculativeConfig(**config)
    timer, nodes = timers(config), spec.nodes_by_depth[-1]
    duration = timer.step(0, 0, (), 6, 9000, drafting=(6,) * (spec.depth + spec.pipelined), num_draft_tokens=6 * nodes)
    usage = timer.usage()
    estimate = estimate_speculation(
        timer.tables.graph, timer.tables.timer, timer.drafts, decode_shape(6, 1500), spec.depth
    )
    assert usage.flops == pytest.approx(estimate.flops, rel=1e-2)
    assert usage.hbm_bytes == pytest.approx(estimate.hbm_bytes, rel=1e-2)
    assert usage.busy_s == pytest.approx(duration / 1e12, rel=1e-2)


def test_one_sequence_takes_k_drafts_and_one_step_of_the_model() -> None:
    """Leviathan et al. 2023, theorem 3.8: where memory bounds, a round takes k c + 1 steps, c = draft / target."""
    target = plain_step(1, 200)
    draft = plain_step(1, 200, model=SMALL)
    for k in (1, 3, 6):
        chain = timers(DRAFT | {"num_speculative_tokens": k}).expected_time(1, k, 200)
        assert chain / target == pytest.approx(k * draft / target + 1, rel=0.02)
        expected = SpeculativeConfig(**DRAFT | {"acceptance": Acceptance(rate=0.8)}).expected_tokens(3)
        assert expected == pytest.approx((1 - 0.8**4) / (1 - 0.8))


def test_speculation_stops_paying_where_compute_bounds() -> None:
    config = SpeculativeConfig(**DRAFT | {"acceptance": Acceptance(rate=0.8)})
    timer = timers(DRAFT)
    speedups = [
        config.expected_tokens() * plain_step(batch, 200) / timer.expected_time(batch, 4, 200)
        for batch in (1, 64, 256, 1024)
    ]
    assert speedups[0] > 1.5
    assert all(later <= earlier for earlier, later in pairwise(speedups))
    assert speedups[-1] < 1


def test_n_grams_that_are_never_right_cost_the_tokens_that_are_verified() -> None:
    timer = timers({"method": "ngram", "num_speculative_tokens": 4})
    with_drafts = timer.expected_time(8, 4, 1000)
    verified = timers(None).step(40, 40, (), 8, 8 * 1004, decode_tokens=40)
    lookups = timer._scratch.host_wait
    assert 0 < lookups < 0.01 * with_drafts
    assert with_drafts - lookups == pytest.approx(verified, rel=1e-3)  # judging takes the rest
    assert timer.drafts.drafter is None


def test_better_drafts_never_hurt() -> None:
    for config in METHODS:
        spec = SpeculativeConfig(**config | {"acceptance": Acceptance(rate=0.5)})
        better = spec.model_copy(update={"acceptance": Acceptance(rate=0.6)})
        for depth in range(spec.depth + 1):  # what a round takes does not depend on what is right
            assert better.expected_tokens(depth) >= spec.expected_tokens(depth)


def test_pipelined_rounds_are_shorter_but_not_than_their_longest_part() -> None:
    apart = timers(DRAFT, calibration=SERVED)
    together = timers(DRAFT | {"pipelined": True}, calibration=SERVED)
    verification = timers(None, calibration=SERVED).step(20, 20, (), 4, 4 * 1004, decode_tokens=20)
    round_s, pipelined_s = (timer.expected_time(4, 4, 1000) for timer in (apart, together))
    assert max(verification, round_s - verification) * 0.999 <= pipelined_s < round_s


def test_skipped_layers_are_not_verified_again() -> None:
    """LayerSkip: k passes of E layers, and one of all layers in which drafted tokens pass L - E of them."""
    config = {"method": "self_skip", "num_speculative_tokens": 4, "draft_layers": 8}
    timer = timers(config)
    timer.step(0, 0, (), 1, 200, drafting=(1,) * 4, num_draft_tokens=4)
    layers = LLAMA.layers
    per_layer = build_graph(replace(LLAMA, layers=((layers[0][0], 1),)))
    head = 2 * LLAMA.hidden_size * LLAMA.vocab_size
    gemms = sum(
        n.work(decode_shape(1, 1)).flops for n in per_layer.nodes if n.work(decode_shape(1, 1)).family == "gemm"
    )
    layer = gemms - head
    assert timer.usage().flops == pytest.approx(layer * (4 * 8 + 8 + 5 * 24) + head * (4 + 5), rel=0.02)


def test_prompts_pass_through_drafters_that_have_a_cache_of_their_own() -> None:
    prompt = (500, 0)
    for config in METHODS:
        plain = timers(None).step(500, 1, (prompt,), 0, 0)
        drafted = timers(config).step(500, 1, (prompt,), 0, 0)
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
    timer = timers(config, MIXTRAL if engine.enable_expert_parallel else LLAMA, engine, SERVED)
    depth = len(timer.drafts.config.nodes_by_depth) - 1
    step, round_s = timer.expected_time(4, 0, 1000), timer.expected_time(4, depth, 1000)
    assert step < round_s
    if config["method"] in ("ngram", "medusa"):
        assert round_s < (depth + 1) * step


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v2-lite", "nemotron-3-nano-30b-a3b", "qwen3.5-27b"])
@pytest.mark.parametrize("method", ["ngram", "medusa", "eagle"])
def test_windows_latents_and_states_are_drafted_for(name: str, method: str) -> None:
    """Each token deeper takes longer, and less than a step of its own."""
    timer = timers({"method": method, "num_speculative_tokens": 4}, load_model(name), None, SERVED)
    times = [timer.expected_time(2, depth, 3000) for depth in range(5)]
    assert all(later > earlier for earlier, later in pairwise(times))
    assert times[4] - times[1] < 3 * times[0]


def test_prompts_and_drafts_share_a_step() -> None:
    """Chunked prefill: the chunk rides in the verification, and in the first pass of the drafter."""
    for config in METHODS:
        spec = SpeculativeConfig(**config)
        drafting, drafted = (6,) * (spec.depth + spec.pipelined), 6 * spec.nodes_by_depth[-1]
        chunk = (500, 1, ((500, 1000),))
        apart = timers(config).step(*chunk, 0, 0) + timers(config).step(
            0, 0, (), 6, 9000, drafting=drafting, num_draft_tokens=drafted
        )
        together = timers(config).step(*chunk, 6, 9000, drafting=drafting, num_draft_tokens=drafted)
        assert together < apart
        assert timers(config).step(*chunk, 6, 9000) < together


def test_explained_prompts_pass_through_the_drafter_too() -> None:
    scenario = load_scenario(
        "llama-3.1-8b-a100", ["engine.speculative_config={method: eagle, num_speculative_tokens: 2}"]
    )
    prompt = BatchShape(300, 1, ((300, 0),))
    estimate = step_costs(scenario).estimate(prompt)
    assert sum(row.flops for row in estimate.rows if row.name.startswith("draft")) > 0
    plain = step_costs(load_scenario("llama-3.1-8b-a100")).estimate(prompt)
    assert estimate.flops > plain.flops


def test_without_graphs_a_small_drafter_waits_for_its_launches() -> None:
    eager, graphs = (timers(DRAFT, engine=EngineSpec(enforce_eager=each), calibration=SERVED) for each in (True, False))
    draft = {timer: timer.step(0, 0, (), 1, 200, drafting=(1,) * 4, num_draft_tokens=4) for timer in (eager, graphs)}
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
