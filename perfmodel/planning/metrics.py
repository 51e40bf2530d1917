"""Registry of metrics: key, label, unit, digits, and direction. Tables, plots, studies, what-ifs, plans and comparisons
take their labels from here. Keys of runs are those of vLLM's `bench serve`; a published figure's follow its basis."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from perfmodel.errors import did_you_mean

Basis = Literal["run", "step", "operator", "kernel", "memory"]

# dimension -> its unit in tables, and what a value is multiplied by to be in it
_SHOWN: Mapping[str, tuple[str, float]] = {
    "fraction": ("%", 100.0),
    "count": ("", 1.0),
    "requests/s": ("req/s", 1.0),
    "tokens/s": ("tok/s", 1.0),
    "bytes": ("B", 1.0),
    "times": ("x", 1.0),
    "us": ("µs", 1.0),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of an answer.

    key:           its name in JSON
    label:         as in the middle of a sentence
    dimension:     of its value, in the key's unit: s, ms, requests/s, tokens/s, fraction, count, USD ...
    is_better_low: less is better (times, bytes); sets the direction of speedups
    digits:        decimals in columns
    needs_context: needs a sequence length in tokens
    is_neutral:    neither direction is better"""

    key: str
    label: str
    dimension: str
    is_better_low: bool
    digits: int = 2
    needs_context: bool = False
    is_neutral: bool = False

    @property
    def unit(self) -> str:
        """`ms`, `tok/s`, `%`; nothing for counts."""
        return _SHOWN.get(self.dimension, (self.dimension, 1.0))[0]

    @property
    def scale(self) -> float:
        """Factor from a value to `unit`: 100 for fractions, shown in per cent."""
        return _SHOWN.get(self.dimension, (self.dimension, 1.0))[1]

    @property
    def name(self) -> str:
        """The label, capitalized."""
        return self.label[:1].upper() + self.label[1:]

    @property
    def title(self) -> str:
        """The name with its unit, for column and axis titles."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
# key in the summary -> (label, definition)
LATENCIES: Mapping[str, tuple[str, str]] = {
    "ttft": ("TTFT", "time to first token"),
    "tpot": ("TPOT", "time per output token after the first"),
    "itl": ("ITL", "inter-token latency"),
    "e2el": ("E2E latency", "end-to-end latency"),
    "max_itl": ("max ITL", "longest gap between two tokens of a request"),
    "reader_wait": ("reader stall", "time that a reader at the SLO's speed waits for tokens, in all"),
}


def _by_key(*metrics: Metric) -> dict[str, Metric]:
    return {metric.key: metric for metric in metrics}


_LATENCY_METRICS = _by_key(
    *(
        Metric(f"{statistic}_{name}_ms", f"{statistic} {label}", "ms", True)
        for statistic in STATISTICS
        for name, (label, _) in LATENCIES.items()
    )
)
# What a summary, its pools or its classes have beside what can be asked for by name.
_SUMMARY = _by_key(
    Metric("completed", "successful requests", "count", False, 0),
    Metric("failed", "failed requests", "count", True, 0),
    Metric("timed_out", "timed-out requests", "count", True, 0),
    Metric("rejected", "rejections at the gateway", "count", True, 0),
    Metric("retries", "retries", "count", True, 0),
    Metric("total_input_tokens", "total input tokens", "count", False, 0, is_neutral=True),
    Metric("total_output_tokens", "total generated tokens", "count", False, 0, is_neutral=True),
    Metric("gpu_hours", "device hours", "h", True, 3),
    Metric("num_steps", "steps", "count", False, 0, is_neutral=True),
    Metric("num_draft_tokens", "drafted tokens", "count", False, 0, is_neutral=True),
    Metric("busy_share", "busy share", "fraction", False, 0, is_neutral=True),
    Metric("replicas_peak", "peak number of replicas", "count", True, 0),
    Metric("failures", "failures", "count", True, 0),
    Metric("usd_per_hour", "price per hour", "USD", True),
)
_RUN = {key: metric for key, metric in _LATENCY_METRICS.items() if not key.startswith("std_")} | _by_key(
    Metric("duration", "duration", "s", True),
    Metric("request_throughput", "request throughput", "requests/s", False),
    Metric("request_goodput", "request goodput", "requests/s", False),
    Metric("slo_attainment", "SLO attainment", "fraction", False, 1),
    Metric("output_throughput", "output token throughput", "tokens/s", False, 1),
    Metric("total_token_throughput", "total token throughput", "tokens/s", False, 1),
    Metric("output_throughput_per_gpu", "output token throughput per device", "tokens/s", False, 1),
    Metric("total_token_throughput_per_gpu", "total token throughput per device", "tokens/s", False, 1),
    Metric("mean_num_devices", "mean number of devices", "count", True),
    Metric("tail_s", "drain time", "s", True),
    Metric("tail_share", "drain time's share of the job", "fraction", True, 1),
    Metric("iteration_s", "time of an iteration", "s", True),
    Metric("rollout_s", "time of an iteration's rollout", "s", True),
    Metric("slowest_tenth_share", "share of the rollout for the slowest tenth of the answers", "fraction", True, 1),
    Metric("idle_share", "share of the rollout in which engines have no request", "fraction", True, 1),
    Metric("update_share", "weight update's share of an iteration", "fraction", True, 1),
    Metric("max_concurrency", "most users at once within the SLO", "count", False, 0),
    Metric("max_request_rate", "maximum request rate within the SLO", "requests/s", False),
    Metric("mean_batch", "mean batch size", "count", False),
    Metric("mfu", "model FLOP utilisation (MFU)", "fraction", False, 1),
    Metric("mbu", "memory bandwidth utilisation (MBU)", "fraction", False, 1),
    Metric("pipeline_bubble_share", "pipeline bubbles", "fraction", True, 1),
    Metric("kv_cache_usage_peak", "peak KV cache usage", "fraction", True, 1),
    Metric("kv_cache_waste", "KV fragmentation", "fraction", True, 1),
    Metric("kv_cache_filled", "filled share of allocated KV", "fraction", False, 1),
    Metric("prefix_cache_hit_rate", "prefix cache hit rate", "fraction", False, 1),
    Metric("acceptance_rate", "acceptance rate", "fraction", False, 1),
    Metric("mean_acceptance_length", "mean acceptance length", "count", False),
    Metric("preemptions", "preemptions", "count", True, 0),
    Metric("usd_per_million_output_tokens", "total cost per million output tokens", "USD", True, 3),
    Metric("usd_total", "total cost", "USD", True, 4),
    Metric("usd_per_million_tokens", "total cost per million tokens", "USD", True, 3),
    Metric("usd_per_million_input_tokens_split", "prefill cost per million input tokens", "USD", True, 3),
    Metric("usd_per_million_cached_input_tokens_split", "cost per million cached input tokens", "USD", True, 4),
    Metric("usd_per_million_computed_input_tokens_split", "cost per million computed input tokens", "USD", True, 3),
    Metric("usd_per_million_output_tokens_split", "decode cost per million output tokens", "USD", True, 3),
    Metric("rent_usd_per_hour", "rented devices per hour", "USD", True),
    Metric("own_usd_per_hour", "owned devices per hour at this traffic", "USD", True),
    Metric("own_idle_usd_per_hour", "owned devices per idle hour", "USD", True),
    Metric("api_usd_per_hour", "the same tokens from the API per hour", "USD", True),
    Metric("own_usd_per_million_tokens", "owned devices per million tokens", "USD", True, 3),
    Metric("api_usd_per_million_tokens", "API per million tokens", "USD", True, 3),
    Metric("rent_api_break_even_share", "share of hours from which renting beats the API", "fraction", True, 1),
    Metric("rent_api_break_even_req_s", "request rate from which renting beats the API", "requests/s", True),
    Metric("own_rent_break_even_share", "share of hours from which owning beats renting", "fraction", True, 1),
    Metric("own_api_break_even_share", "share of hours from which owning beats the API", "fraction", True, 1),
    Metric("energy_j", "energy", "J", True, 0),
    Metric("energy_wh", "energy in watt-hours", "Wh", True, 1),
    Metric("mean_power_w", "mean power per device", "W", True, 0),
    Metric("joules_per_output_token", "energy per output token", "J", True, 3),
    Metric("site_joules_per_output_token", "energy per output token with servers and cooling", "J", True, 3),
    Metric("gco2_per_million_output_tokens", "CO2 per million output tokens", "g", True, 1),
    Metric("gco2_per_million_tokens", "CO2 per million tokens", "g", True, 1),
)
# Renting against owning and an API; a run has them where `price.owned` or `price.api` is given.
ALTERNATIVES = (
    *("rent_usd_per_hour", "own_usd_per_hour", "own_idle_usd_per_hour", "api_usd_per_hour"),
    *("own_usd_per_million_tokens", "api_usd_per_million_tokens"),
    *("rent_api_break_even_share", "rent_api_break_even_req_s"),
    *("own_rent_break_even_share", "own_api_break_even_share"),
)
_STEP = _by_key(
    Metric("step_ms", "step time", "ms", True, 3),
    Metric("device_ms", "device time per step", "ms", True, 3),
    Metric("roofline_ms", "roofline time per step", "ms", True, 3),
    Metric("tokens_per_s", "token throughput of a step", "tokens/s", False, 1),
    Metric("tokens_per_s_per_user", "token throughput per user", "tokens/s", False, 1),
    Metric("tflops", "achieved compute", "TFLOP/s", False),
    Metric("gb_per_s", "achieved bandwidth", "GB/s", False),
    _RUN["mfu"],
    _RUN["mbu"],
)
_KERNEL = _by_key(
    Metric("time_us", "kernel time", "us", True),
    Metric("roofline_us", "roofline time of the kernel", "us", True),
    _STEP["tflops"],
    _STEP["gb_per_s"],
)
_OPERATOR = _KERNEL | _by_key(
    Metric("layer_time_us", "operator time per layer", "us", True),
    Metric("share", "share of the step", "fraction", True, 1),
)
_MEMORY = _by_key(
    Metric("kv_bytes_per_token", "KV cache per token", "bytes", True, 0),
    Metric("kv_gb", "KV cache", "GB", True, needs_context=True),
    Metric("weight_gb", "weights", "GB", True),
    Metric("kv_blocks", "KV blocks", "count", False, 0),
    Metric("max_tokens", "KV cache capacity in tokens", "count", False, 0),
    Metric("max_batch", "largest batch that fits", "count", False, 0, needs_context=True),
    Metric("max_context", "longest context that fits", "count", False, 0),
)
_METRICS: Mapping[Basis, Mapping[str, Metric]] = {
    "run": _RUN,
    "step": _STEP,
    "operator": _OPERATOR,
    "kernel": _KERNEL,
    "memory": _MEMORY,
}
# What predictions are compared with measurements by, in `perfmodel validate`.
_COMPARED = _by_key(
    Metric("latency", "kernel time", "s", True),
    Metric("kernel", "kernel time", "s", True),
    Metric("step", "step time", "s", True),
    Metric("serving_step", "step time while serving", "s", True),
    *(Metric(name, label, "s", True) for name, (label, _) in LATENCIES.items()),
)
# What plans say of a finalist beside its runs, and steps of themselves.
_PLAN = _by_key(
    Metric("gpus", "devices", "count", True, 0),
    Metric("num_devices", "devices", "count", True, 0),
    Metric("replicas", "replicas", "count", True, 0),
    Metric("max_rate", "maximum request rate within the SLO", "requests/s", False),
    Metric("screened_rate", "maximum request rate in closed form", "requests/s", False),
    Metric("rate_per_gpu", "maximum request rate per device", "requests/s", False),
    Metric("attained", "SLO attainment", "fraction", False, 1),
    Metric("tightness", "latency over its limit", "times", True),
    Metric("screened_tightness", "latency over its limit in closed form", "times", True),
    Metric("duration_s", "duration", "s", True),
    Metric("device_s", "device time", "s", True),
)
_EVERYTHING = _PLAN | _SUMMARY | _LATENCY_METRICS | _RUN | _STEP | _OPERATOR | _MEMORY
# Names that mean the same.
ALIASES: Mapping[str, str] = {
    **{f"{name}_ms": f"mean_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el")},
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


def metric_of(key: str) -> Metric:
    """The metric called `key` in any answer; unknown names (a measured quality) stand for themselves. `validate` puts
    the statistic last: `e2el_mean` is `mean_e2el_ms`."""
    name, _, statistic = key.rpartition("_")
    metric = _EVERYTHING.get(key) or _COMPARED.get(key) or _EVERYTHING.get(f"{statistic}_{name}_ms")
    return metric or Metric(key, key.replace("_", " "), "", False, is_neutral=True)


def metrics_by_basis() -> Mapping[str, tuple[Metric, ...]]:
    """All metrics in table order, by basis, `summary` or `plan`. Those of the last two cannot be requested by name."""
    tables = (*_METRICS.items(), ("summary", _SUMMARY), ("plan", _PLAN))
    return {basis: tuple(table.values()) for basis, table in tables}


def needs_no_run(metric: str) -> bool:
    """Whether the metric is one of memory, which needs no run."""
    return ALIASES.get(metric, metric) in _MEMORY


def metric_named(name: str, basis: Basis) -> Metric:
    """The metric of `basis` called `name`. Raises ValueError with the known names, or with what is missing for it."""
    known = _METRICS[basis]
    if name in known:
        return known[name]
    for other, metrics in _METRICS.items():
        if name in metrics:
            raise ValueError(f"metric: {name} is of {_OF[other]}, this figure is of {_OF[basis]}; {_WAY_OUT[other]}")
    near = did_you_mean(name, {metric for metrics in _METRICS.values() for metric in metrics})
    raise ValueError(f"metric: got {name!r}; of {_OF[basis]} expected {', '.join(known)}{near and '.' + near}")


def basis_by_name(name: str) -> Basis:
    """Basis of a metric by its name: run, else step, else memory. Raises ValueError for an unknown name."""
    for basis in ("run", "step", "memory"):
        if name in _METRICS[basis]:
            return basis
    known = list(dict.fromkeys([*_RUN, *_STEP, *_MEMORY]))
    near = did_you_mean(name, known)
    raise ValueError(f"metrics: got {name!r}; expected {', '.join(known)}{near and '.' + near}")


def study_metric(name: str) -> Metric:
    """A metric of runs, steps or memory by its name. Raises ValueError for an unknown one."""
    return _METRICS[basis_by_name(name)][name]
