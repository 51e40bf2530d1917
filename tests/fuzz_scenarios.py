"""What a case of the fuzzer is, and the good scenarios that cases are made of."""

__all__ = ["DENSE", "SCENARIOS", "CaseMakers", "FuzzCase", "as_yaml", "cut_short"]

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml
from hypothesis import strategies as st

from perfmodel.files.yaml_loader import dump_yaml

_MAX_REQUESTS, _REFUSED_REQUESTS = 100, 10**8
_FEW = {"distribution": "lognormal", "mean": 100, "p99": 500}
_ROUTINE = {"arrivals": {"rate": 4.0}, "num_requests": 12, "input_tokens": _FEW, "output_tokens": {**_FEW, "max": 64}}
DENSE: dict[str, Any] = {"model": "llama-3.1-8b", "hardware": "h100-sxm-80gb", "traffic": _ROUTINE, "seed": 0}
# One of each kind of deployment and traffic that has code of its own: what differs from the above.
_OTHERS = """
- {}
- {traffic: {arrivals: {process: closed_loop, concurrency: 4, think_time_s: 0.1}}}
- {traffic: {arrivals: {process: burst, order: longest_prompt_first}}}
- {traffic: {arrivals: {process: gamma, cv: 2.0, stages: [{rate: 2, duration_s: 9}]}}}
- {traffic: {prefix: {num_groups: 2, shared_tokens: 64, num_prompts_per_group: 3}}}
- {engine: {tensor_parallel_size: 2, pipeline_parallel_size: 2, max_num_seqs: 8, kv_cache_dtype: fp8}}
- {engine: {speculative_config: {method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.6}}}}
- {engine: {batching: static, max_num_seqs: 4}, slo: {ttft_ms: 500, max_itl_ms: 50}}
- {model_changes: {prune: {kind: unstructured, fraction: 0.5}}, overheads: {kernels: 2.0}}
- {model: mixtral-8x7b, engine: {data_parallel_size: 4, enable_expert_parallel: true}}
- {model: deepseek-v2-lite, routing: {distribution: power_law, alpha: 1.0}}
- {model: nemotron-3-nano-30b-a3b, engine: {tensor_parallel_size: 4}}
- {cluster: {replicas: 3, router: least_kv, gateway: {max_outstanding: 4, timeout_s: 9.0}}}
- {cluster: {pools: [{role: prefill}, {role: decode, replicas: 2}], kv_transfer: {shared: true}}}
- cluster:
    autoscaling: {target: 2, max_replicas: 3, interval_s: 1.0, cold_start_s: 2.0}
    failures: {mtbf_s: 60.0, repair_s: 1.0, start_s: 1.0}
- {prompt_compression: {ratio: 0.5}, price: {usd_per_gpu_hour: 2.0}}
"""
SCENARIOS: tuple[dict[str, Any], ...] = tuple(
    DENSE | other | {"traffic": _ROUTINE | other.get("traffic", {})} for other in yaml.safe_load(_OTHERS)
)


@dataclass(frozen=True)
class FuzzCase:
    """kind: of input; args: after `perfmodel`; files: name -> content, beside which the command runs"""

    kind: str
    args: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)


# kind -> (strategy of its cases, weight)
CaseMakers = dict[str, tuple[Callable[[], st.SearchStrategy[FuzzCase]], int]]


def cut_short(data: dict[str, Any]) -> dict[str, Any]:
    """Without work that takes hours and is only long."""
    traffic = data.get("traffic")
    if isinstance(traffic, dict):
        count = traffic.get("num_requests", _MAX_REQUESTS)
        if isinstance(count, int | float) and _MAX_REQUESTS < count <= _REFUSED_REQUESTS:
            traffic["num_requests"] = _MAX_REQUESTS
        elif traffic.get("duration_s") is not None or "stages" in str(traffic):
            traffic.setdefault("num_requests", _MAX_REQUESTS)
    return data


def as_yaml(data: Any) -> bytes:
    """The text of a file; as JSON where YAML has no form for it."""
    try:
        return dump_yaml(data).encode()
    except (yaml.YAMLError, UnicodeError):
        return json.dumps(data).encode()
