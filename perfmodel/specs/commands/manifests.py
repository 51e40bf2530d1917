"""A compose file or a Kubernetes manifest as the commands that its containers run, and where it runs them.

Compose replaces `$NAME` and `${NAME}` itself, Kubernetes `$(NAME)` by what the container's environment sets, and
leaves all else to a shell, where there is one (kubernetes.io, Define Dependent Environment Variables).
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.yaml_loader import load_yaml_text
from perfmodel.specs.commands.shell import ANYWHERE, PodPlacement, ShellCommand, ShellScript, Unresolved, expanded_text

_MOST_REPLICAS = 10_000
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu", "habana.ai/gaudi")
_SLICE_RESOURCE = "nvidia.com/mig-"
_PRODUCT_LABELS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
_KEYS = re.compile(r"^(services|apiVersion|kind|containers|version|name|x-[\w-]+)\s*:", re.MULTILINE)
_BLOCKS = re.compile(r"^\s*(services|containers)\s*:", re.MULTILINE)
_OF_KUBERNETES = ("containers", "initContainers")
_REPLACED = re.compile(r"\$\$|\$\((\w+)\)")
_FOR_A_SHELL = re.compile(r"\$(?:\(\w+\)|\w+|\{\w+\})")


def is_manifest(text: str) -> bool:
    """Whether `text` looks like YAML with containers, and not like a script."""
    return _KEYS.search(text) is not None and _BLOCKS.search(text) is not None


def read_manifest(text: str, place: str) -> ShellScript:
    """The commands of all containers: image, entrypoint and command (compose), or command and args (Kubernetes).

    Raises SpecError for what is no YAML, with its line.
    """
    documents = [part for part in re.split(r"^---\s*$", text, flags=re.MULTILINE) if part.strip()]
    commands: list[ShellCommand] = []
    for document in documents:
        loaded = load_yaml_text(document, place)
        commands += _containers(loaded.data, place, is_compose=True)
    return ShellScript(tuple(commands), {})


def _containers(data: Any, place: str, is_compose: bool, around: PodPlacement = ANYWHERE) -> Iterator[ShellCommand]:
    """Every mapping below `data` that names an image or a command; `around`: what stands above them."""
    if isinstance(data, Mapping):
        around = _placed(data, around, place)
        if isinstance(data.get("image"), str) or "command" in data:
            yield _container(data, place, is_compose and "args" not in data, around)
            return
        for key, value in data.items():
            yield from _containers(value, place, is_compose and key not in _OF_KUBERNETES, around)
    elif isinstance(data, list):
        for value in data:
            yield from _containers(value, place, is_compose, around)


def _placed(data: Mapping[str, Any], around: PodPlacement, place: str) -> PodPlacement:
    """`around` with what the keys of a manifest's mapping say of replicas, nodes and GPUs.

    Compose has `deploy.replicas` or `scale` and `deploy.resources`, Kubernetes `replicas`, `size` of a LeaderWorkerSet,
    `nodeSelector` or a node affinity, and `resources`.
    """
    deploy = data["deploy"] if isinstance(data.get("deploy"), Mapping) else {}
    own = {"replicas": data.get("replicas", data.get("scale", deploy.get("replicas")))}
    own["size"] = data.get("size") if "leaderTemplate" in data or "workerTemplate" in data else None
    own["gpus"] = next(_gpus(data.get("resources")), None) or next(_gpus(deploy.get("resources")), None)
    known: dict[str, Any] = {name: _count(name, value, place) for name, value in own.items() if value is not None}
    device = next(_slices(data.get("resources")), None) or next(_products(data), around.device)
    return around._replace(**known)._replace(device=device)


def _count(name: str, value: Any, place: str) -> int:
    try:
        count = -1 if isinstance(value, float) and not value.is_integer() else int(value)
    except (TypeError, ValueError):
        count = -1
    if not 0 <= count <= _MOST_REPLICAS:
        raise SpecError(f"{place}: {name}: got {str(value)[:60]}; expected a whole number up to {_MOST_REPLICAS:,}.")
    return count


def _gpus(resources: Any) -> Iterator[Any]:
    """How many GPUs `resources` of a container asks for, Kubernetes' limits before its requests, or compose's."""
    for kind in ("limits", "requests", "reservations"):
        block = resources.get(kind) if isinstance(resources, Mapping) else None
        if not isinstance(block, Mapping):
            continue
        yield from (value for key, value in block.items() if str(key) in _GPU_RESOURCES)
        devices = block.get("devices")
        for each in devices if isinstance(devices, list) else ():
            if (
                isinstance(each, Mapping)
                and "gpu" in (each.get("capabilities") or ())
                and str(each.get("count")) != "all"
            ):
                yield each.get("count")


def _slices(resources: Any) -> Iterator[str]:
    """Slices of a GPU that `resources` of a container asks for: `MIG 3g.40gb`."""
    for block in resources.values() if isinstance(resources, Mapping) else ():
        for key in block if isinstance(block, Mapping) else ():
            if str(key).startswith(_SLICE_RESOURCE):
                yield f"MIG {str(key).removeprefix(_SLICE_RESOURCE)}"


def _products(data: Mapping[str, Any]) -> Iterator[str]:
    """GPUs' names that a pod's nodes must be labelled with."""
    selector = data.get("nodeSelector")
    if isinstance(selector, Mapping):
        yield from (str(value) for key, value in selector.items() if key in _PRODUCT_LABELS)
    affinity = data.get("affinity")
    node = affinity.get("nodeAffinity") if isinstance(affinity, Mapping) else None
    for rule in _rules(node):
        if rule.get("key") in _PRODUCT_LABELS and rule.get("operator") == "In" and isinstance(rule.get("values"), list):
            yield from map(str, rule["values"])


def _rules(affinity: Any) -> Iterator[Mapping[str, Any]]:
    """All `matchExpressions` below a node affinity."""
    for value in affinity.values() if isinstance(affinity, Mapping) else affinity if isinstance(affinity, list) else ():
        yield from _rules(value)
    if isinstance(affinity, Mapping) and "key" in affinity:
        yield affinity


def _container(data: Mapping[str, Any], place: str, is_compose: bool, placement: PodPlacement) -> ShellCommand:
    environment = _environment(data.get("environment") or data.get("env"), place)

    def text(value: str) -> str:
        return _text(value, place) if is_compose else _of_kubernetes(value, environment)

    entry = _words(data.get("entrypoint" if is_compose else "command"), text, place)
    rest = _words(data.get("command" if is_compose else "args"), text, place)
    image = text(data["image"]) if isinstance(data.get("image"), str) else "container"
    given = ["--entrypoint", *entry] if entry and entry[0] in ("sh", "bash", "/bin/sh", "/bin/bash") else entry
    words = [image, *given, *rest] if entry else [image, *rest]
    return ShellCommand(tuple(words), environment, 1, placement)


def _words(value: Any, text: Callable[[str], str], place: str) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        return [text(str(item)) for item in value]
    if not isinstance(value, str):
        raise SpecError(f"{place}: found {value!r} as a command, allowed text or a list of words.")
    try:
        return [text(word) for word in shlex.split(value)]
    except ValueError as error:
        raise SpecError(f"{place}: the command {value[:60]!r} is not closed: {str(error).lower()}.") from None


def _text(value: str, place: str) -> str:
    """A word with compose's `${NAME:-default}` replaced; `$$` is a dollar, and quotes are nothing special."""
    plain = re.sub(r"[\\`]", r"\\\g<0>", value).replace("$$", "\\$")
    return expanded_text(plain, place)


def _of_kubernetes(value: str, environment: Mapping[str, str]) -> str:
    """A word with `$(NAME)` replaced; one that is no script for a shell must then be known."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[1] is None else environment.get(match[1], match[0])

    used = [environment[name] for name in _REPLACED.findall(value) if name in environment]
    unknown = next((each for each in used if isinstance(each, Unresolved)), None)
    if unknown is not None:
        return Unresolved(value, unknown.reason)
    found = _REPLACED.sub(replaced, value)
    if _FOR_A_SHELL.search(found) is not None and not re.search(r"\s", found):
        return Unresolved(value, "is replaced by nobody: no shell runs it, and the container sets no such variable")
    return found


def _environment(value: Any, place: str) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(name): _set_to(str(name), each) for name, each in value.items()}
    found = {}
    for item in value if isinstance(value, list) else []:
        if isinstance(item, Mapping):
            name = str(item.get("name"))
            found[name] = _set_to(name, item.get("value", None if "valueFrom" in item else ""))
        else:
            name, given, text = str(item).partition("=")
            found[name] = _set_to(name, text if given else None)
    return found


def _set_to(name: str, value: Any) -> str:
    """What a container's variable is set to; of one that comes from elsewhere, that it does."""
    return str(value) if value is not None else Unresolved(f"${name}", "is set elsewhere; write its value here")
