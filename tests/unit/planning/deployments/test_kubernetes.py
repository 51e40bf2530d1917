"""Kubernetes objects of a deployment: shapes that `kubectl` takes, and devices that add up."""

import re
from dataclasses import replace

import pytest
import yaml

from perfmodel.planning.export import compose_file, dynamo_manifest, kubernetes_manifest
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
        ("engine.profile=llamacpp", "its engine is llamacpp"),
        ("hardware=tpu-v5p", "no image of vLLM is known"),
    ],
)
def test_what_no_deployment_starts_is_said(override: str, why: str) -> None:
    text = kubernetes_manifest(scenario(override))
    assert why in text
    assert not objects(text)
    assert "a secret" not in text


def test_the_manifest_names_the_secret_and_proxy_that_its_pods_need() -> None:
    """A secret for gated models; a proxy between prefill and decode, but not in front of a single role."""
    text = kubernetes_manifest(scenario())
    assert "# A gated model needs a secret" in text
    assert "proxy" not in text
    assert "Not here" not in text
    mixed = kubernetes_manifest(scenario("cluster.pools=[{role: prefill}, {role: decode, hardware: tpu-v5p}]"))
    assert "# A gated model needs a secret" in mixed
    assert "# Not here: 1 x decode on 1 x tpu-v5p" in mixed
    assert len(containers(mixed)) == 1


def containers(text: str) -> dict[str, dict]:  # type: ignore[type-arg]
    """Deployment -> its container."""
    deployments = [manifest for manifest in objects(text) if manifest["kind"] == "Deployment"]
    return {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["spec"]["containers"][0] for manifest in deployments
    }


@pytest.mark.parametrize(
    ("sizes", "num_devices"),
    [
        ("tensor_parallel_size=4", 4),
        ("pipeline_parallel_size=3", 3),
        ("tensor_parallel_size=2,pipeline_parallel_size=2", 4),
        ("tensor_parallel_size=2,data_parallel_size=4", 8),
    ],
)
def test_a_pod_requests_the_devices_of_all_stages_and_ranks(sizes: str, num_devices: int) -> None:
    (container,) = containers(kubernetes_manifest(scenario(*(f"engine.{size}" for size in sizes.split(","))))).values()
    assert container["resources"]["limits"] == {"nvidia.com/gpu": num_devices}


def test_each_pool_requests_its_vendors_device_resource() -> None:
    """AMD's device plugin advertises amd.com/gpu, NVIDIA's nvidia.com/gpu."""
    decode = "{role: decode, replicas: 3, engine: {tensor_parallel_size: 2}}"
    pools = f"cluster.pools=[{{role: prefill, hardware: mi300x}}, {decode}]"
    text = kubernetes_manifest(scenario(pools))
    pods = {name.rpartition("-")[2]: container for name, container in containers(text).items()}
    assert pods["prefill"]["resources"]["limits"] == {"amd.com/gpu": 1}
    assert pods["decode"]["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert "rocm" in pods["prefill"]["image"]
    assert "rocm" not in pods["decode"]["image"]
    replicas = {
        manifest["metadata"]["name"]: manifest["spec"]["replicas"]
        for manifest in objects(text)
        if manifest["kind"] == "Deployment"
    }
    assert {name.rpartition("-")[2]: count for name, count in replicas.items()} == {"prefill": 1, "decode": 3}
    selected = {
        manifest["metadata"]["name"]: manifest["spec"]["selector"]
        for manifest in objects(text)
        if manifest["kind"] == "Service"
    }
    assert selected == {name: {"app.kubernetes.io/name": name} for name in replicas}


def test_probes_allow_an_hour_to_load_and_use_the_api_port() -> None:
    """vLLM serves /health on the port of its API; ranks share tensors through /dev/shm, which is memory."""
    text = kubernetes_manifest(scenario("engine.tensor_parallel_size=2"))
    (container,) = containers(text).values()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert str(ports["http"]) == container["args"][container["args"].index("--port") + 1]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] == 3600
    assert container["livenessProbe"]["timeoutSeconds"] < container["livenessProbe"]["periodSeconds"]
    deployment, service = objects(text)
    volumes = {volume["name"]: volume["emptyDir"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]] == {"medium": "Memory"}
    assert volumes[mounts["/root/.cache/huggingface"]] == {}
    assert service["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]


def test_object_names_are_valid_labels_for_any_model_name() -> None:
    """RFC 1123: lower case letters, digits and dashes, at most 63, a letter first for a Service."""
    for name in ("4-Bit/Some_Model!", "UPPER.case", "x" * 200, "ends-with-" + "-" * 60):
        given = scenario()
        given = given.model_copy(update={"model": replace(given.model, name=name)})
        for manifest in objects(kubernetes_manifest(given)):
            assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", manifest["metadata"]["name"])


def test_a_slice_asks_for_the_slice_and_not_for_the_gpu() -> None:
    """NVIDIA's device plugin, strategy `mixed`: nvidia.com/mig-<profile>; compose and Dynamo count whole GPUs."""
    slices = scenario("hardware=h100:3g.40gb", "cluster.replicas=2")
    deployment, _ = objects(kubernetes_manifest(slices))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": 1}
    whole = scenario("hardware=h100", "cluster.replicas=2")
    for write in (compose_file, dynamo_manifest):
        assert write(whole)
        assert not write(slices)
