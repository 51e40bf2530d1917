"""A deployment as something to start: `vllm serve` command lines, a scenario file and Kubernetes objects (of each kind
of replica a Deployment of vLLM's server, and a Service before it).

Images and their entry points, the shared memory that ranks exchange tensors through and the address of the probes are
those of vLLM's documentation ("Using Docker", "Using Kubernetes"); resources are named as the makers' device plugins
advertise them.
"""

import json
import re
import shlex
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.whole import write_wholes
from perfmodel.files.yaml_loader import Positions, dump_yaml
from perfmodel.planning.finalist import Finalist, Job
from perfmodel.planning.result import JobPlan, PlanResult
from perfmodel.planning.runs import carried_cluster, requests_with_failures
from perfmodel.planning.service import at_rate
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.commands.server import engine_arguments, left_out_fields
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.overrides import apply_override, as_overrides, parse_override
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_source import is_text, read_scenario

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def nodes_of(scenario: Scenario, pool: PoolSpec) -> int:
    """Nodes that one replica of the pool takes."""
    return ceil(pool.engine.num_devices / (pool.hardware or scenario.hardware).devices_per_node)


def server_arguments(scenario: Scenario, pool: PoolSpec) -> list[str]:
    """What follows `vllm serve`: the model, its engine's arguments, what joins nodes and what hands KV on."""
    model = scenario.model
    arguments = [model.hf_id or model.name, *engine_arguments(pool.engine, model)]
    if nodes_of(scenario, pool) > 1:
        arguments += _across_nodes(pool.engine)
    if pool.role in _KV_ROLES:
        config = f'{{"kv_connector": "NixlConnector", "kv_role": "{_KV_ROLES[pool.role]}"}}'
        arguments += ["--kv-transfer-config", config]
    return arguments


def _across_nodes(engine: EngineSpec) -> list[str]:
    """What starts ranks on other nodes. Source: vLLM's documentation, "Parallelism and Scaling", "Data Parallel
    Deployment"."""
    arguments = ["--distributed-executor-backend", "ray"]
    return [*arguments, "--data-parallel-backend", "ray"] if engine.data_parallel_size > 1 else arguments


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


def serve_commands(result: PlanResult, finalist: Finalist) -> list[str]:
    """One line for each kind of replica: how many, and the command that starts one."""
    scenario = result.base.load(as_overrides(_choices(result, finalist)))
    lines = []
    for pool in scenario.pools:
        hardware = (pool.hardware or scenario.hardware).name
        command = ["vllm", "serve", *server_arguments(scenario, pool)]
        num_nodes = nodes_of(scenario, pool)
        what = f"{pool.replicas} x {pool.role} on {pool.engine.num_devices} x {hardware}"
        what += f", {num_nodes} nodes that a Ray cluster joins" if num_nodes > 1 else ""
        lines += [f"# {what}", *_unsaid(pool.engine), shlex.join(command)]
    return lines


def _unsaid(engine: EngineSpec) -> list[str]:
    """A comment on what the plan has and no argument of the command says."""
    names = [f"engine.{name}" for name in left_out_fields(engine)]
    return [f"# no argument says: {', '.join(names)}"] if names else []


def _scenario_yaml(result: PlanResult, finalist: Finalist) -> str:
    """The base scenario's file with what the plan has chosen, at the rate that was planned for.

    A device that overrides have changed is named as the file beside it that `_device_files` writes.
    """
    loaded, _ = read_scenario(result.base.path)
    data: dict[str, Any] = loaded.data
    data.pop("plan", None)
    candidate = finalist.deployment.screened.candidate
    requests = result.scenario.traffic.num_requests or 1000
    if result.resilience is not None and not result.resilience.problem:
        requests = max(requests, requests_with_failures(result, result.replicas))
    if isinstance(data.get("traffic"), str):
        hidden = {"name", "aliases", "source"}
        traffic = result.scenario.traffic.model_dump(mode="json", exclude_defaults=True, exclude=hidden)
        data["traffic"] = traffic
    choices = {**_choices(result, finalist), **at_rate(result.scenario, result.rate, requests)}
    for text in (*result.base.overrides, *as_overrides(choices)):
        change = parse_override(text)
        if change.path[0] == "plan" or (change.path == ("traffic",) and isinstance(change.value, str)):
            continue
        if change.path[0] == "hardware" and len(change.path) > 1:
            data["hardware"] = f"./{_device_file(candidate.layout.scenario.hardware)}"
            continue
        apply_override(change, data, change.path, Positions(result.base.path))
    if _device_files(result, finalist):  # a later override, the plan's own choice, has put the plain name there again
        data["hardware"] = f"./{_device_file(candidate.layout.scenario.hardware)}"
    data["name"] = f"{result.scenario.name}-planned"
    planned = result.scenario.name if is_text(result.base.path) else Path(result.base.path).name
    heading = f"# Chosen by `perfmodel plan {planned}`: {finalist.label}.\n"
    return heading + "".join(f"# {line}\n" for line in _not_here(result, finalist)) + dump_yaml(data)


def _choices(result: PlanResult, finalist: Finalist) -> dict[str, Any]:
    """The fields of the scenario that is deployed: of the winner with the replicas that failures take, and with what
    the scenario says of failures and of its gateway, where these can be simulated on it."""
    replicas = result.replicas if finalist is result.winner else finalist.replicas
    choices = finalist.deployment.screened.candidate.choices(replicas)
    can_carry = result.resilience is None or not result.resilience.problem
    carried = carried_cluster(result.scenario) if can_carry else {}
    return {**choices, "cluster": {**choices["cluster"], **carried}}


def _not_here(result: PlanResult, finalist: Finalist) -> list[str]:
    """What the planned scenario has, and this deployment has not, or has more of."""
    lines = [f"Not carried over: {each}." for each in result.left_out]
    if result.resilience is not None and result.resilience.problem:
        lines.append(f"Not carried over: cluster.failures: {result.resilience.problem}")
    if finalist is result.winner and result.replicas > finalist.replicas:
        lines.append(f"{result.replicas} replicas: {finalist.replicas} serve the rate, the others are for failures.")
    return lines


def _device_files(result: PlanResult, finalist: Finalist) -> dict[str, str]:
    """File name -> text, of the device where `--set hardware...` has changed what its file says."""
    changed = [text for text in result.base.overrides if text.startswith("hardware.")]
    if not changed:
        return {}
    hardware = finalist.deployment.screened.candidate.layout.scenario.hardware
    heading = f"# {hardware.name} with {', '.join(changed)}.\n"
    data = hardware.model_dump(mode="json", exclude_unset=True)
    return {_device_file(hardware): heading + dump_yaml(data)}


def _device_file(hardware: HardwareSpec) -> str:
    return f"{hardware.name}-changed.yaml"


def plan_files(result: PlanResult) -> dict[str, str]:
    """File name -> text, of all that starts the winner; nothing without one: `serve.sh`, the scenario, its device where
    that was changed, and `kubernetes.yaml`."""
    winner = result.winner
    if winner is None:
        return {}
    asides = _not_here(result, winner)
    script = ["#!/bin/sh", *(f"# {line}" for line in asides), *serve_commands(result, winner), ""]
    scenario = result.base.load(as_overrides(_choices(result, winner)))
    heading = [f"{winner.label}, chosen by `perfmodel plan`.", *asides]
    return {
        "serve.sh": "\n".join(script),
        f"{result.scenario.name}-planned.yaml": _scenario_yaml(result, winner),
        "kubernetes.yaml": kubernetes_manifest(scenario, heading),
        **_device_files(result, winner),
    }


def export_plan(result: PlanResult, folder: Path) -> list[Path]:
    """Write `plan_files` to `folder`; returns the files.

    Raises SpecError where there is no winner, or the folder cannot be written.
    """
    texts = plan_files(result)
    if not texts:
        raise SpecError(f"--export {folder}: nothing serves the rate, so there is nothing to write; see the answer.")
    return write_wholes({folder / name: text for name, text in texts.items()})


def batch_command(plan: JobPlan, job: Job) -> list[str]:
    """The command of each replica, which takes its share of the requests."""
    scenario = plan.base.load(job.candidate.overrides(job.replicas))
    engine = scenario.pools[0].engine
    name = scenario.model.hf_id or scenario.model.name
    arguments = ["vllm", "run-batch", "-i", "requests.jsonl", "-o", "answers.jsonl", "--model", name]
    where = (
        f"# {job.replicas} x, each with its share of the requests, on {engine.num_devices} x {scenario.hardware.name}"
    )
    return [where, shlex.join([*arguments, *engine_arguments(engine, scenario.model)])]
