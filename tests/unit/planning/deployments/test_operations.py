"""Files that a plan writes: what scales it, what watches it, and what starts it on one machine or several nodes."""

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from perfmodel.commands.catalog import answer_line
from perfmodel.planning.export import compose_file, kubernetes_manifest, scale_target
from perfmodel.planning.finalist import mean
from perfmodel.planning.operations import in_flight_when_full, operations_manifest
from perfmodel.planning.points import Record
from perfmodel.serve.metrics import names as emulated
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario

LLAMA = {"name": "llama"}
ENGINE = ("tensor_parallel_size", "pipeline_parallel_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


def scenario(*overrides: str) -> Scenario:
    return load_scenario("llama-3.1-8b-a100", ["hardware=h100-sxm-80gb", *overrides])


def winner(replicas: int = 4, rate: float = 44.0, **means_ms: float) -> Any:
    """A finalist whose latencies vary by a factor of two up and down, evenly on a logarithmic axis."""
    records = [Record({f"mean_{name}_ms": value for name, value in means_ms.items()})]
    factors = np.exp2(np.linspace(-1, 1, 101))
    return SimpleNamespace(
        replicas=replicas,
        rate=rate,
        label=f"{replicas} x h100",
        mean=lambda metric: mean(records, metric),
        drawn=SimpleNamespace(latencies=dict.fromkeys(("ttft", "tpot", "e2el"), factors)),
        candidate=SimpleNamespace(layout=SimpleNamespace(scenario=scenario())),
    )


def plan(replicas: int = 4) -> Any:
    scenario = SimpleNamespace(cluster=SimpleNamespace(autoscaling=None))
    return SimpleNamespace(rate=40.0, replicas=replicas, scenario=scenario, elasticity=None)


def objects(text: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(text) if item]


def test_a_replica_is_full_with_what_it_has_in_flight_by_littles_law() -> None:
    """Four replicas serve 44 requests/s, each for 2 s in the mean: 11 x 2 in each."""
    one = winner(e2el=2000.0)
    assert in_flight_when_full(one) == pytest.approx(22.0)
    scaled, *_ = objects(operations_manifest(plan(), one, LLAMA))
    (trigger,) = scaled["spec"]["triggers"]
    assert float(trigger["metadata"]["threshold"]) == 22.0
    assert trigger["metricType"] == "AverageValue"  # of what the query finds, for each replica
    assert scaled["spec"]["scaleTargetRef"] == LLAMA
    assert scaled["spec"]["minReplicaCount"] < 4 < scaled["spec"]["maxReplicaCount"]
    assert in_flight_when_full(winner()) is None


def test_an_alert_fires_at_the_upper_end_of_its_interval() -> None:
    """Of factors between a half and two, evenly by their logarithm, nine of ten are below 2^0.8."""
    means = {"ttft": 100.0, "tpot": 20.0, "e2el": 2000.0}
    _, rule, _ = objects(operations_manifest(plan(), winner(**means), LLAMA))
    (group,) = rule["spec"]["groups"]
    limits = {alert["alert"]: float(alert["expr"].rpartition("> ")[2]) for alert in group["rules"]}
    expected = {"TTFTBeyondPrediction": 0.1, "TPOTBeyondPrediction": 0.02, "E2EBeyondPrediction": 2.0}
    assert limits == pytest.approx({name: value * 2**0.8 for name, value in expected.items()}, rel=1e-3)


def test_queries_name_metrics_that_vllm_has() -> None:
    text = operations_manifest(plan(), winner(ttft=1.0, tpot=1.0, e2el=1.0), LLAMA)
    known = Path(emulated.__file__).read_text(encoding="utf-8")
    asked = {part.split("{")[0].split("(")[-1].split(" ")[-1] for part in text.split("vllm:")[1:]}
    assert len(asked) >= 5
    for name in asked:
        assert f'"vllm:{name.removesuffix("_sum").removesuffix("_count")}"' in known


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_is_scaled_and_scraped_is_what_is_deployed(nodes: int) -> None:
    planned = scenario(f"engine.pipeline_parallel_size={nodes}", "engine.tensor_parallel_size=8")
    text = operations_manifest(plan(), winner(ttft=1.0, tpot=1.0, e2el=1.0), scale_target(planned))
    text += "\n---\n" + kubernetes_manifest(planned)
    scaled, rule, monitor, pods, service = objects(text)
    assert rule["kind"] == "PrometheusRule"
    target = {"apiVersion": "apps/v1", "kind": "Deployment", **scaled["spec"]["scaleTargetRef"]}  # KEDA's defaults
    assert target == {"apiVersion": pods["apiVersion"], "kind": pods["kind"], "name": pods["metadata"]["name"]}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["spec"]["selector"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    template = pods["spec"]["leaderWorkerTemplate"]["leaderTemplate"] if nodes == 2 else pods["spec"]["template"]
    assert endpoint["port"] in [port["name"] for port in template["spec"]["containers"][0]["ports"]]


def test_a_replica_over_nodes_has_a_pod_on_each_and_is_asked_at_its_leader() -> None:
    size = ("engine.pipeline_parallel_size=2", "engine.tensor_parallel_size=8", "cluster.replicas=3")
    group, service = objects(kubernetes_manifest(scenario(*size)))
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], template["size"]) == (3, 2)
    for pod in (template["leaderTemplate"], template["workerTemplate"]):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    leader, worker = (template[f"{role}Template"]["metadata"]["labels"] for role in ("leader", "worker"))
    assert service["spec"]["selector"].items() <= leader.items()
    assert not service["spec"]["selector"].items() <= worker.items()


DEPLOYMENTS = [
    ("engine.tensor_parallel_size=2", "cluster.replicas=4", "engine.max_num_seqs=96"),
    ("engine.tensor_parallel_size=8", "engine.pipeline_parallel_size=2", "cluster.replicas=2"),
    ("engine.max_num_batched_tokens=4096", "engine.kv_cache_dtype=fp8", "engine.quantization=fp8"),
]


@pytest.mark.parametrize("overrides", DEPLOYMENTS, ids=str)
@pytest.mark.parametrize("write", [kubernetes_manifest, compose_file])
def test_what_is_written_is_read_back_as_the_same_deployment(
    write: Any, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    planned = scenario(*overrides)
    text = write(planned)
    if not text:  # no machine has two nodes' devices
        assert write is compose_file
        assert planned.engine.num_devices > 8
        return
    data = answer_line(text, "line", tmp_path, {"hardware": "h100-sxm-80gb"}).data
    read = load_scenario(json.dumps(data))
    assert read.cluster.replicas == planned.cluster.replicas
    assert {name: getattr(read.engine, name) for name in ENGINE} == {
        name: getattr(planned.engine, name) for name in ENGINE
    }
    for name in ("quantization", "kv_cache_dtype"):
        assert getattr(read.engine, name) == getattr(planned.engine, name)


def test_on_one_machine_each_replica_has_devices_and_a_port_of_its_own() -> None:
    services = yaml.safe_load(compose_file(scenario("engine.tensor_parallel_size=2", "cluster.replicas=3")))["services"]
    reserved = [item["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for item in services.values()]
    assert sorted(chain(*reserved)) == ["0", "1", "2", "3", "4", "5"]
    assert len({item["ports"][0] for item in services.values()}) == 3


@pytest.mark.parametrize("override", ["cluster.replicas=9", "hardware=mi300x", "engine.profile=llamacpp"])
def test_what_no_single_machine_starts_has_no_compose_file(override: str) -> None:
    assert compose_file(scenario(override)) == ""


def test_roles_have_no_common_load_to_follow() -> None:
    one = winner(e2el=2000.0)
    pools = "cluster.pools=[{role: prefill, replicas: 2}, {role: decode, replicas: 1}]"
    one.candidate.layout.scenario = scenario(pools)
    assert operations_manifest(plan(), one, LLAMA) == ""
