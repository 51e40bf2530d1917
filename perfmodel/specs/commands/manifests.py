"""Compose files and Kubernetes manifests to container commands and their placement.

Compose expands `$NAME` and `${NAME}`, Kubernetes `$(NAME)` from the container's environment; the rest is left to a
shell, if any (kubernetes.io, Define Dependent Environment Variables)."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.yaml_loader import load_yaml_text
from perfmodel.specs.commands.scalers import scalers
from perfmodel.specs.commands.shell import ANYWHERE, PodPlacement, ShellCommand, ShellScript, Unresolved, expanded_text

_MAX_REPLICAS = 10_000
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu", "habana.ai/gaudi", "gpu")  # the last: Dynamo's
_SLICE_RESOURCE = "nvidia.com/mig-"
_PRODUCT_LABELS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
_KEYS = re.compile(r"^(services|apiVersion|kind|containers|version|name|x-[\w-]+)\s*:", re.MULTILINE)
_BLOCKS = re.compile(r"^\s*(services|containers)\s*:", re.MULTILINE)
_OF_KUBERNETES = ("containers", "initContainers")
_REPLACED = re.compile(r"\$\$|\$\((\w+)\)")
_FOR_A_SHELL = re.compile(r"\$(?:\(\w+\)|\w+|\{\w+\})")


def is_manifest(text: str) -> bool:
    """Whether `text` looks like container YAML rather than a script."""
    return _KEYS.search(text) is not None and _BLOCKS.search(text) is not None


def read_manifest(text: str, place: str) -> ShellScript:
    """Commands of all containers: image, entrypoint and command (compose), or command and args (Kubernetes).

    Raises SpecError for invalid YAML, with its line."""
    parts = re.split(r"^---\s*$", text, flags=re.MULTILINE)
    documents = [part for part in parts if re.search(r"^\s*[^\s#]", part, re.MULTILINE)]  # not only comments
    data = [load_yaml_text(document, place).data for document in documents]
    scaled = scalers(data)
    commands: list[ShellCommand] = []
    for part in data:
        name = _mapping(part, "metadata").get("name") if isinstance(part, Mapping) else None
        around = ANYWHERE._replace(scaler=scaled.get(str(name)))
        commands += _containers(part, place, True, around)
    return ShellScript(tuple(commands), {})


def _containers(data: Any, place: str, is_compose: bool, around: PodPlacement = ANYWHERE) -> Iterator[ShellCommand]:
    """Mappings below `data` with an image, a command or its arguments; `around`: placement so far."""
    if isinstance(data, Mapping):
        around = _placed(data, around, place)
        if isinstance(data.get("image"), str) or data.keys() & {"command", "args"}:
            yield _container(data, place, is_compose and "args" not in data, around)
            return
        for key, value in data.items():
            is_further = key == "workerTemplate" and "leaderTemplate" in data
            inside = around._replace(is_further=True) if is_further else around
            yield from _containers(value, place, is_compose and key not in _OF_KUBERNETES, inside)
    elif isinstance(data, list):
        for value in data:
            yield from _containers(value, place, is_compose, around)


def _placed(data: Mapping[str, Any], around: PodPlacement, place: str) -> PodPlacement:
    """`around` updated by a mapping's replicas, nodes and GPUs.

    Compose: `deploy.replicas` or `scale`, `deploy.resources`. Kubernetes: `replicas`, `size` of a LeaderWorkerSet,
    Dynamo's `multinode`, `nodeSelector` or node affinity, `resources`."""
    deploy, resources = _mapping(data, "deploy"), _mapping(data, "resources")
    counts = {
        "replicas": data.get("replicas", data.get("scale", deploy.get("replicas"))),
        "size": data.get("size") if "workerTemplate" in data else _mapping(data, "multinode").get("nodeCount"),
        "gpus": next(_gpus(resources), None) or next(_gpus(_mapping(deploy, "resources")), None),
    }
    known: dict[str, Any] = {}
    for name, value in counts.items():
        if value is not None:
            try:
                known[name] = -1 if isinstance(value, float) and not value.is_integer() else int(value)
            except (TypeError, ValueError):
                known[name] = -1
            if not 0 <= known[name] <= _MAX_REPLICAS:
                allowed = f"a whole number up to {_MAX_REPLICAS:,}"
                raise SpecError(f"{place}: {name}: got {str(value)[:60]}; expected {allowed}.")
    slices = (str(key) for block in resources.values() if isinstance(block, Mapping) for key in block)
    mig = next((key.removeprefix(_SLICE_RESOURCE) for key in slices if key.startswith(_SLICE_RESOURCE)), None)
    device = next(_products(data), around.device)
    return around._replace(**known, device=device if mig is None else f"{device or 'GPU'}:{mig}")


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def _gpus(resources: Mapping[str, Any]) -> Iterator[Any]:
    """GPU counts in `resources`; Kubernetes' limits before requests."""
    for kind in ("limits", "requests", "reservations"):
        block = _mapping(resources, kind)
        yield from (value for key, value in block.items() if str(key) in _GPU_RESOURCES)
        devices = block.get("devices")
        for device in devices if isinstance(devices, list) else ():
            is_gpu = isinstance(device, Mapping) and "gpu" in (device.get("capabilities") or ())
            ids = device.get("device_ids") if is_gpu else None
            if isinstance(ids, list):
                yield len(ids)
            elif is_gpu and str(device.get("count")) != "all":
                yield device.get("count")


def _products(data: Mapping[str, Any]) -> Iterator[str]:
    """GPU names in node labels."""
    yield from (str(value) for key, value in _mapping(data, "nodeSelector").items() if key in _PRODUCT_LABELS)
    for rule in _rules(_mapping(data, "affinity").get("nodeAffinity")):
        if rule.get("key") in _PRODUCT_LABELS and rule.get("operator") == "In" and isinstance(rule.get("values"), list):
            yield from map(str, rule["values"])


def _rules(affinity: Any) -> Iterator[Mapping[str, Any]]:
    for value in affinity.values() if isinstance(affinity, Mapping) else affinity if isinstance(affinity, list) else ():
        yield from _rules(value)
    if isinstance(affinity, Mapping) and "key" in affinity:
        yield affinity


def _container(data: Mapping[str, Any], place: str, is_compose: bool, placement: PodPlacement) -> ShellCommand:
    environment = _environment(data.get("environment") or data.get("env"))
    of_group = {"LWS_WORKER_INDEX": str(int(placement.is_further)), "LWS_LEADER_ADDRESS": "leader"}  # LWS sets them
    known = {**environment, **of_group}

    def text(value: str) -> str:
        """Expand compose's `${NAME:-default}`; `$$` is a dollar, quotes are literal."""
        if not is_compose:
            return _of_kubernetes(value, known)
        return expanded_text(re.sub(r"[\\`]", r"\\\g<0>", value).replace("$$", "\\$"), place)

    def words(key: str) -> list[str]:
        value = data.get(key) or []
        if isinstance(value, list):
            return [text(str(item)) for item in value]
        if not isinstance(value, str):
            raise SpecError(f"{place}: got {value!r} as a command; expected text or a list of words.")
        try:
            return [text(word) for word in shlex.split(value)]
        except ValueError as error:
            raise SpecError(f"{place}: the command {value[:60]!r} is not closed: {str(error).lower()}.") from None

    entry, rest = (words(key) for key in (("entrypoint", "command") if is_compose else ("command", "args")))
    image = text(data["image"]) if isinstance(data.get("image"), str) else "container"
    before = ["--entrypoint"] if entry and entry[0] in ("sh", "bash", "/bin/sh", "/bin/bash") else []
    return ShellCommand((image, *before, *entry, *rest), environment, 1, placement)


def _of_kubernetes(value: str, environment: Mapping[str, str]) -> str:
    """Expand `$(NAME)`; undefined names are errors outside shell scripts."""
    used = [environment[name] for name in _REPLACED.findall(value) if name in environment]
    unknown = next((variable for variable in used if isinstance(variable, Unresolved)), None)
    if unknown is not None:
        return Unresolved(value, unknown.reason)
    text = _REPLACED.sub(lambda match: "$" if match[1] is None else environment.get(match[1], match[0]), value)
    if _FOR_A_SHELL.search(text) is not None and not re.search(r"\s", text):
        return Unresolved(value, "is replaced by nobody: no shell runs it, and the container sets no such variable")
    return text


def _environment(value: Any) -> dict[str, str]:
    """Container variables; those set from elsewhere are marked."""
    values: dict[str, Any] = {}
    if isinstance(value, Mapping):
        values = {str(name): own for name, own in value.items()}
    for item in value if isinstance(value, list) else ():
        if isinstance(item, Mapping):
            values[str(item.get("name"))] = item.get("value", None if "valueFrom" in item else "")
        else:
            name, equals, text = str(item).partition("=")
            values[name] = text if equals else None
    elsewhere = "is set elsewhere; write its value here"
    return {name: Unresolved(f"${name}", elsewhere) if own is None else str(own) for name, own in values.items()}
