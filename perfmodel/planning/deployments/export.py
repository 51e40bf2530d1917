"""A deployment as something to start: `vllm serve` command lines, a scenario file and Kubernetes objects."""

__all__ = ["export_plan", "plan_files", "serve_commands"]

import shlex
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.whole import write_wholes
from perfmodel.files.yaml_loader import Positions, dump_yaml
from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.deployments.kubernetes import kubernetes_manifest
from perfmodel.planning.deployments.resilience import carried_cluster, requests_with_failures
from perfmodel.planning.deployments.result import PlanResult
from perfmodel.planning.deployments.servers import nodes_of, server_arguments
from perfmodel.planning.screening.demand import at_rate
from perfmodel.specs.commands.server import left_out_fields
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.overrides import apply_override, as_overrides, parse_override
from perfmodel.specs.scenario_source import is_text, read_scenario


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
