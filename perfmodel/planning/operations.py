"""What keeps a chosen deployment right while it runs: replicas that follow the load, and alerts where it leaves what
was predicted.

A replica is full at the highest rate r that it serves within the SLO. Requests in flight are then, by Little's law
(1961), r times the mean time of a request, taken at the planned rate: it is longer at r, so replicas come early. KEDA
keeps the mean over replicas below it. Alerts fire where a mean over ten minutes exceeds the upper end of its 80 %
interval at the planned rate. Fields are those of KEDA's ScaledObject (keda.sh/docs/2.22, "ScaledObject specification"
and "Prometheus") and of prometheus-operator's PrometheusRule and PodMonitor. Metrics have vLLM's names here; what the
engine's server calls them is in hardware_specs/engines/commands. The dashboard is the emulator's (deploy/grafana), with
the prediction as lines.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from perfmodel.files.catalog import find_file
from perfmodel.files.yaml_loader import dump_yaml
from perfmodel.planning.finalist import Finalist
from perfmodel.planning.result import PlanResult
from perfmodel.specs.autoscaling import KedaSpec, as_written
from perfmodel.specs.commands.description import ServingRules, serving_command

_PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
_MOST = 4  # times as many replicas as planned
_LOW, _HIGH = 0.1, 0.9  # of the draws: the ends of an 80 % interval
# Latency -> vLLM's histogram of it, after its prefix `vllm:`
VLLM_HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "e2el": "e2e_request_latency_seconds",
}
_GAPS = {"itl": "inter_token_latency_seconds"}
_METRIC = re.compile(r"\b(?:vllm:|perfmodel_)([a-z0-9_]+?)(_bucket|_sum|_count)?(\{|,)")


def in_flight_when_full(winner: Finalist) -> float | None:
    """Requests in flight of a replica at its highest rate within the SLO; None where nothing was simulated."""
    mean_s = winner.mean("mean_e2el_ms")
    return winner.rate / winner.replicas * mean_s * 1e-3 if mean_s and winner.rate else None


def operations_manifest(result: PlanResult, winner: Finalist, target: Mapping[str, str]) -> str:
    """A ScaledObject, a PrometheusRule and a PodMonitor; empty for pools of several roles, whose replicas do not follow
    one load, and where the server's metrics are not known.
    target: name, and unless it is a Deployment apiVersion and kind, of what is scaled"""
    full, rules = in_flight_when_full(winner), _rules_of(winner)
    if full is None or rules is None or not target or len(winner.candidate.layout.scenario.pools) > 1:
        return ""
    text = f"# {winner.label} at {result.rate:g} requests/s, chosen by `perfmodel plan`.\n"
    text += "# Needs KEDA and prometheus-operator.\n"
    text += f"# Set serverAddress to your Prometheus. A replica is full with {full:.3g} requests in flight.\n"
    name = target["name"]
    objects = (_scaled(result, rules, target, full), _rule(winner, rules, name), _monitor(rules, name))
    return text + "".join(f"---\n{dump_yaml(one)}" for one in objects)


def _rules_of(winner: Finalist) -> ServingRules | None:
    command = serving_command(winner.candidate.layout.scenario.pools[0].engine.described.description.name)
    return command.serving if command is not None else None


def _scaled(result: PlanResult, rules: ServingRules, target: Mapping[str, str], full: float) -> dict[str, Any]:
    name, known, given = target["name"], result.elasticity, result.scenario.cluster.autoscaling
    best = known.best if known is not None and given is not None and given.metric == "concurrency" else None
    threshold = full if best is None or best.target is None else best.target
    labels = "".join(f", {label}" for label in (rules.gauge_labels,) if label)
    gauges = (rules.metrics[f"num_requests_{state}"] for state in ("running", "waiting"))
    running = " + ".join(f'{gauge}{{pod=~"{name}-.*"{labels}}}' for gauge in gauges)
    trigger = {"serverAddress": _PROMETHEUS, "query": f"sum({running})", "threshold": f"{threshold:.3g}"}
    keda = (given.keda if given is not None else None) or KedaSpec(polling_interval=15.0)
    if keda.activation_threshold:
        trigger["activationThreshold"] = f"{keda.activation_threshold:g}"
    fewest, most = 1, _MOST * result.replicas
    if best is not None and given is not None:
        fewest, most = given.min_replicas if given.keda is not None else max(given.min_replicas, 1), given.max_replicas
    spec = {
        "scaleTargetRef": dict(target),
        "minReplicaCount": fewest,
        "maxReplicaCount": most,
        "pollingInterval": round(keda.polling_interval),
        "cooldownPeriod": round(keda.cooldown_period),
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": trigger}],
    }
    if given is not None and given.hpa is not None and "behavior" in given.hpa.model_fields_set:
        spec["advanced"] = {"horizontalPodAutoscalerConfig": {"behavior": as_written(given.hpa.behavior)}}
    return {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": name}, "spec": spec}


def _rule(winner: Finalist, rules: ServingRules, name: str) -> dict[str, Any]:
    group = {"name": f"{name}.predicted", "rules": list(_alerts(winner, rules, name))}
    metadata = {"name": f"{name}-predicted", "labels": {"app.kubernetes.io/name": name}}
    kind = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule"}
    return {**kind, "metadata": metadata, "spec": {"groups": [group]}}


def _monitor(rules: ServingRules, name: str) -> dict[str, Any]:
    """A PodMonitor. Of several nodes only the first has the port."""
    labels = {"app.kubernetes.io/name": name}
    endpoint = {"port": "http", "path": rules.metrics_path, "interval": "15s"}
    spec = {"selector": {"matchLabels": labels}, "podMetricsEndpoints": [endpoint]}
    kind = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor"}
    return {**kind, "metadata": {"name": name, "labels": labels}, "spec": spec}


def predicted_s(winner: Finalist, latency: str) -> tuple[float, float, float] | None:
    """(mean, low, high) of the mean latency at the planned rate, with its 80 % interval, in seconds; None where nothing
    was simulated."""
    mean_ms = winner.mean(f"mean_{latency}_ms")
    if mean_ms is None:
        return None
    draws = np.sort(winner.drawn.latencies[latency])  # some may be infinite, between which nothing is interpolated
    low, high = (draws[round(share * (len(draws) - 1))] for share in (_LOW, _HIGH))
    return mean_ms * 1e-3, mean_ms * 1e-3 * float(low), mean_ms * 1e-3 * float(high)


def _alerts(winner: Finalist, rules: ServingRules, name: str) -> Iterator[dict[str, Any]]:
    """Gaps between tokens only where no histogram has requests' times per output token."""
    has_tpot = VLLM_HISTOGRAMS["tpot"] in rules.metrics
    for latency, histogram in (VLLM_HISTOGRAMS if has_tpot else {**VLLM_HISTOGRAMS, **_GAPS}).items():
        predicted, metric = predicted_s(winner, latency), rules.metrics.get(histogram)
        if predicted is None or metric is None:
            continue
        mean_s, _, high_s = predicted
        pods = f'{{pod=~"{name}-.*"}}[10m]'
        means = f"sum(rate({metric}_sum{pods})) / sum(rate({metric}_count{pods}))"
        name_shown = latency.upper().replace("E2EL", "E2E")
        yield {
            "alert": f"{name_shown}BeyondPrediction",
            "expr": f"{means} > {high_s:.4g}",
            "for": "10m",
            "labels": {"severity": "warning"},
            "annotations": {
                "summary": f"mean {name_shown} {{{{ $value | humanizeDuration }}}}; predicted {mean_s:.4g} s, "
                f"nine of ten predictions are below {high_s:.4g} s"
            },
        }


def dashboard(result: PlanResult, winner: Finalist) -> str:
    """A dashboard of Grafana as JSON: the emulator's panels that the server has all metrics for, and the prediction;
    empty where the server's metrics are not known."""
    rules = _rules_of(winner)
    if rules is None:
        return ""
    board = json.loads(find_file("dashboards", "emulator", (".json",)).read_text(encoding="utf-8"))
    lines = _predicted_lines(winner)
    panels = []
    for panel in board["panels"]:
        queries = " ".join(target["expr"] for target in panel["targets"])
        names = {match[1] for match in _METRIC.finditer(queries)}
        if names <= rules.metrics.keys():
            if panel["type"] == "timeseries":
                panel["targets"] += next((lines[name] for name in sorted(names) if name in lines), [])
            panels.append(panel)
    board |= {"panels": panels, "uid": f"plan-{result.scenario.name}"[:40], "title": f"{winner.label}: plan and server"}
    board["description"] = f"Predicted at {result.rate:g} requests/s, beside the server's own metrics."
    text = json.dumps(board, indent=1, ensure_ascii=False).replace("instance, engine", f"instance, {rules.rank_label}")
    return (
        _METRIC.sub(lambda match: _called(match, rules), text.replace("{{engine}}", f"{{{{{rules.rank_label}}}}}"))
        + "\n"
    )


def _called(match: re.Match[str], rules: ServingRules) -> str:
    """What the server calls a metric of the template."""
    is_gauge = match[1].startswith("num_requests_") and match[3] == "{"
    labels = f"{json.dumps(rules.gauge_labels)[1:-1]}, " if is_gauge and rules.gauge_labels else ""
    return f"{rules.metrics[match[1]]}{match[2] or ''}{match[3]}{labels}"


def _predicted_lines(winner: Finalist) -> dict[str, list[dict[str, Any]]]:
    """vLLM's metric -> targets that are constant lines at what is predicted of it."""
    values = {metric: predicted_s(winner, latency) for latency, metric in {**VLLM_HISTOGRAMS, **_GAPS}.items()}
    if (e2e_s := values[VLLM_HISTOGRAMS["e2el"]]) is not None:  # Little's law: in flight at each replica
        rate = (winner.mean("request_throughput") or 0.0) / winner.replicas
        values["num_requests_running"] = (rate * e2e_s[0], rate * e2e_s[1], rate * e2e_s[2])
    ends = ("mean", "10 % below", "90 % below")
    lines = {
        metric: [_constant(f"predicted, {end}", value) for end, value in zip(ends, three, strict=True)]
        for metric, three in values.items()
        if three is not None
    }
    if (hits := winner.mean("prefix_cache_hit_rate")) is not None:
        lines["prefix_cache_hits_total"] = [_constant("predicted, mean", hits)]
    return lines


def _constant(legend: str, value: float) -> dict[str, Any]:
    return {"refId": legend, "expr": f"vector({value:.6g})", "legendFormat": legend, "range": True}
