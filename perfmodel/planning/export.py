"""Deployment files: `vllm serve` command lines, a scenario file and Kubernetes objects. Images, shared memory size and
probe address follow vLLM's documentation ("Using Docker", "Using Kubernetes"); resource names are those that vendors'
device plugins advertise."""

import json
import re
import shlex
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.atomic_write import atomic_write_all
from perfmodel.files.yaml_loader import Positions, dump_yaml
from perfmodel.planning.finalist import Finalist, Job
from perfmodel.planning.operations import operations_manifest
from perfmodel.planning.result import JobPlan, PlanResult
from perfmodel.planning.runs import carried_cluster, requests_with_failures
from perfmodel.planning.service import at_rate
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.commands.server import engine_arguments, left_out_fields
from perfmodel.specs.overrides import apply_override, as_overrides, parse_override
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_source import is_text, read_scenario

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def nodes_of(scenario: Scenario, pool: PoolSpec) -> int:
    """Nodes per replica of the pool."""
    return ceil(pool.engine.num_devices / (pool.hardware or scenario.hardware).devices_per_node)


def server_arguments(scenario: Scenario, pool: PoolSpec) -> list[str]:
    """Arguments of `vllm serve`: model, engine arguments, multi-node options ("Parallelism and Scaling", "Data Parallel
    Deployment") and KV transfer."""
    model, engine = scenario.model, pool.engine
    arguments = [model.hf_id or model.name, *engine_arguments(engine, model)]
    if nodes_of(scenario, pool) > 1:
        arguments += ["--distributed-executor-backend", "ray"]
        arguments += ["--data-parallel-backend", "ray"] if engine.data_parallel_size > 1 else []
    if pool.role in _KV_ROLES:
        config = f'{{"kv_connector": "NixlConnector", "kv_role": "{_KV_ROLES[pool.role]}"}}'
        arguments += ["--kv-transfer-config", config]
    return arguments


# maker -> what its device plugin calls a device, and the image with vLLM for it; AMD's is published from 0.14 on
_STACKS = {"nvidia": ("nvidia.com/gpu", "vllm/vllm-openai"), "amd": ("amd.com/gpu", "vllm/vllm-openai-rocm")}
_LONGEST_NAME = 50  # of 63 characters that a label has room for, with the role behind it
_PORT = 8000
_PROBES_UNTIL_UP = 360  # ten seconds apart: an hour to fetch weights and load them
_TOKEN = {"name": "hf-token", "key": "token", "optional": True}
_JOIN = "/vllm-workspace/examples/online_serving/multi-node-serving.sh"  # of the image: docs.vllm.ai, "LWS"
_OVER_NODES = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
_HEALTH = {"httpGet": {"path": "/health", "port": "http"}}


def kubernetes_manifest(scenario: Scenario, heading: Sequence[str] = ()) -> str:
    """The objects as YAML for `kubectl apply -f`, with `heading` and what a manifest cannot express as comments."""
    problems = [_problem(scenario, pool) for pool in scenario.pools]
    lines = [*heading, *(f"Not here: {problem}" for problem in dict.fromkeys(problems) if problem)]
    if not all(problems):
        lines.append("A gated model needs a secret: kubectl create secret generic hf-token --from-literal=token=...")
        lines.append("Each pod fetches the weights anew; put a volume that outlives it in place of `weights`.")
    if any(pool.role in _KV_ROLES for pool in scenario.pools):
        lines.append("Before the two Services belongs a proxy that sends each request to prefill, then to decode.")
    text = "".join(f"# {line}\n" for line in lines)
    for pool, problem in zip(scenario.pools, problems, strict=True):
        for one in () if problem else _objects(scenario, pool):
            text += f"---\n{dump_yaml(json.loads(json.dumps(one)))}"  # JSON round trip: no YAML anchors
    return text


def _problem(scenario: Scenario, pool: PoolSpec) -> str:
    """Why no Deployment can start the pool's replicas; empty if one can."""
    hardware, engine = pool.hardware or scenario.hardware, pool.engine
    what = f"{pool.replicas} x {pool.role} on {engine.num_devices} x {hardware.name}"
    if engine.described.description.name != "vllm":
        return f"{what}: its engine is {engine.described.label}, and only vLLM's image is known."
    if hardware.kind != "gpu" or hardware.maker not in _STACKS:
        return f"{what}: no image of vLLM is known for it."
    return ""


def _image(scenario: Scenario, pool: PoolSpec) -> str:
    """vLLM's image for the pool's devices, of the engine's version, as its releases are tagged."""
    hardware, version = pool.hardware or scenario.hardware, pool.engine.described.version
    tag = version.asked if version.asked and version.age == "described" else version.described
    return f"{_STACKS[str(hardware.maker)][1]}:v{tag if tag.count('.') > 1 else f'{tag}.0'}"


def name_of(scenario: Scenario, pool: PoolSpec) -> str:
    """What the pool's objects are called: letters, digits and dashes, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", scenario.model.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    name = name if name[:1].isalpha() else f"model-{name}"
    return name if len(scenario.pools) == 1 else f"{name}-{pool.role}"


def _objects(scenario: Scenario, pool: PoolSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """A Deployment, one container per pod with all devices of a replica, or a LeaderWorkerSet with a pod on each of its
    nodes; and a Service."""
    hardware, num_nodes, name = pool.hardware or scenario.hardware, nodes_of(scenario, pool), name_of(scenario, pool)
    labels = {"app.kubernetes.io/name": name}
    arguments = [*server_arguments(scenario, pool), "--port", str(_PORT)]
    on_node = {
        "name": "vllm",
        "image": _image(scenario, pool),
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": _TOKEN}}],
        "resources": {"limits": {_STACKS[str(hardware.maker)][0]: pool.engine.num_devices // num_nodes}},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "weights", "mountPath": "/root/.cache/huggingface"},
        ],
    }
    server: dict[str, Any] = {
        **on_node,
        "command": ["vllm", "serve"],
        "args": arguments,
        "ports": [{"name": "http", "containerPort": _PORT}],
        "startupProbe": {**_HEALTH, "periodSeconds": 10, "failureThreshold": _PROBES_UNTIL_UP},
        "readinessProbe": {**_HEALTH, "periodSeconds": 5},
        "livenessProbe": {**_HEALTH, "periodSeconds": 10, "timeoutSeconds": 5},
    }
    metadata, ports = {"name": name, "labels": labels}, [{"name": "http", "port": 80, "targetPort": "http"}]
    kind, selector, spec = {"apiVersion": "apps/v1", "kind": "Deployment"}, labels, dict[str, Any]()
    if num_nodes == 1:
        spec = {"selector": {"matchLabels": labels}, "template": _pod(server, labels)}
    else:
        kind, selector = _OVER_NODES, {**labels, "role": "leader"}
        script = (
            f"bash {_JOIN} leader --ray_cluster_size=$(LWS_GROUP_SIZE); {shlex.join(['vllm', 'serve', *arguments])}"
        )
        join = f"bash {_JOIN} worker --ray_address=$(LWS_LEADER_ADDRESS)"
        spec["leaderWorkerTemplate"] = {
            "size": num_nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": _pod({**server, "command": ["sh", "-c"], "args": [script]}, selector),
            "workerTemplate": _pod({**on_node, "command": ["sh", "-c"], "args": [join]}, labels),
        }
    return (
        {**kind, "metadata": metadata, "spec": {"replicas": pool.replicas, **spec}},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"selector": selector, "ports": ports}},
    )


def _pod(container: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, {"name": "weights", "emptyDir": {}}]
    return {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}


def scale_target(scenario: Scenario) -> dict[str, str]:
    """What a ScaledObject names of the only pool's object."""
    (pool,) = scenario.pools
    return {"name": name_of(scenario, pool), **(_OVER_NODES if nodes_of(scenario, pool) > 1 else {})}


def compose_file(scenario: Scenario) -> str:
    """Services for `docker compose up` on one machine, each replica on devices and a port of its own; empty where no
    machine has all of them, or no image is known."""
    pools = scenario.pools
    per_node = min((pool.hardware or scenario.hardware).devices_per_node for pool in pools)
    makers = {(pool.hardware or scenario.hardware).maker for pool in pools}
    if any(_problem(scenario, pool) for pool in pools) or makers != {"nvidia"}:
        return ""
    if sum(pool.replicas * pool.engine.num_devices for pool in pools) > per_node:
        return ""
    services, device = dict[str, Any](), 0
    for pool in pools:
        for number in range(pool.replicas):
            ids = [str(device + index) for index in range(pool.engine.num_devices)]
            gpus = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
            services[name_of(scenario, pool) + (f"-{number}" if pool.replicas > 1 else "")] = {
                "image": _image(scenario, pool),
                "entrypoint": ["vllm", "serve"],
                "command": [*server_arguments(scenario, pool), "--port", str(_PORT)],
                "ports": [f"{_PORT + len(services)}:{_PORT}"],
                "environment": {"HF_TOKEN": "${HF_TOKEN:-}"},
                "ipc": "host",
                "volumes": ["weights:/root/.cache/huggingface"],
                "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
            }
            device += pool.engine.num_devices
    return dump_yaml({"services": services, "volumes": {"weights": {}}})


def serve_commands(result: PlanResult, winner: Finalist) -> list[str]:
    """For each kind of replica: the count, planned settings without an argument, and its start command."""
    scenario = result.base.load(as_overrides(_choices(result, winner)))
    lines = []
    for pool in scenario.pools:
        hardware, num_nodes = (pool.hardware or scenario.hardware).name, nodes_of(scenario, pool)
        joined = f", {num_nodes} nodes that a Ray cluster joins" if num_nodes > 1 else ""
        lines.append(f"# {pool.replicas} x {pool.role} on {pool.engine.num_devices} x {hardware}{joined}")
        if names := [f"engine.{name}" for name in left_out_fields(pool.engine)]:
            lines.append(f"# no argument says: {', '.join(names)}")
        lines.append(shlex.join(["vllm", "serve", *server_arguments(scenario, pool)]))
    return lines


def _scenario_yaml(result: PlanResult, winner: Finalist) -> str:
    """The base scenario's file with the plan's choices, at the planned rate. A device changed by overrides is named as
    its file from `_device_files`."""
    loaded, _ = read_scenario(result.base.path)
    data: dict[str, Any] = loaded.data
    data.pop("plan", None)
    requests = result.scenario.traffic.num_requests or 1000
    if result.resilience is not None and not result.resilience.problem:
        requests = max(requests, requests_with_failures(result, result.replicas))
    if isinstance(data.get("traffic"), str):
        hidden = {"name", "aliases", "source"}
        data["traffic"] = result.scenario.traffic.model_dump(mode="json", exclude_defaults=True, exclude=hidden)
    choices = {**_choices(result, winner), **at_rate(result.scenario, result.rate, requests)}
    for text in (*result.base.overrides, *as_overrides(choices)):
        change = parse_override(text)
        is_left = change.path[0] == "plan" or (change.path == ("traffic",) and isinstance(change.value, str))
        if not is_left and not (change.path[0] == "hardware" and len(change.path) > 1):
            apply_override(change, data, change.path, Positions(result.base.path))
    for name in _device_files(result, winner):  # in place of the plain name
        data["hardware"] = f"./{name}"
    data["name"] = f"{result.scenario.name}-planned"
    planned = result.scenario.name if is_text(result.base.path) else Path(result.base.path).name
    heading = f"# Chosen by `perfmodel plan {planned}`: {winner.label}.\n"
    return heading + "".join(f"# {line}\n" for line in _not_here(result, winner)) + dump_yaml(data)


def _choices(result: PlanResult, winner: Finalist) -> dict[str, Any]:
    """Scenario fields of the winner, replicas for failures included, and its failures and gateway if simulated."""
    choices = winner.candidate.choices(result.replicas)
    can_carry = result.resilience is None or not result.resilience.problem
    carried = carried_cluster(result.scenario) if can_carry else {}
    return {**choices, "cluster": {**choices["cluster"], **carried}}


def _not_here(result: PlanResult, winner: Finalist) -> list[str]:
    """Features of the planned scenario that this deployment lacks or exceeds."""
    lines = [f"Not carried over: {setting}." for setting in result.left_out]
    if result.resilience is not None and result.resilience.problem:
        lines.append(f"Not carried over: cluster.failures: {result.resilience.problem}")
    if result.replicas > winner.replicas:
        lines.append(f"{result.replicas} replicas: {winner.replicas} serve the rate, the others are for failures.")
    return lines


def _device_files(result: PlanResult, winner: Finalist) -> dict[str, str]:
    """File name -> text of devices changed by `--set hardware...`."""
    changed = [text for text in result.base.overrides if text.startswith("hardware.")]
    if not changed:
        return {}
    hardware = winner.candidate.layout.scenario.hardware
    heading = f"# {hardware.name} with {', '.join(changed)}.\n"
    data = hardware.model_dump(mode="json", exclude_unset=True)
    return {f"{hardware.name}-changed.yaml": heading + dump_yaml(data)}


def plan_files(result: PlanResult) -> dict[str, str]:
    """File name -> text: the winner's `serve.sh`, scenario, changed devices, `kubernetes.yaml`, `operations.yaml`, and
    `compose.yaml` where one machine has all of it; empty without a winner."""
    winner = result.winner
    if winner is None:
        return {}
    asides = _not_here(result, winner)
    script = ["#!/bin/sh", *(f"# {line}" for line in asides), *serve_commands(result, winner), ""]
    scenario = result.base.load(as_overrides(_choices(result, winner)))
    heading = [f"{winner.label}, chosen by `perfmodel plan`.", *asides]
    compose = compose_file(scenario)
    is_one_kind = len(scenario.pools) == 1 and not _problem(scenario, scenario.pools[0])
    operations = operations_manifest(result, winner, scale_target(scenario)) if is_one_kind else ""
    return {
        "serve.sh": "\n".join(script),
        f"{result.scenario.name}-planned.yaml": _scenario_yaml(result, winner),
        "kubernetes.yaml": kubernetes_manifest(scenario, heading),
        **({"compose.yaml": f"# {heading[0]}\n{compose}"} if compose else {}),
        **({"operations.yaml": operations} if operations else {}),
        **_device_files(result, winner),
    }


def export_plan(result: PlanResult, folder: Path) -> list[Path]:
    """Write `plan_files` to `folder` and return their paths. Raises SpecError without a winner or if writing fails."""
    texts = plan_files(result)
    if not texts:
        raise SpecError(f"--export {folder}: nothing serves the rate, so there is nothing to write; see the answer.")
    return atomic_write_all({folder / name: text for name, text in texts.items()})


def batch_command(plan: JobPlan, job: Job) -> list[str]:
    """The command of each replica, which processes its share of the requests."""
    scenario = plan.base.load(job.candidate.overrides(job.replicas))
    engine, model = scenario.pools[0].engine, scenario.model
    devices = f"{engine.num_devices} x {scenario.hardware.name}"
    arguments = ["-i", "requests.jsonl", "-o", "answers.jsonl", "--model", model.hf_id or model.name]
    command = shlex.join(["vllm", "run-batch", *arguments, *engine_arguments(engine, model)])
    return [f"# {job.replicas} x, each with its share of the requests, on {devices}", command]
