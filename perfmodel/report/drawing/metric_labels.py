"""What metrics are called on axes and in tables, with their units."""

__all__ = ["capital", "metric_label", "metric_unit"]

from perfmodel.plan.metrics import basis_by_name, study_metric

_WORDS = {
    "duration": "time of the whole run",
    "request_throughput": "requests per second",
    "request_goodput": "requests per second within the SLO",
    "slo_attainment": "share of requests within the SLO",
    "output_throughput": "output throughput",
    "total_token_throughput": "token throughput",
    "output_throughput_per_gpu": "output throughput per device",
    "max_request_rate": "highest rate within the SLO",
    "total_token_throughput_per_gpu": "token throughput per device",
    "mean_num_devices": "devices, on the average of the run",
    "tail_s": "tail of the job, when places stay empty",
    "tail_share": "tail's share of the job",
    "mean_batch": "mean batch",
    "usd_per_million_output_tokens": "cost per million output tokens",
    "usd_total": "bill",
    "usd_per_million_tokens": "cost per million tokens",
    "usd_per_million_input_tokens_split": "cost per million input tokens of a split bill",
    "usd_per_million_output_tokens_split": "cost per million output tokens of a split bill",
    "energy_j": "energy",
    "energy_wh": "energy",
    "mean_power_w": "mean power of a device",
    "joules_per_output_token": "energy per output token",
    "step_ms": "time of a step",
    "tokens_per_s": "tokens per second of a step",
    "weight_gb": "weights",
    "kv_gb": "KV cache",
    "kv_bytes_per_token": "KV per token",
    "max_batch": "largest batch that fits",
    "max_tokens": "tokens that fit",
    "max_context": "longest context that fits",
    "pipeline_bubble_share": "share of the devices' time in pipeline bubbles",
    "kv_cache_usage_peak": "peak use of the KV cache",
    "prefix_cache_hit_rate": "prefix cache hit rate",
    "acceptance_rate": "share of drafted tokens that were right",
    "mean_acceptance_length": "tokens of a draft, with the model's own",
}
_SHORT = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "ITL",
    "e2el": "end-to-end latency",
    "max_itl": "longest gap between tokens",
    "reader_wait": "wait of a reader for tokens",
}
_UNITS = {"fraction": "", "count": "", "requests/s": "req/s", "bytes": "B", "times": "x"}


def metric_label(name: str) -> str:
    """`mean time to first token`; a measured quality keeps its name."""
    statistic, _, rest = name.partition("_")
    if rest.removesuffix("_ms") in _SHORT:
        return f"{statistic} {_SHORT[rest.removesuffix('_ms')]}"
    return _WORDS.get(name, name.replace("_", " "))


def metric_unit(name: str) -> str:
    """`ms`, `tokens/s`; nothing for counts and fractions, and for names that are no metric of ours."""
    try:
        basis_by_name(name)
    except ValueError:
        return ""
    dimension = study_metric(name).dimension
    return _UNITS.get(dimension, dimension)


def capital(label: str) -> str:
    """As at the beginning of a sentence; abbreviations stay."""
    return label[:1].upper() + label[1:]
