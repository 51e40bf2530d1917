"""Which metrics a published figure can have: of a run those of the result JSON, of a step, a kernel or memory a few."""

__all__ = ["ALIASES", "RATIOS", "Basis", "Metric", "basis_by_name", "metric_named", "needs_no_run", "study_metric"]

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from perfmodel.errors import did_you_mean

Basis = Literal["run", "step", "operator", "kernel", "memory"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What a figure measures.

    dimension:     of its value, in the unit that the name names
    is_better_low: whether less is better (times, bytes), which tells which way round a speedup is
    needs_context: whether it asks for the tokens of a sequence
    """

    dimension: str
    is_better_low: bool
    needs_context: bool = False


_LATENCIES = {
    f"{statistic}_{name}_ms": Metric("ms", True)
    for statistic in ("mean", "median", "p90", "p95", "p99")
    for name in ("ttft", "tpot", "itl", "e2el", "max_itl", "reader_wait")
}
_RUN = {
    **_LATENCIES,
    "duration": Metric("s", True),
    "request_throughput": Metric("requests/s", False),
    "request_goodput": Metric("requests/s", False),
    "slo_attainment": Metric("fraction", False),
    "output_throughput": Metric("tokens/s", False),
    "total_token_throughput": Metric("tokens/s", False),
    "output_throughput_per_gpu": Metric("tokens/s", False),
    "total_token_throughput_per_gpu": Metric("tokens/s", False),
    "mean_num_devices": Metric("count", True),
    "tail_s": Metric("s", True),
    "tail_share": Metric("fraction", True),
    "max_request_rate": Metric("requests/s", False),
    "mean_batch": Metric("count", False),
    "mfu": Metric("fraction", False),
    "mbu": Metric("fraction", False),
    "pipeline_bubble_share": Metric("fraction", True),
    "kv_cache_usage_peak": Metric("fraction", True),
    "kv_cache_waste": Metric("fraction", True),
    "kv_cache_filled": Metric("fraction", False),
    "prefix_cache_hit_rate": Metric("fraction", False),
    "acceptance_rate": Metric("fraction", False),
    "mean_acceptance_length": Metric("count", False),
    "preemptions": Metric("count", True),
    "usd_per_million_output_tokens": Metric("USD", True),
    "usd_total": Metric("USD", True),
    "usd_per_million_tokens": Metric("USD", True),
    "usd_per_million_input_tokens_split": Metric("USD", True),
    "usd_per_million_output_tokens_split": Metric("USD", True),
    "energy_j": Metric("J", True),
    "energy_wh": Metric("Wh", True),
    "mean_power_w": Metric("W", True),
    "joules_per_output_token": Metric("J", True),
}
_STEP = {
    "step_ms": Metric("ms", True),
    "device_ms": Metric("ms", True),
    "roofline_ms": Metric("ms", True),
    "tokens_per_s": Metric("tokens/s", False),
    "tokens_per_s_per_user": Metric("tokens/s", False),
    "tflops": Metric("TFLOP/s", False),
    "gb_per_s": Metric("GB/s", False),
    "mfu": Metric("fraction", False),
    "mbu": Metric("fraction", False),
}
_KERNEL = {
    "time_us": Metric("us", True),
    "roofline_us": Metric("us", True),
    "tflops": Metric("TFLOP/s", False),
    "gb_per_s": Metric("GB/s", False),
}
_OPERATOR = _KERNEL | {"layer_time_us": Metric("us", True), "share": Metric("fraction", True)}
_MEMORY = {
    "kv_bytes_per_token": Metric("bytes", True),
    "kv_gb": Metric("GB", True, needs_context=True),
    "weight_gb": Metric("GB", True),
    "kv_blocks": Metric("count", False),
    "max_tokens": Metric("count", False),
    "max_batch": Metric("count", False, needs_context=True),
    "max_context": Metric("count", False),
}
_METRICS: Mapping[Basis, Mapping[str, Metric]] = {
    "run": _RUN,
    "step": _STEP,
    "operator": _OPERATOR,
    "kernel": _KERNEL,
    "memory": _MEMORY,
}
# Names that mean the same.
ALIASES: Mapping[str, str] = {
    "ttft_ms": "mean_ttft_ms",
    "tpot_ms": "mean_tpot_ms",
    "itl_ms": "mean_itl_ms",
    "e2el_ms": "mean_e2el_ms",
    "latency_ms": "mean_e2el_ms",
    "throughput": "output_throughput",
    "step_time_ms": "step_ms",
    "latency_us": "time_us",
}
# How a figure is relative to its baseline -> the dimension of its value.
RATIOS: Mapping[str, str] = {
    "speedup": "times",
    "gain": "fraction",
    "saving": "fraction",
    "scenario_over_baseline": "times",
    "baseline_over_scenario": "times",
}
_OF = {
    "run": "a whole run",
    "step": "a step",
    "operator": "an operator of a step",
    "kernel": "a kernel",
    "memory": "memory",
}
_WAY_OUT: Mapping[str, str] = {
    "step": "give `step: {batch: 1, context: 1024}` or `step: {prefill: 512}`",
    "operator": "give `step` and `operator`",
    "kernel": "give `kernel`, or `step` and `operator`",
    "run": "leave step, operator and kernel out",
}


def needs_no_run(metric: str) -> bool:
    """Whether the metric is one of memory, for which nothing is served."""
    return ALIASES.get(metric, metric) in _MEMORY


def metric_named(name: str, basis: Basis) -> Metric:
    """The metric of `basis` by its name. Raises ValueError with the names that there are, or what is missing for it."""
    known = _METRICS[basis]
    if name in known:
        return known[name]
    for other, metrics in _METRICS.items():
        if name in metrics:
            raise ValueError(f"metric: {name} is of {_OF[other]}, this figure is of {_OF[basis]}; {_WAY_OUT[other]}")
    everything = {metric for metrics in _METRICS.values() for metric in metrics}
    near = did_you_mean(name, everything)
    raise ValueError(f"metric: found {name!r}, of {_OF[basis]} allowed {', '.join(known)}{near and '.' + near}")


def basis_by_name(name: str) -> Basis:
    """What a metric is of, where nothing but its name tells: a run's, else a step's, else memory's.

    Raises ValueError for a name that is none of these.
    """
    for basis in ("run", "step", "memory"):
        if name in _METRICS[basis]:
            return basis
    known = [*_RUN, *(each for each in _STEP if each not in _RUN), *_MEMORY]
    near = did_you_mean(name, known)
    raise ValueError(f"metrics: found {name!r}, allowed {', '.join(known)}{near and '.' + near}")


def study_metric(name: str) -> Metric:
    """A metric of runs, steps or memory by its name alone. Raises ValueError for an unknown one."""
    return _METRICS[basis_by_name(name)][name]
