"""Files of a plan for every engine: each is of its published type, names metrics that its server has, and is read back
as what was planned."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError

from perfmodel.planning.export import (
    FILES,
    compose_file,
    dynamo_manifest,
    kubernetes_manifest,
    llm_d_files,
    scale_target,
    start_lines,
)
from perfmodel.planning.finalist import mean
from perfmodel.planning.operations import dashboard, operations_manifest
from perfmodel.planning.points import Record
from perfmodel.serve.metrics import names as emulated
from perfmodel.specs import load_scenario
from perfmodel.specs.commands.description import load_command
from perfmodel.specs.commands.line import Asking, read_line
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario

PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_schemas.yaml").read_text(encoding="utf-8"))
ENGINES = ("vllm", "sglang", "trtllm")
PAIR = "cluster.pools=[{role: prefill, replicas: 2}, {role: decode, engine: {tensor_parallel_size: 2}}]"


def scenario(*overrides: str) -> Scenario:
    return load_scenario("llama-3.1-8b-a100", ["hardware=h100-sxm-80gb", *overrides])


def check(kind: str, item: Any) -> None:
    Draft202012Validator({"$defs": PUBLISHED["$defs"], **PUBLISHED[kind]}).validate(item)


def winner(planned: Scenario) -> Any:
    """A finalist of four replicas at 44 requests/s, whose latencies vary by a factor of two up and down."""
    means = {"ttft": 100.0, "tpot": 20.0, "itl": 21.0, "e2el": 2000.0}
    values = {f"mean_{name}_ms": value for name, value in means.items()}
    records = [Record({**values, "request_throughput": 40.0, "prefix_cache_hit_rate": 0.25})]
    factors = np.exp2(np.linspace(-1, 1, 101))
    return SimpleNamespace(
        replicas=4,
        rate=44.0,
        label="4 x h100",
        mean=lambda metric: mean(records, metric),
        drawn=SimpleNamespace(latencies=dict.fromkeys(means, factors)),
        candidate=SimpleNamespace(layout=SimpleNamespace(scenario=planned)),
    )


def plan() -> Any:
    scenario = SimpleNamespace(name="planned", cluster=SimpleNamespace(autoscaling=None))
    return SimpleNamespace(rate=40.0, replicas=4, scenario=scenario, elasticity=None)


def objects(planned: Scenario) -> list[tuple[str, Any]]:
    """(published type, object) of all files."""
    documents = [kubernetes_manifest(planned), dynamo_manifest(planned), *llm_d_files(planned).values()]
    if len(planned.pools) == 1:
        documents.append(operations_manifest(plan(), winner(planned), scale_target(planned)))
    objects = [(item["kind"], item) for text in documents for item in yaml.safe_load_all(text) if item]
    if text := compose_file(planned):
        objects.append(("compose", yaml.safe_load(text)))
    if len(planned.pools) == 1:
        objects.append(("dashboard", json.loads(dashboard(plan(), winner(planned)))))
    return objects


ALL_KINDS = set(PUBLISHED) - {"$defs"}


@pytest.mark.parametrize("engine", ENGINES)
def test_files_are_of_their_published_types(engine: str) -> None:
    planned = scenario(f"engine.profile={engine}", "cluster.replicas=2", "engine.tensor_parallel_size=2")
    kinds = objects(planned)
    for kind, item in kinds:
        check(kind, item)
    assert {kind for kind, _ in kinds} == ALL_KINDS - {"LeaderWorkerSet"}


@pytest.mark.parametrize("engine", ENGINES[:2])
@pytest.mark.parametrize(
    "size", [("engine.pipeline_parallel_size=2", "engine.tensor_parallel_size=8"), (PAIR,)], ids=str
)
def test_files_of_pairs_and_of_several_nodes_are_too(engine: str, size: tuple[str, ...]) -> None:
    kinds = objects(scenario(f"engine.profile={engine}", *size))
    for kind, item in kinds:
        check(kind, item)
    assert ("LeaderWorkerSet" in dict(kinds)) == (size != (PAIR,))
    assert ("Kustomization" in dict(kinds)) == (size == (PAIR,))


# Type -> where a field is put that its type does not have, and a value of another type than its own
FAULTS: dict[str, tuple[str, str, Any]] = {
    "Deployment": ("spec.template.spec.containers.0", "command", "vllm serve"),
    "Service": ("spec.ports.0", "port", "http"),
    "LeaderWorkerSet": ("spec.leaderWorkerTemplate", "size", "2"),
    "ScaledObject": ("spec.triggers.0.metadata", "threshold", 22.0),
    "PrometheusRule": ("spec.groups.0.rules.0", "for", 600),
    "PodMonitor": ("spec.podMetricsEndpoints.0", "port", 8000),
    "DynamoGraphDeployment": ("spec.services.worker.resources.limits", "gpu", 8),
    "Kustomization": ("images.0", "newTag", 0.31),
    "compose": ("services.llama-3-1-8b.deploy.resources.reservations.devices.0", "device_ids", [0]),
    "dashboard": ("panels.0.gridPos", "w", 30),
}


@pytest.mark.parametrize("kind", sorted(ALL_KINDS))
def test_a_wrong_field_of_each_type_is_refused(kind: str) -> None:
    nodes = ("engine.pipeline_parallel_size=2", "engine.tensor_parallel_size=8") if kind == "LeaderWorkerSet" else ()
    path, key, value = FAULTS[kind]
    for change in ({"noSuchField": 1}, {key: value}):
        item = json.loads(json.dumps(next(item for name, item in objects(scenario(*nodes)) if name == kind)))
        check(kind, item)
        block = item
        for step in path.split("."):
            block = block[int(step)] if step.isdecimal() else block[step]
        assert key in block
        block |= change
        with pytest.raises(ValidationError):
            check(kind, item)


# ---------------------------------------------------------------- metrics


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm:|sglang:|trtllm_)\w+", text))


def test_the_tables_name_metrics_that_the_engines_sources_have() -> None:
    has = yaml.safe_load(Path(__file__).with_name("published_metrics.yaml").read_text(encoding="utf-8"))
    published = {prefix + name for prefix, names in has.items() for name in names}
    of_vllm = set(re.findall(r'"(vllm:\w+)"', Path(emulated.__file__).read_text(encoding="utf-8")))
    published |= of_vllm | {f"{name}_total" for name in of_vllm}  # prometheus_client appends it to counters
    for engine in ENGINES:
        serving = load_command(engine).serving
        assert serving is not None
        assert set(serving.metrics.values()) <= published


@pytest.mark.parametrize("engine", ENGINES)
def test_alerts_scaler_and_dashboard_name_metrics_of_the_planned_engine(engine: str) -> None:
    """Names as the engines' sources have them (hardware_specs/engines/commands, `serving.source`)."""
    planned = scenario(f"engine.profile={engine}")
    serving = load_command(engine).serving
    assert serving is not None
    known = {name + part for name in serving.metrics.values() for part in ("", "_sum", "_count", "_bucket")}
    text = operations_manifest(plan(), winner(planned), scale_target(planned))
    assert metrics_in(text) <= known
    assert metrics_in(dashboard(plan(), winner(planned))) <= known
    assert len(metrics_in(text)) == 2 + 3 * 2  # running, waiting, and sum and count of three latencies
    monitor = next(item for item in yaml.safe_load_all(text) if item["kind"] == "PodMonitor")
    paths = {"vllm": "/metrics", "sglang": "/metrics", "trtllm": "/prometheus/metrics"}
    assert monitor["spec"]["podMetricsEndpoints"][0]["path"] == paths[engine]


def test_sglang_has_gaps_between_tokens_and_counts_each_request_at_one_stage() -> None:
    """sglang 0.5.10 has no histogram of times per output token, and every pipeline stage has the gauges of requests."""
    planned = scenario("engine.profile=sglang")
    text = operations_manifest(plan(), winner(planned), scale_target(planned))
    rules = next(item for item in yaml.safe_load_all(text) if item["kind"] == "PrometheusRule")["spec"]["groups"][0]
    alerts = {rule["alert"]: rule["expr"] for rule in rules["rules"]}
    assert set(alerts) == {"TTFTBeyondPrediction", "ITLBeyondPrediction", "E2EBeyondPrediction"}
    assert float(alerts["ITLBeyondPrediction"].rpartition("> ")[2]) == pytest.approx(0.021 * 2**0.8, rel=1e-3)
    queries = [
        target["expr"]
        for panel in json.loads(dashboard(plan(), winner(planned)))["panels"]
        for target in panel["targets"]
    ]
    for query in (text, *queries):
        for labels in re.findall(r"sglang:num_(?:running|queue)_reqs{([^}]*)}", query):
            assert 'pp_rank="0"' in labels
    assert sum("sglang:num_running_reqs{" in query for query in queries) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_panels_have_the_prediction_and_its_interval_as_lines(engine: str) -> None:
    """Of factors between a half and two, eight of ten are between 2^-0.8 and 2^0.8. At 40 requests/s over 4 replicas,
    each for 2 s, 20 are in flight at each (Little's law)."""
    board = json.loads(dashboard(plan(), winner(scenario(f"engine.profile={engine}"))))
    lines = {}
    for panel in board["panels"]:
        constants = [re.fullmatch(r"vector\((.*)\)", target["expr"]) for target in panel["targets"]]
        values = [float(match[1]) for match in constants if match]
        if values:
            lines[panel["title"]] = values
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    expected = {"TTFT": 0.1, "E2E latency": 2.0, "Requests by engine": 20.0}
    expected |= {"TPOT": 0.02} if engine != "sglang" else {}
    expected |= {"ITL": 0.021} if engine != "trtllm" else {}
    ends = {title: [value, value * 2**-0.8, value * 2**0.8] for title, value in expected.items()}
    hits = {"Prefix cache hit rate, by engine": [0.25]}
    assert lines == {title: pytest.approx(values, rel=1e-4) for title, values in {**ends, **hits}.items()}
    assert "Clock lost" not in [panel["title"] for panel in board["panels"]]  # the emulator's alone


# ---------------------------------------------------------------- and back

WRITERS: dict[str, Callable[[Scenario], str]] = {
    "serve.sh": lambda planned: "\n".join(start_lines(planned)),
    "kubernetes.yaml": kubernetes_manifest,
    "compose.yaml": compose_file,
    "dynamo.yaml": dynamo_manifest,
    "llm-d.yaml": lambda planned: llm_d_files(planned).get("llm-d.yaml", ""),
}
SAME = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
    *("quantization", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("enable_prefix_caching", "enforce_eager"),
)


def settings_of(engine: EngineSpec) -> dict[str, Any]:
    """What a line says: experts on one rank are not split, and fp8 is e4m3."""
    fields = {key: getattr(engine, key) for key in SAME}
    fields["enable_expert_parallel"] &= engine.tensor_parallel_size * engine.data_parallel_size > 1
    return {key: value.replace("fp8_e4m3", "fp8") if isinstance(value, str) else value for key, value in fields.items()}


def test_each_kind_with_arguments_is_read_back() -> None:
    """Those that are not read have no arguments of servers."""
    assert set(FILES) - set(WRITERS) == {"kustomization.yaml", "operations.yaml", "grafana.json"}


@st.composite
def layouts(draw: st.DrawFn) -> list[str]:
    """Settings of an engine and its cluster, as overrides."""
    engine = draw(st.sampled_from(ENGINES))
    is_pair = engine != "trtllm" and draw(st.booleans())
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    pipeline = draw(st.sampled_from([1, 2] if engine != "trtllm" or tensor < 8 else [1]))
    most_ranks = 1 if engine == "trtllm" and tensor > 1 else 4
    ranks = draw(st.sampled_from([size for size in (1, 2, 4) if size <= most_ranks and (pipeline == 1 or size == 1)]))
    fields: dict[str, Any] = {
        "profile": engine,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": ranks,
        "enable_expert_parallel": draw(st.booleans()),
        "kv_cache_dtype": draw(st.sampled_from(["auto", "fp8"])),
        "max_num_seqs": draw(st.integers(1, 1024)),
        "max_num_batched_tokens": draw(st.integers(1024, 16384)),
        "max_model_len": draw(st.integers(1024, 40960)),
        "enable_prefix_caching": draw(st.booleans()),
        "enforce_eager": draw(st.booleans()) if engine != "trtllm" else False,
    }
    if engine != "trtllm":  # whose weights have the checkpoint's format
        fields["quantization"] = draw(st.sampled_from([None, "fp8", "awq"]))
    set_engine = [f"engine.{name}={json.dumps(value)}" for name, value in fields.items()]
    replicas = draw(st.integers(1, 3))
    if not is_pair:
        return [*set_engine, f"cluster.replicas={replicas}"]
    decode = {"tensor_parallel_size": draw(st.sampled_from([1, 2, 4, 8])), "max_num_seqs": draw(st.integers(1, 512))}
    pools = [{"role": "prefill", "replicas": replicas}, {"role": "decode", "replicas": 2, "engine": decode}]
    return [*set_engine, f"cluster.pools={json.dumps(pools)}"]


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=40, deadline=None)
@given(layout=layouts())
def test_what_is_written_is_read_back_as_planned(name: str, layout: list[str]) -> None:
    """A law of every kind of file, over engines, layouts, formats, replicas, pairs. A script starts one of each."""
    planned = load_scenario("qwen3-30b-a3b-h100", ["hardware=h100-sxm-80gb", *layout])
    text = WRITERS[name](planned)
    several_nodes = any(pool.engine.num_devices > 8 for pool in planned.pools)
    if not text:
        total = sum(pool.replicas * pool.engine.num_devices for pool in planned.pools)
        assert total > 8 if name == "compose.yaml" else several_nodes and name == "llm-d.yaml"
        return
    server = read_line(text, Asking(hardware="h100-sxm-80gb"))
    assert server.unmodelled == ()
    data = {key: value for key, value in server.data.items() if key in ("engine", "cluster")}
    again = load_scenario("qwen3-30b-a3b-h100", _overrides(planned, data))
    assert sorted(pool.role for pool in again.pools) == sorted(pool.role for pool in planned.pools)
    for pool, read in zip(planned.pools, again.pools, strict=True):
        assert settings_of(read.engine) == settings_of(pool.engine)
        if name != "serve.sh":
            assert read.replicas == pool.replicas


def _overrides(planned: Scenario, data: dict[str, Any]) -> list[str]:
    """What was read, on a scenario that has none of the planned settings."""
    engine = {"profile": "vllm", **data.get("engine", {})}
    return [
        f"hardware={planned.hardware.name}",
        *(f"{key}={json.dumps(value)}" for key, value in {**data, "engine": engine}.items()),
    ]
