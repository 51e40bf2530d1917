"""Autoscalers beside a deployment in its manifest: HorizontalPodAutoscaler (autoscaling/v2) and KEDA's ScaledObject.

What they say of load, limits and behaviour is a scenario's `cluster.autoscaling`; metrics that are no load of an engine
(CPU, GPU utilisation, latencies) are noted, not read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_KINDS = {"HorizontalPodAutoscaler": "hpa", "ScaledObject": "keda"}
# Names of engines' gauges, as Prometheus or an adapter calls them -> metric. vLLM, SGLang, TensorRT-LLM.
_WAITING, _RUNNING = re.compile(r"requests?_waiting|queue_req"), re.compile(r"requests?_running|running_req")
_KV_USAGE = re.compile(r"cache_usage|token_usage|kv_cache_utilization")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m?)")


class Scaler(NamedTuple):
    """fields: of `cluster.autoscaling`, None where its metric is not read; notes: what was not read"""

    name: str
    fields: dict[str, Any] | None
    notes: tuple[str, ...]


def scalers(documents: Sequence[Any]) -> dict[str, Scaler]:
    """Autoscalers of `documents` by the name of what they scale."""
    own = (data for data in documents if isinstance(data, Mapping) and data.get("kind") in _KINDS)
    return {str(_at(data, "spec", "scaleTargetRef", "name")): _read(data) for data in own}


def _at(data: Any, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _read(data: Mapping[str, Any]) -> Scaler:
    is_keda, spec = data["kind"] == "ScaledObject", data.get("spec")
    name = f"{data['kind']} {_at(data, 'metadata', 'name')}"
    loads = [*(_triggers(spec) if is_keda else _metrics(spec))]
    known = [load for load in loads if load.metric is not None and load.target is not None]
    notes = [f"Not read: {name}: {load.what}" for load in loads if load not in known]
    notes += [f"Not read: {name}: {load.metric} {load.target:g}; one metric is modelled" for load in known[1:]]
    if not known:
        return Scaler(name, None, tuple(notes))
    fields: dict[str, Any] = {"metric": known[0].metric, "target": known[0].target}
    if is_keda:
        fields |= {
            "min_replicas": _at(spec, "minReplicaCount") or 0,
            "max_replicas": _at(spec, "maxReplicaCount") or 100,
        }
        keda = {key: _at(spec, key) for key in ("pollingInterval", "cooldownPeriod")}
        keda["activationThreshold"] = known[0].activation
        fields["keda"] = {key: value for key, value in keda.items() if value is not None}
        behavior = _at(spec, "advanced", "horizontalPodAutoscalerConfig", "behavior")
        if _at(spec, "idleReplicaCount") is not None:
            notes.append(f"Not read: {name}: idleReplicaCount")
    else:
        fewest = _at(spec, "minReplicas")  # a given 0 (feature gate HPAScaleToZero) is refused in words by the scenario
        fields |= {"min_replicas": 1 if fewest is None else fewest, "max_replicas": _at(spec, "maxReplicas") or 1}
        behavior = _at(spec, "behavior")
    if behavior is not None or not is_keda:
        fields["hpa"] = {} if behavior is None else {"behavior": behavior}
    return Scaler(name, fields, tuple(notes))


class ScalerLoad(NamedTuple):
    """What a scaler looks at: in words, the metric and its target, None where they are not read."""

    what: str
    metric: str | None
    target: float | None
    activation: float | None = None


def _metrics(spec: Any) -> Iterator[ScalerLoad]:
    for item in _at(spec, "metrics") or ():
        kind = str(_at(item, "type"))
        block = _at(item, kind[:1].lower() + kind[1:])
        name = str(_at(block, "metric", "name") or _at(block, "name"))
        metric = _metric(name) if kind in ("Pods", "External") else None
        yield ScalerLoad(f"{kind} {name}", metric, _quantity(_at(block, "target", "averageValue")))


def _triggers(spec: Any) -> Iterator[ScalerLoad]:
    for item in _at(spec, "triggers") or ():
        kind, query = _at(item, "type"), str(_at(item, "metadata", "query"))
        is_read = kind == "prometheus" and _at(item, "metricType") in (None, "AverageValue") and "avg" not in query
        target, activation = (_quantity(_at(item, "metadata", key)) for key in ("threshold", "activationThreshold"))
        yield ScalerLoad(f"trigger {kind} {query[:60]}", _metric(query) if is_read else None, target, activation)


def _metric(text: str) -> str | None:
    is_waiting, is_running = _WAITING.search(text) is not None, _RUNNING.search(text) is not None
    if is_waiting or is_running:
        return "concurrency" if is_waiting and is_running else "queue" if is_waiting else "running"
    return "kv_cache_usage" if _KV_USAGE.search(text) is not None else None


def _quantity(value: Any) -> float | None:
    """Kubernetes' `4`, `"4"` or `500m`; None for anything else."""
    match = _QUANTITY.fullmatch(str(value))
    return None if match is None else float(match[1]) / (1000 if match[2] else 1)
