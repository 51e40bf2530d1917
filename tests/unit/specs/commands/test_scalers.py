"""Autoscalers beside a deployment in its manifest come back as the scenario's `cluster.autoscaling`."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.files.yaml_loader import dump_yaml
from perfmodel.specs import load_scenario
from perfmodel.specs.commands.line import Asking, LineScenario, read_line

SERVER = """
kind: Deployment
metadata: {name: llama}
spec:
  template:
    spec:
      containers:
        - image: vllm/vllm-openai:v0.21.0
          args: ["--model", "meta-llama/Llama-3.1-8B-Instruct"]
"""
HPA = """
kind: HorizontalPodAutoscaler
metadata: {name: up-and-down}
spec:
  scaleTargetRef: {kind: Deployment, name: llama}
  minReplicas: 2
  maxReplicas: 8
  metrics:
    - {type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 80}}}
    - type: Pods
      pods: {metric: {name: METRIC}, target: {type: AverageValue, averageValue: VALUE}}
  behavior: {scaleDown: {stabilizationWindowSeconds: 60}}
"""
KEDA = """
kind: ScaledObject
metadata: {name: from-zero}
spec:
  scaleTargetRef: {name: llama}
  maxReplicaCount: 6
  cooldownPeriod: 360
  advanced: {horizontalPodAutoscalerConfig: {behavior: {scaleUp: {stabilizationWindowSeconds: 30}}}}
  triggers:
    - {type: prometheus, metadata: {query: "QUERY", threshold: "5", activationThreshold: "2"}}
"""


def read(*documents: str) -> LineScenario:
    return read_line("---".join(documents), Asking(hardware="h100-sxm-80gb"), "manifest")


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        ("vllm_num_requests_waiting", '"4"', ("queue", 4)),
        ("vllm:num_requests_running", "30", ("running", 30)),
        ("vllm:kv_cache_usage_perc", "800m", ("kv_cache_usage", 0.8)),
        ("sglang:num_queue_reqs", "2.5", ("queue", 2.5)),
    ],
)
def test_an_hpa_is_read_and_runs(tmp_path, metric, value, expected):
    found = read(SERVER, HPA.replace("METRIC", metric).replace("VALUE", value))
    scaling = found.data["cluster"]["autoscaling"]
    assert (scaling["metric"], scaling["target"]) == expected
    file = tmp_path / "read.yaml"
    file.write_text(dump_yaml({**found.data, "traffic": "azure-conversation"}))
    spec = load_scenario(file).cluster.autoscaling
    assert spec is not None
    assert spec.hpa is not None
    assert (spec.min_replicas, spec.max_replicas) == (2, 8)
    assert spec.hpa.behavior.scale_down.stabilization_window_seconds == 60
    assert found.notes == ("Not read: HorizontalPodAutoscaler up-and-down: Resource cpu",)


def test_no_replicas_at_the_least_are_not_read_as_one(tmp_path):
    """Kubernetes takes 0 with its feature gate HPAScaleToZero alone: it is not modelled, so refused; without the key
    it is 1."""
    hpa = HPA.replace("METRIC", "vllm_num_requests_waiting").replace("VALUE", "4")
    file = tmp_path / "read.yaml"
    for given, fewest in (("minReplicas: 0", 0), ("", 1)):
        scenario = read(SERVER, hpa.replace("minReplicas: 2", given)).data
        assert scenario["cluster"]["autoscaling"]["min_replicas"] == fewest
        file.write_text(dump_yaml({**scenario, "traffic": "azure-conversation"}))
        if not fewest:
            with pytest.raises(SpecError, match="got min_replicas 0; hpa and dynamo keep at least 1, use keda"):
                load_scenario(file)
    assert load_scenario(file).cluster.autoscaling.min_replicas == 1


def test_a_scaled_object_is_read_with_its_defaults(tmp_path):
    query = "sum(vllm:num_requests_waiting + vllm:num_requests_running)"
    found = read(KEDA.replace("QUERY", query), SERVER)  # in any order
    file = tmp_path / "read.yaml"
    file.write_text(dump_yaml({**found.data, "traffic": "azure-conversation"}))
    spec = load_scenario(file).cluster.autoscaling
    assert spec is not None
    assert (spec.metric, spec.target, spec.min_replicas, spec.max_replicas) == ("concurrency", 5, 0, 6)
    assert spec.keda is not None
    assert (spec.keda.polling_interval, spec.keda.cooldown_period, spec.keda.activation_threshold) == (30, 360, 2)
    assert spec.hpa is not None
    assert spec.hpa.behavior.scale_up.stabilization_window_seconds == 30


def test_the_threshold_of_a_trigger_that_is_not_read_is_not_taken_for_another_s():
    other = '{type: cpu, metadata: {value: "60", activationThreshold: "50"}}'
    found = read(SERVER, KEDA.replace("QUERY", "sum(vllm:num_requests_waiting)").replace("- {", f"- {other}\n    - {{"))
    assert found.data["cluster"]["autoscaling"]["keda"]["activationThreshold"] == 2
    assert found.notes == ("Not read: ScaledObject from-zero: trigger cpu None",)


@pytest.mark.parametrize("query", ["avg(vllm:num_requests_waiting)", "sum(rate(vllm:generation_tokens_total[1m]))"])
def test_what_a_trigger_asks_and_is_not_modelled_is_a_note(query):
    found = read(SERVER, KEDA.replace("QUERY", query))
    assert "cluster" not in found.data
    assert found.notes == (f"Not read: ScaledObject from-zero: trigger prometheus {query}",)


def test_a_pair_s_autoscalers_are_those_of_its_pools(tmp_path):
    config = '"--kv-transfer-config", \'{"kv_connector": "NixlConnector", "kv_role": "%s"}\']'
    roles = {"prefiller": "kv_producer", "llama": "kv_consumer"}
    pair = [
        SERVER.replace("name: llama", f"name: {name}").replace('Instruct"]', f'Instruct", {config % role}')
        for name, role in roles.items()
    ]
    found = read(*pair, HPA.replace("METRIC", "vllm_num_requests_waiting").replace("VALUE", "4"))
    file = tmp_path / "read.yaml"
    file.write_text(dump_yaml({**found.data, "traffic": "azure-conversation"}))
    prefill, decode = load_scenario(file).cluster.pools
    assert prefill.autoscaling is None
    assert (decode.role, decode.autoscaling.metric, decode.autoscaling.max_replicas) == ("decode", "queue", 8)


def test_an_autoscaler_of_something_else_is_left_alone():
    found = read(SERVER, KEDA.replace("name: llama", "name: other").replace("QUERY", "vllm:num_requests_waiting"))
    assert "cluster" not in found.data
