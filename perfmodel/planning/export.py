"""Deployment files: command lines, a scenario file, and objects of Kubernetes, compose, Dynamo and llm-d, all of one
description of a pool's servers. What an engine's server needs is in hardware_specs/engines/commands; resource names are
those that vendors' device plugins advertise."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.errors import SpecError
from perfmodel.files.atomic_write import atomic_write_all
from perfmodel.files.yaml_loader import Positions, dump_yaml
from perfmodel.models.model_changes import ModelChanges
from perfmodel.planning.finalist import Finalist, Job
from perfmodel.planning.operations import dashboard, operations_manifest
from perfmodel.planning.result import JobPlan, PlanResult
from perfmodel.planning.runs import carried_cluster, requests_with_failures
from perfmodel.planning.service import at_rate
from perfmodel.specs.cluster import ClusterSpec, PoolSpec
from perfmodel.specs.commands.description import DynamoRules, ServingRules, load_command, serving_command
from perfmodel.specs.commands.server import engine_arguments, engine_options, left_out_fields
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.overrides import apply_override, as_overrides, parse_override
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_source import is_text, read_scenario

_KV_ROLES = ("prefill", "decode")
_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}  # maker -> what its device plugin calls a device
_LONGEST_NAME = 50  # of 63 characters that a label has room for, with the role behind it
_PORT = 8000
_BEHIND_SIDECAR = 8200  # of llm-d's decode pods, whose sidecar has the other
_PROBES_UNTIL_UP = 360  # ten seconds apart: an hour to fetch weights and load them
_TOKEN = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}}}
_OVER_NODES = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
_HEALTH = {"httpGet": {"path": "/health", "port": "http"}}
# Its recipes of release 0.8: since 0.7 they replace the chart llm-d-modelservice (llm-d.ai, "ModelService": superseded)
_LLM_D = "https://github.com/llm-d/llm-d//guides/recipes/modelserver/base/single-host/{}?ref=release-0.8"
_LLM_D_IMAGE = "REPLACE_MODEL_SERVER_IMAGE"
Object = dict[str, Any]


def nodes_of(scenario: Scenario, pool: PoolSpec) -> int:
    """Nodes per replica of the pool."""
    return ceil(pool.engine.num_devices / (pool.hardware or scenario.hardware).devices_per_node)


@dataclass(frozen=True)
class PoolServer:
    """What starts a pool's replicas, for all files.

    rules:   of its engine; of vLLM where none are described
    problem: why nothing known starts them; empty otherwise"""

    scenario: Scenario
    pool: PoolSpec
    rules: ServingRules
    command: str
    problem: str

    @property
    def name(self) -> str:
        """What its objects are called: letters, digits and dashes, a letter first."""
        name = re.sub(r"[^a-z0-9]+", "-", self.scenario.model.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
        name = name if name[:1].isalpha() else f"model-{name}"
        return name if len(self.scenario.pools) == 1 else f"{name}-{self.pool.role}"

    @property
    def num_nodes(self) -> int:
        return nodes_of(self.scenario, self.pool)

    @property
    def title(self) -> str:
        """`2 x prefill on 4 x h100-sxm-80gb`"""
        pool = self.pool
        return f"{pool.replicas} x {pool.role} on {pool.engine.num_devices} x {self.hardware.name}"

    @property
    def hardware(self) -> HardwareSpec:
        return self.pool.hardware or self.scenario.hardware

    @property
    def image(self) -> str:
        """The image of the engine's version, as its releases are tagged."""
        version = self.pool.engine.described.version
        tag = version.asked if version.asked and version.age == "described" else version.described
        return self.rules.images[str(self.hardware.maker)].format(version=tag if tag.count(".") > 1 else f"{tag}.0")

    @property
    def devices(self) -> Object:
        """The limits of a pod; slices have resources of their own (NVIDIA's device plugin, strategy `mixed`)."""
        _, _, profile = self.hardware.name.partition(":")
        name = f"nvidia.com/mig-{profile}" if profile else _RESOURCES[str(self.hardware.maker)]
        return {name: self.pool.engine.num_devices // self.num_nodes}

    def words(self, port: int | None = _PORT) -> list[str]:
        """Its command line; port: none is said"""
        rules, over = self.rules, self.rules.nodes if self.num_nodes > 1 else None
        extra = [word.format(nodes=self.num_nodes) for word in over.arguments] if over else []
        if over and self.command == "vllm" and self.pool.engine.data_parallel_size > 1:
            extra += ["--data-parallel-backend", "ray"]
        return self._line(rules, [*extra, *rules.arguments, *(["--port", str(port)] if port else [])])

    def dynamo_words(self, rules: DynamoRules) -> list[str]:
        """Its command line as a worker of Dynamo, whose operator joins nodes and gives the address."""
        return self._line(rules, rules.roles.get(self.pool.role, ()))

    def _line(self, rules: ServingRules | DynamoRules, extra: Sequence[str]) -> list[str]:
        """Where settings are in a file, that of a shell which writes it first."""
        model, of_role = self.scenario.model, self.rules.roles.get(self.pool.role, ())
        start = [*rules.start, model.hf_id or model.name]
        if not (file := self.rules.options_file):
            return [*start, *engine_arguments(self.pool.engine, model, self.command), *of_role, *extra]
        options = dump_yaml(engine_options(self.pool.engine, model, self.command) | dict(self.rules.options))
        line = shlex.join([*start, *of_role, *extra, rules.options_flag, file])
        return ["sh", "-c", f"cat > {file} <<'EOF'\n{options}EOF\nexec {line}"]

    def split(self, words: Sequence[str]) -> Object:
        """`words` as Kubernetes' command and args."""
        if self.rules.keeps_entrypoint:
            return {"args": list(words)}
        at = 2 if words[0] == "sh" else len([word for word in self.rules.start if not word.startswith("--")])
        return {"command": list(words[:at]), "args": list(words[at:])}

    def on_node(self, container: str) -> Object:
        """A container on each of a replica's nodes, without its image and command."""
        ip = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        has_peers = self.rules.ip_variable and self.pool.role in _KV_ROLES
        variables = [{"name": name, "value": value} for name, value in self.rules.environment.items()]
        return {
            "name": container,
            "env": [_TOKEN, *variables, *([{"name": self.rules.ip_variable, **ip}] if has_peers else [])],
            "resources": {"limits": self.devices},
            "volumeMounts": [
                {"name": "shared-memory", "mountPath": "/dev/shm"},
                {"name": "weights", "mountPath": "/root/.cache/huggingface"},
            ],
        }


def pool_servers(scenario: Scenario) -> list[PoolServer]:
    """One for each pool, in order."""
    return [_pool_server(scenario, pool) for pool in scenario.pools]


def _pool_server(scenario: Scenario, pool: PoolSpec) -> PoolServer:
    described = pool.engine.described
    command = serving_command(described.description.name)
    known = command or load_command("vllm")
    assert known.serving is not None
    server, why = PoolServer(scenario, pool, known.serving, known.name, ""), ""
    if command is None:
        why = f"its engine is {described.label}, of which no image is known."
    elif server.hardware.kind != "gpu" or server.hardware.maker not in known.serving.images:
        why = f"no image of {described.description.title} is known for it."
    elif pool.role == "encode":
        why = "encoders' servers and their proxy are not written; see vLLM's --ec-transfer-config."
    elif pool.role in _KV_ROLES and not known.serving.roles:
        why = f"{known.title} as one of a pair needs a file of its own for the pair."
    elif not known.serving.shares_ranks and 1 not in (pool.engine.tensor_parallel_size, pool.engine.data_parallel_size):
        why = f"{known.title} splits attention over all ranks by requests or by heads, not by both."
    elif server.num_nodes > 1 and known.serving.nodes is None:
        why = f"{known.title} over several nodes is started by mpirun."
    return replace(server, problem=why and f"{server.title}: {why}")


def server_arguments(scenario: Scenario, pool: PoolSpec) -> list[str]:
    """The model and all arguments of the server but its port."""
    server = _pool_server(scenario, pool)
    return server.words(None)[len(server.rules.start) :]


def kubernetes_manifest(scenario: Scenario, heading: Sequence[str] = ()) -> str:
    """The objects as YAML for `kubectl apply -f`, with `heading` and what a manifest cannot express as comments."""
    servers = pool_servers(scenario)
    lines = [*heading, *(f"Not here: {problem}" for problem in dict.fromkeys(s.problem for s in servers) if problem)]
    if not all(server.problem for server in servers):
        lines.append("A gated model needs a secret: kubectl create secret generic hf-token --from-literal=token=...")
        lines.append("Each pod fetches the weights anew; put a volume that outlives it in place of `weights`.")
    if any(pool.role in _KV_ROLES for pool in scenario.pools):
        lines.append("Before the two Services belongs a proxy that sends each request to prefill, then to decode.")
    return _documents(lines, [one for server in servers if not server.problem for one in _objects(server)])


def _documents(heading: Sequence[str], objects: Sequence[Object]) -> str:
    text = "".join(f"# {line}\n" for line in heading)
    return text + "".join(f"---\n{dump_yaml(json.loads(json.dumps(one)))}" for one in objects)  # no YAML anchors


def _objects(server: PoolServer) -> tuple[Object, Object]:
    """A Deployment, one container per pod with all devices of a replica, or a LeaderWorkerSet with a pod on each of its
    nodes; and a Service."""
    name, labels, words = server.name, {"app.kubernetes.io/name": server.name}, server.words()
    on_node = {**server.on_node(server.command), "image": server.image}
    asked: Object = {
        "ports": [{"name": "http", "containerPort": _PORT}],
        "startupProbe": {**_HEALTH, "periodSeconds": 10, "failureThreshold": _PROBES_UNTIL_UP},
        "readinessProbe": {**_HEALTH, "periodSeconds": 5},
        "livenessProbe": {**_HEALTH, "periodSeconds": 10, "timeoutSeconds": 5},
    }
    metadata, ports = {"name": name, "labels": labels}, [{"name": "http", "port": 80, "targetPort": "http"}]
    kind, selector, spec = {"apiVersion": "apps/v1", "kind": "Deployment"}, labels, Object()
    if (nodes := server.rules.nodes) is None or server.num_nodes == 1:
        template = _pod({**on_node, **asked, **server.split(words)}, labels)
        spec = {"selector": {"matchLabels": labels}, "template": template}
    else:
        kind, selector = _OVER_NODES, {**labels, "role": "leader"}
        shells = ({"args": [text.replace("{command}", shlex.join(words))]} for text in (nodes.leader, nodes.worker))
        leader, worker = ({**on_node, "command": ["sh", "-c"], **shell} for shell in shells)
        spec["leaderWorkerTemplate"] = {
            "size": server.num_nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": _pod({**leader, **asked}, selector),
            "workerTemplate": _pod(worker, labels),
        }
    return (
        {**kind, "metadata": metadata, "spec": {"replicas": server.pool.replicas, **spec}},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"selector": selector, "ports": ports}},
    )


def _pod(container: Object, labels: dict[str, str]) -> Object:
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, {"name": "weights", "emptyDir": {}}]
    return {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}


def scale_target(scenario: Scenario) -> dict[str, str]:
    """What a ScaledObject names of the only pool's object; empty where pools have no common load, or none can start."""
    first, *others = pool_servers(scenario)
    return {} if others or first.problem else {"name": first.name, **(_OVER_NODES if first.num_nodes > 1 else {})}


def compose_file(scenario: Scenario, heading: Sequence[str] = ()) -> str:
    """Services for `docker compose up` on one machine, each replica on devices and a port of its own; empty where no
    machine has all of them, or no image is known."""
    servers = pool_servers(scenario)
    per_node = min((pool.hardware or scenario.hardware).devices_per_node for pool in scenario.pools)
    if any(server.problem for server in servers) or {server.hardware.maker for server in servers} != {"nvidia"}:
        return ""
    if any(server.hardware.is_slice for server in servers):  # which it knows by their own UUIDs
        return ""
    if sum(server.pool.replicas * server.pool.engine.num_devices for server in servers) > per_node:
        return ""
    services, device = Object(), 0
    for server in servers:
        num_devices, start = server.pool.engine.num_devices, server.split(server.words())
        for number in range(server.pool.replicas):
            ids = [str(device + index) for index in range(num_devices)]
            gpus = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
            services[server.name + (f"-{number}" if server.pool.replicas > 1 else "")] = {
                "image": server.image,
                **({"entrypoint": start["command"]} if "command" in start else {}),
                "command": start["args"],
                "ports": [f"{_PORT + len(services)}:{_PORT}"],
                "environment": {"HF_TOKEN": "${HF_TOKEN:-}", **server.rules.environment},
                "ipc": "host",
                "volumes": ["weights:/root/.cache/huggingface"],
                "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
            }
            device += num_devices
    text = dump_yaml(json.loads(json.dumps({"services": services, "volumes": {"weights": {}}})))
    return "".join(f"# {line}\n" for line in heading) + text


def dynamo_manifest(scenario: Scenario, heading: Sequence[str] = ()) -> str:
    """A DynamoGraphDeployment (nvidia.com/v1alpha1): a frontend, and a worker for each pool; empty where no image of
    Dynamo serves all of them."""
    servers = pool_servers(scenario)
    rules, described = servers[0].rules.dynamo, scenario.engine.described
    is_known = {(server.command, server.hardware.maker) for server in servers} == {(servers[0].command, "nvidia")}
    if rules is None or not is_known or any(server.problem or server.hardware.is_slice for server in servers):
        return ""
    image, services = {"image": rules.image}, Object()
    services["Frontend"] = {"componentType": "frontend", "replicas": 1, "extraPodSpec": {"mainContainer": image}}
    for server in servers:
        words, role, (limit,) = server.dynamo_words(rules), server.pool.role, server.devices.values()
        at = 2 if words[0] == "sh" else 3
        services["worker" if role not in _KV_ROLES else role] = {
            "componentType": "worker",
            **({"subComponentType": role} if role in _KV_ROLES else {}),
            "replicas": server.pool.replicas,
            **({"multinode": {"nodeCount": server.num_nodes}} if server.num_nodes > 1 else {}),
            "resources": {"limits": {"gpu": str(limit)}},
            "extraPodSpec": {"mainContainer": {**image, "command": words[:at], "args": words[at:]}},
        }
    spec = {"backendFramework": servers[0].command, "envs": [_TOKEN], "services": services}
    name = servers[0].name.removesuffix(f"-{servers[0].pool.role}")
    its = f"Its {described.description.title} is {rules.version}; predicted for {described.version.described}."
    kind = {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoGraphDeployment"}
    return _documents([*heading, its], [{**kind, "metadata": {"name": name}, "spec": spec}])


def llm_d_files(scenario: Scenario, heading: Sequence[str] = ()) -> dict[str, str]:
    """llm-d's recipes for `kubectl apply -k`: a Kustomization, and a patch for each pool; none where no recipe
    serves all of them, or a replica is on several nodes."""
    servers = pool_servers(scenario)
    first, is_pair = servers[0], servers[0].pool.role in _KV_ROLES
    base = first.rules.llm_d.get("roles" if is_pair else "unified")
    if base is None or any(server.problem or server.num_nodes > 1 for server in servers):
        return {}
    if len({server.image for server in servers}) > 1:
        return {}
    name = first.name.removesuffix(f"-{first.pool.role}")
    image, _, tag = first.image.rpartition(":")
    labels = {"llm-d.ai/model": name, "inference.networking.k8s.io/engine-type": first.command}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [_LLM_D.format(base)],
        "namePrefix": f"{name}-",
        "images": [{"name": _LLM_D_IMAGE, "newName": image, "newTag": tag}],
        "labels": [{"pairs": labels, "includeSelectors": True, "includeTemplates": True}],
        "patches": [{"path": "llm-d.yaml"}],
    }
    patches = []
    for server in servers:
        role = "decode" if server.pool.role not in _KV_ROLES else server.pool.role
        words = server.words(_BEHIND_SIDECAR if is_pair and role == "decode" else _PORT)
        pod = _pod({**server.on_node("modelserver"), **server.split(words)}, {})["spec"]
        kind = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": role}}
        patches.append({**kind, "spec": {"replicas": server.pool.replicas, "template": {"spec": pod}}})
    lines = [*heading, 'kubectl apply -k on this folder; llm-d\'s router goes before it (llm-d.ai, "Quickstart").']
    return {"kustomization.yaml": _documents(lines, [kustomization]), "llm-d.yaml": _documents(heading, patches)}


def serve_commands(result: PlanResult, winner: Finalist) -> list[str]:
    """For each kind of replica: the count, planned settings without an argument, and its start command."""
    return start_lines(result.base.load(as_overrides(_choices(result, winner))))


def start_lines(scenario: Scenario) -> list[str]:
    """The same, of any scenario."""
    return [*(f"# {line}" for line in _unsaid(scenario)), *_lines(scenario)]


def _unsaid(scenario: Scenario) -> Iterator[str]:
    """What the scenario has and no argument of its servers says."""
    for server in pool_servers(scenario):
        if names := [f"engine.{name}" for name in left_out_fields(server.pool.engine, scenario.model, server.command)]:
            yield f"No argument of {server.title} says: {', '.join(names)}."
    around = {
        "model_changes": scenario.model_changes != ModelChanges(),
        "prompt_compression": scenario.prompt_compression is not None,
        "traffic.adapters, by name and path": scenario.traffic.adapters is not None,
        "cluster.router": scenario.cluster.router != ClusterSpec().router,
        "cluster.gateway": scenario.cluster.gateway is not None,
        "cluster.host": scenario.cluster.host is not None,
    }
    if names := [name for name, is_given in around.items() if is_given]:
        yield f"Not in these files, and to be set up beside them: {', '.join(names)}."


def _lines(scenario: Scenario) -> list[str]:
    lines = []
    for server in pool_servers(scenario):
        nodes = server.rules.nodes if server.num_nodes > 1 else None
        lines.append(f"# {server.title}{f', {server.num_nodes} nodes {nodes.says}' if nodes else ''}")
        if server.problem:
            lines.append(f"# {server.problem} The line is {server.rules.start[0]}'s.")
        words = server.words(None)
        lines.append(words[2] if words[0] == "sh" else shlex.join(words))
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


class _Planned(NamedTuple):
    """What the writers of files read."""

    result: PlanResult
    winner: Finalist
    scenario: Scenario
    heading: list[str]


# File -> its text; an empty one is not written
FILES: dict[str, Callable[[_Planned], str]] = {
    "serve.sh": lambda plan: "\n".join(
        ["#!/bin/sh", *(f"# {line}" for line in plan.heading[1:]), *_lines(plan.scenario), ""]
    ),
    "kubernetes.yaml": lambda plan: kubernetes_manifest(plan.scenario, plan.heading),
    "compose.yaml": lambda plan: compose_file(plan.scenario, plan.heading),
    "dynamo.yaml": lambda plan: dynamo_manifest(plan.scenario, plan.heading),
    "kustomization.yaml": lambda plan: llm_d_files(plan.scenario, plan.heading).get("kustomization.yaml", ""),
    "llm-d.yaml": lambda plan: llm_d_files(plan.scenario, plan.heading).get("llm-d.yaml", ""),
    "operations.yaml": lambda plan: operations_manifest(plan.result, plan.winner, scale_target(plan.scenario)),
    "grafana.json": lambda plan: dashboard(plan.result, plan.winner) if scale_target(plan.scenario) else "",
}


def plan_files(result: PlanResult) -> dict[str, str]:
    """File name -> text: the winner's scenario, changed devices and those of `FILES`; empty without a winner."""
    winner = result.winner
    if winner is None:
        return {}
    scenario = result.base.load(as_overrides(_choices(result, winner)))
    heading = [f"{winner.label}, chosen by `perfmodel plan`.", *_not_here(result, winner), *_unsaid(scenario)]
    plan = _Planned(result, winner, scenario, heading)
    written = {name: text for name, write in FILES.items() if (text := write(plan))}
    named = {f"{result.scenario.name}-planned.yaml": _scenario_yaml(result, winner)}
    return {**written, **named, **_device_files(result, winner)}


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
