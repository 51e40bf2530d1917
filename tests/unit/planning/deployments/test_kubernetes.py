"""Kubernetes objects of a deployment: shapes that `kubectl` takes, and devices that add up."""

import re

import pytest
import yaml

from perfmodel.planning.deployments.kubernetes import kubernetes_manifest
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario


def scenario(*overrides: str) -> Scenario:
    return load_scenario("llama-3.1-8b-a100", overrides)


def objects(text: str) -> list[dict]:  # type: ignore[type-arg]
    return [each for each in yaml.safe_load_all(text) if each]


def test_a_deployment_and_a_service_that_finds_its_pods() -> None:
    """By the API reference of apps/v1 and v1: a Deployment's selector matches its template's labels, a Service selects
    the same, names are DNS labels; limits ask for as many devices as tensor parallelism takes."""
    text = kubernetes_manifest(scenario("engine.tensor_parallel_size=2", "cluster.replicas=3"), ["Why."])
    deployment, service = objects(text)
    assert text.startswith("# Why.\n")
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    for each in (deployment, service):
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", each["metadata"]["name"])
    assert deployment["spec"]["replicas"] == 3
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert [container["command"], container["args"][1:3]] == [["vllm", "serve"], ["--tensor-parallel-size", "2"]]
    assert container["ports"][0]["containerPort"] == int(container["args"][container["args"].index("--port") + 1])
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    volumes = {each["name"] for each in deployment["spec"]["template"]["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    assert all(isinstance(each, str) for each in container["args"])
    assert "&id" not in text  # anchors are YAML, but nobody's way to write a manifest


@pytest.mark.parametrize(
    ("overrides", "image"),
    [
        (("engine.version=0.14.1",), "vllm/vllm-openai:v0.14.1"),
        (("engine.version=0.14",), "vllm/vllm-openai:v0.14.0"),
        (("hardware=mi300x",), "vllm/vllm-openai-rocm:v"),
    ],
)
def test_the_image_is_of_the_maker_and_the_version(overrides: tuple[str, ...], image: str) -> None:
    deployment, _ = objects(kubernetes_manifest(scenario(*overrides)))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith(image)


def test_prefill_and_decode_are_deployments_of_their_own() -> None:
    pools = "cluster.pools=[{role: prefill, replicas: 2}, {role: decode, replicas: 1}]"
    text = kubernetes_manifest(scenario(pools))
    found = {each["metadata"]["name"]: each for each in objects(text) if each["kind"] == "Deployment"}
    assert sorted(name.rpartition("-")[2] for name in found) == ["decode", "prefill"]
    assert sum(each["spec"]["replicas"] for each in found.values()) == 3
    assert "# Before the two Services belongs a proxy" in text


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("engine.tensor_parallel_size=16", "one replica takes 2 nodes"),
        ("engine.profile=sglang", "its engine is sglang"),
        ("hardware=tpu-v5p", "no image of vLLM is known"),
    ],
)
def test_what_no_deployment_starts_is_said(override: str, why: str) -> None:
    text = kubernetes_manifest(scenario(override))
    assert why in text
    assert not objects(text)
