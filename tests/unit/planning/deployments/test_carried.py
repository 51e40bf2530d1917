"""What a plan carries of its scenario, and of each device that it was asked about; what it does not carry is named."""

from math import comb
from pathlib import Path

import pytest

from perfmodel.planning.export import export_plan
from perfmodel.planning.result import PlanResult
from perfmodel.planning.search import make_plan
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.report.terminal import render_text
from perfmodel.report.views.plan import brief_view, plan_json, plan_view
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

BASE = "llama-3.1-8b-a100"
SHORT = (
    "traffic.input_tokens={distribution: fixed, value: 300}",
    "traffic.output_tokens={distribution: fixed, value: 40}",
)
DEVICES = ("h100", "a100", "mi300x", "t4")
PLAN = (
    f"plan={{finalists: 3, seeds: 1, num_requests: 200, max_gpus: 6, space: {{hardware: [{', '.join(DEVICES)}], "
    "tensor_parallel_size: [1], max_num_seqs: [64], max_num_batched_tokens: [2048]}}"
)
CLUSTER = (
    "cluster={autoscaling: {target: 30, max_replicas: 4}, gateway: {timeout_s: 30}, "
    "failures: {mtbf_s: 60, repair_s: 10, start_s: 10}}"
)
CLASSES = "traffic.classes=[{name: chat, share: 0.5, slo: {ttft_ms: 300}}, {name: batch, share: 0.5}]"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> PlanResult:
    store = tmp_path_factory.mktemp("plan") / "points.sqlite"
    found = make_plan(
        BASE, (*SHORT, "model=llama-3.3-70b", "engine.quantization=w4a16", "engine.max_model_len=2048",
               "traffic.arrivals.rate=8", PLAN, CLUSTER, CLASSES, "slo={ttft_ms: 2000, tpot_ms: 100}"), store, workers=1
    )  # fmt: skip
    assert isinstance(found, PlanResult)
    return found


def test_each_device_has_its_best_deployment_or_the_reason_of_none(result: PlanResult) -> None:
    """A T4 takes no BF16, and says so; the others are simulated, of one layout each."""
    answers = {each.device: each for each in result.devices}
    assert tuple(answers) == DEVICES
    assert result.winner is not None
    for name in ("h100", "a100", "mi300x"):
        assert name in answers[name].label
        assert answers[name].max_rate > 0
        assert answers[name].is_simulated
    assert not answers["t4"].label
    assert "number format" in answers["t4"].reason
    text = str(result)
    assert all(name in text for name in DEVICES)
    assert [each["device"] for each in plan_json(result)["devices"]] == list(DEVICES)


def test_the_choice_is_simulated_under_the_scenarios_failures(result: PlanResult) -> None:
    """Each replica is up 60 / (60 + 20) of the time: with so few spare ones fewer requests are in time."""
    found, winner = result.resilience, result.winner
    assert found is not None
    assert winner is not None
    assert next(iter(found.attained)) == winner.replicas
    assert found.attained[winner.replicas] < winner.attained
    for count, share in found.all_up.items():
        needed = winner.replicas
        by_hand = sum(comb(count, k) * 0.75**k * 0.25 ** (count - k) for k in range(needed, count + 1))
        assert share == pytest.approx(by_hand)
    assert "Under the scenario's failures" in str(result)


def test_what_is_exported_has_the_scenarios_cluster_and_names_the_rest(result: PlanResult, tmp_path: Path) -> None:
    export_plan(result, tmp_path)
    file = tmp_path / f"{result.scenario.name}-planned.yaml"
    planned, text = load_scenario(file), file.read_text(encoding="utf-8")
    assert planned.cluster.failures == result.scenario.cluster.failures
    assert planned.cluster.gateway == result.scenario.cluster.gateway
    assert planned.cluster.replicas == result.replicas
    assert planned.traffic.classes == result.scenario.traffic.classes
    serve = (tmp_path / "serve.sh").read_text(encoding="utf-8")
    for place in (text, serve, plan_view(result).blocks[-1].lines[0]):
        assert "cluster.autoscaling" in place
    assert "slo of single traffic.classes" in text


def test_the_model_is_served_under_the_name_that_was_asked_for(result: PlanResult, tmp_path: Path) -> None:
    """Llama 3.3 70B has the architecture of Llama 3.1 70B, and other weights."""
    export_plan(result, tmp_path)
    serve = (tmp_path / "serve.sh").read_text(encoding="utf-8")
    assert "vllm serve meta-llama/Llama-3.3-70B-Instruct" in serve
    assert "model: llama-3.3-70b" in (tmp_path / f"{result.scenario.name}-planned.yaml").read_text(encoding="utf-8")
    assert "What serves llama-3.3-70b at" in str(result)


def test_failures_of_a_replica_that_the_choice_has_not_are_named(tmp_path: Path) -> None:
    event = "cluster={replicas: 9, failures: {events: [{at_s: 5, replica: 8}]}}"
    small = "plan={finalists: 1, seeds: 1, num_requests: 100, space: {tensor_parallel_size: [1], max_num_seqs: [64]}}"
    found = make_plan(BASE, (*SHORT, event, small), tmp_path / "points.sqlite", workers=1)
    assert isinstance(found, PlanResult)
    assert found.resilience is not None
    assert "replica 8" in found.resilience.problem
    export_plan(found, tmp_path)
    planned = tmp_path / f"{found.scenario.name}-planned.yaml"
    assert load_scenario(planned).cluster.failures is None
    assert "Not carried over: cluster.failures" in planned.read_text(encoding="utf-8")


def test_all_files_name_what_no_argument_says(tmp_path: Path) -> None:
    """Only serve.sh named fields of the engine, and nothing what is beside it."""
    small = "plan={finalists: 1, seeds: 1, num_requests: 100, space: {tensor_parallel_size: [1], max_num_seqs: [64]}}"
    given = ("engine.kv_cache_group_size=64", "engine.kv_cache_dtype=int8", "model_changes.tie_embeddings=true")
    around = ("cluster={router: prefix_affinity, host: {cores: 8}}", "prompt_compression.ratio=0.5")
    plan = make_plan(BASE, (*SHORT, *given, *around, small), tmp_path / "points.sqlite", workers=1)
    assert isinstance(plan, PlanResult)
    export_plan(plan, tmp_path)
    for name in ("serve.sh", "kubernetes.yaml", "compose.yaml", "dynamo.yaml", "llm-d.yaml"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "says: engine.kv_cache_group_size." in text, name
        assert "beside them: model_changes, prompt_compression, cluster.router, cluster.host." in text, name


def test_runs_that_end_before_a_queue_grows_are_named(tmp_path: Path) -> None:
    """33 conversations of three turns never fill 64 slots: any rate is served, 227 requests/s were, without a word."""
    talk = "traffic.conversations={turns: {distribution: fixed, value: 3}}"
    small = "plan={finalists: 1, seeds: 1, num_requests: 100, space: {tensor_parallel_size: [1], max_num_seqs: [64]}}"
    plan = make_plan(BASE, ("hardware=h100", talk, small), tmp_path / "points.sqlite", workers=1)
    assert isinstance(plan, PlanResult)
    assert any("end before a queue grows; raise plan.num_requests" in note for note in plan.notes)
    assert "end before a queue grows; raise plan.num_requests" in render_text(brief_view(plan, "?"))


@pytest.mark.parametrize("slo", ["{ttft_ms: 60000}", "{tpot_ms: 200}", "{ttft_p90_ms: 60000}"])
def test_a_rate_at_which_the_queue_grows_is_no_answer(tmp_path: Path, slo: str) -> None:
    """400 requests end within a minute of waiting, or nobody minds: 3.7 billion requests/s were an answer, by one GPU.
    Rates end a tenth above the throughput of a server that always has a queue, the same requests all at once."""
    small = "plan={finalists: 1, seeds: 1, num_requests: 400, space: {tensor_parallel_size: [1], max_num_seqs: [64]}}"
    plan = make_plan(BASE, (*SHORT, f"slo={slo}", "traffic.arrivals.rate=2", small), tmp_path / "s.sqlite", workers=1)
    assert isinstance(plan, PlanResult)
    assert plan.winner is not None
    burst = ("engine.max_num_seqs=64", "traffic.arrivals={process: burst}", "traffic.num_requests=400")
    sustained = simulate(load_scenario(BASE, (*SHORT, *burst))).summary["request_throughput"]
    assert plan.winner.rate == pytest.approx(sustained, rel=0.25)


def test_the_scenarios_own_stages_are_among_the_candidates() -> None:
    base = Base("llama-3.1-70b-h100-tp4", ("engine.pipeline_parallel_size=2", "engine.tensor_parallel_size=4"))
    small = {"max_num_seqs": (64,), "max_num_batched_tokens": (2048,)}
    space = enumerate_space(base, PlanSpec.model_validate({"space": small}))
    assert {each.layout.scenario.engine.pipeline_parallel_size for each in space.candidates} == {1, 2}
