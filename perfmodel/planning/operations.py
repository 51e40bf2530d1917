"""What keeps a chosen deployment right while it runs: replicas that follow the load, and alerts where it leaves what
was predicted.

A replica is full at the highest rate r that it serves within the SLO. Requests in flight are then, by Little's law
(1961), r times the mean time of a request, taken at the planned rate: it is longer at r, so replicas come early. KEDA
keeps the mean over replicas below it. Alerts fire where a mean over ten minutes exceeds the upper end of its 80 %
interval at the planned rate. Fields are those of KEDA's ScaledObject (keda.sh/docs/2.22, "ScaledObject specification"
and "Prometheus") and of prometheus-operator's PrometheusRule; metrics are vLLM's (docs.vllm.ai, "Production Metrics").
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from perfmodel.files.yaml_loader import dump_yaml
from perfmodel.planning.finalist import Finalist
from perfmodel.planning.result import PlanResult

_PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
_MOST = 4  # times as many replicas as planned
_HIGH = 0.9  # of the draws: the upper end of an 80 % interval
# Latency -> vLLM's histogram of it, after its prefix `vllm:`
VLLM_HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "e2el": "e2e_request_latency_seconds",
}


def in_flight_when_full(winner: Finalist) -> float | None:
    """Requests in flight of a replica at its highest rate within the SLO; None where nothing was simulated."""
    mean_s = winner.mean("mean_e2el_ms")
    return winner.rate / winner.replicas * mean_s * 1e-3 if mean_s and winner.rate else None


def operations_manifest(result: PlanResult, winner: Finalist, target: Mapping[str, str]) -> str:
    """A ScaledObject and a PrometheusRule; empty for pools of several roles, whose replicas do not follow one load.
    target: name, and unless it is a Deployment apiVersion and kind, of what is scaled"""
    full = in_flight_when_full(winner)
    if full is None or len(winner.candidate.layout.scenario.pools) > 1:
        return ""
    text = f"# {winner.label} at {result.rate:g} requests/s, chosen by `perfmodel plan`.\n"
    text += "# Needs KEDA and prometheus-operator.\n"
    text += f"# Set serverAddress to your Prometheus. A replica is full with {full:.3g} requests in flight.\n"
    return text + "".join(
        f"---\n{dump_yaml(one)}" for one in (_scaled(result, target, full), _rule(winner, target["name"]))
    )


def _scaled(result: PlanResult, target: Mapping[str, str], full: float) -> dict[str, Any]:
    name = target["name"]
    running = f'sum(vllm:num_requests_running{{pod=~"{name}-.*"}} + vllm:num_requests_waiting{{pod=~"{name}-.*"}})'
    trigger = {"serverAddress": _PROMETHEUS, "query": running, "threshold": f"{full:.3g}"}
    spec = {
        "scaleTargetRef": dict(target),
        "minReplicaCount": 1,
        "maxReplicaCount": _MOST * result.replicas,
        "pollingInterval": 15,
        "cooldownPeriod": 300,
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": trigger}],
    }
    return {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": name}, "spec": spec}


def _rule(winner: Finalist, name: str) -> dict[str, Any]:
    group = {"name": f"{name}.predicted", "rules": list(_alerts(winner, name))}
    metadata = {"name": f"{name}-predicted", "labels": {"app.kubernetes.io/name": name}}
    kind = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule"}
    return {**kind, "metadata": metadata, "spec": {"groups": [group]}}


def _alerts(winner: Finalist, name: str) -> Iterator[dict[str, Any]]:
    for latency, histogram in VLLM_HISTOGRAMS.items():
        mean_ms = winner.mean(f"mean_{latency}_ms")
        if mean_ms is None:
            continue
        high_s = mean_ms * 1e-3 * float(np.quantile(winner.drawn.latencies[latency], _HIGH))
        pods = f'{{pod=~"{name}-.*"}}[10m]'
        means = f"sum(rate(vllm:{histogram}_sum{pods})) / sum(rate(vllm:{histogram}_count{pods}))"
        name_shown = latency.upper().removesuffix("L")
        yield {
            "alert": f"{name_shown}BeyondPrediction",
            "expr": f"{means} > {high_s:.4g}",
            "for": "10m",
            "labels": {"severity": "warning"},
            "annotations": {
                "summary": f"mean {name_shown} {{{{ $value | humanizeDuration }}}}; predicted {mean_ms * 1e-3:.4g} s, "
                f"nine of ten predictions are below {high_s:.4g} s"
            },
        }
