"""A deployment as Kubernetes objects: of each kind of replica a Deployment of vLLM's server and a Service before it.

Images and their entry points, the shared memory that ranks exchange tensors through and the address of the probes are
those of vLLM's documentation ("Using Docker", "Using Kubernetes"); resources are named as the makers' device plugins
advertise them.
"""

__all__ = ["kubernetes_manifest"]

import json
import re
from collections.abc import Sequence
from typing import Any

from perfmodel.files.yaml_loader import dump_yaml
from perfmodel.planning.deployments.servers import nodes_of, server_arguments
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario

# maker -> what its device plugin calls a device, and the image with vLLM for it; AMD's is published from 0.14 on
_STACKS = {
    "nvidia": ("nvidia.com/gpu", "vllm/vllm-openai"),
    "amd": ("amd.com/gpu", "vllm/vllm-openai-rocm"),
}
_LONGEST_NAME = 50  # of 63 characters that a label has room for, with the role behind it
_PORT = 8000
_PROBES_UNTIL_UP = 360  # ten seconds apart: an hour to fetch weights and load them


def kubernetes_manifest(scenario: Scenario, heading: Sequence[str] = ()) -> str:
    """The objects as YAML, to be handed to `kubectl apply -f`; what cannot be said in it, as comments at its beginning.

    heading: sentences that begin it
    """
    comments = [*heading, *_comments(scenario)]
    text = "".join(f"# {line}\n" for line in comments)
    for pool in scenario.pools:
        if not _problem(scenario, pool):
            name = _name(scenario, pool)
            objects = _deployment(scenario, pool, name), _service(name)
            text += "".join(f"---\n{dump_yaml(json.loads(json.dumps(each)))}" for each in objects)  # without anchors
    return text


def _comments(scenario: Scenario) -> list[str]:
    problems = [problem for pool in scenario.pools if (problem := _problem(scenario, pool))]
    lines = [f"Not here: {problem}" for problem in dict.fromkeys(problems)]
    if len(problems) < len(scenario.pools):
        lines.append("A gated model needs a secret: kubectl create secret generic hf-token --from-literal=token=...")
        lines.append("Each pod fetches the weights anew; put a volume that outlives it in place of `weights`.")
    if any(pool.role in ("prefill", "decode") for pool in scenario.pools):
        lines.append("Before the two Services belongs a proxy that sends each request to prefill, then to decode.")
    return lines


def _problem(scenario: Scenario, pool: PoolSpec) -> str:
    """Why no Deployment starts the pool's replicas; empty where one does."""
    hardware, engine = pool.hardware or scenario.hardware, pool.engine
    what = f"{pool.replicas} x {pool.role} on {engine.num_devices} x {hardware.name}"
    if engine.described.description.name != "vllm":
        return f"{what}: its engine is {engine.described.label}, and only vLLM's image is known."
    if hardware.kind != "gpu" or hardware.maker not in _STACKS:
        return f"{what}: no image of vLLM is known for it."
    if nodes_of(scenario, pool) > 1:
        return f"{what}: one replica takes {nodes_of(scenario, pool)} nodes, which a LeaderWorkerSet or KubeRay joins."
    return ""


def _deployment(scenario: Scenario, pool: PoolSpec, name: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": pool.replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod(scenario, pool)},
        },
    }


def _pod(scenario: Scenario, pool: PoolSpec) -> dict[str, Any]:
    """One container, which has all devices of a replica."""
    hardware = pool.hardware or scenario.hardware
    container = {
        "name": "vllm",
        "image": _image(hardware, pool.engine),
        "command": ["vllm", "serve"],
        "args": [*server_arguments(scenario, pool), "--port", str(_PORT)],
        "ports": [{"name": "http", "containerPort": _PORT}],
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": _TOKEN}}],
        "resources": {"limits": {_STACKS[str(hardware.maker)][0]: pool.engine.num_devices}},
        "startupProbe": {**_HEALTH, "periodSeconds": 10, "failureThreshold": _PROBES_UNTIL_UP},
        "readinessProbe": {**_HEALTH, "periodSeconds": 5},
        "livenessProbe": {**_HEALTH, "periodSeconds": 10, "timeoutSeconds": 5},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "weights", "mountPath": "/root/.cache/huggingface"},
        ],
    }
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, {"name": "weights", "emptyDir": {}}]
    return {"containers": [container], "volumes": volumes}


_TOKEN = {"name": "hf-token", "key": "token", "optional": True}
_HEALTH = {"httpGet": {"path": "/health", "port": "http"}}


def _service(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": name}},
        "spec": {
            "selector": {"app.kubernetes.io/name": name},
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def _image(hardware: HardwareSpec, engine: EngineSpec) -> str:
    """The image with the engine's version, as its releases are tagged."""
    version = engine.described.version
    text = version.asked if version.asked and version.age == "described" else version.described
    return f"{_STACKS[str(hardware.maker)][1]}:v{text if text.count('.') > 1 else f'{text}.0'}"


def _name(scenario: Scenario, pool: PoolSpec) -> str:
    """A name that Kubernetes takes: letters, digits and dashes, a letter first; with the role, where there are two."""
    plain = re.sub(r"[^a-z0-9]+", "-", scenario.model.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    name = plain if plain[:1].isalpha() else f"model-{plain}"
    return name if len(scenario.pools) == 1 else f"{name}-{pool.role}"
