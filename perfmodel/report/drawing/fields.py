"""What each number of a run's summary is called, its unit and its format; the keys are vLLM's `bench serve` names."""

__all__ = [
    "GROUPS",
    "LATENCIES",
    "STATISTICS",
    "Field",
    "format_number",
    "format_si",
    "latencies_of",
    "latency",
    "prediction_interval",
]

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

MISSING = "–"


@dataclass(frozen=True, slots=True)
class Field:
    """One row of a summary. `scale` multiplies the value for display (100 for fractions shown in per cent); one that
    `is_rare` is shown only if it is not 0."""

    key: str
    label: str
    unit: str = ""
    digits: int = 2
    scale: float = 1.0
    is_rare: bool = False

    def is_shown(self, summary: Mapping[str, Any]) -> bool:
        """Whether `summary` has anything to say of it."""
        value = summary.get(self.key)
        return value is not None and not (self.is_rare and value == 0)

    def show(self, summary: Mapping[str, Any]) -> str:
        """The value in `summary` as text, with its interval if there is one, without its unit; a dash for no value."""
        value, ends = summary.get(self.key), (summary.get("interval") or {}).get(self.key)
        text = format_number(value * self.scale if _is_number(value) else None, self.digits)
        if not ends:
            return text
        return f"{text} ({' to '.join(format_number(end * self.scale, self.digits) for end in ends)})"


GROUPS: tuple[tuple[str, tuple[Field, ...]], ...] = (
    (
        "Requests",
        (
            Field("completed", "Successful requests", digits=0),
            Field("failed", "Failed requests", digits=0),
            Field("timed_out", "Timed out", digits=0, is_rare=True),
            Field("rejected", "Refused at the gateway, tries", digits=0, is_rare=True),
            Field("retries", "Retries", digits=0, is_rare=True),
            Field("duration", "Duration", "s"),
            Field("total_input_tokens", "Total input tokens", digits=0),
            Field("total_output_tokens", "Total generated tokens", digits=0),
        ),
    ),
    (
        "Throughput",
        (
            Field("request_throughput", "Request throughput", "req/s"),
            Field("request_goodput", "Request goodput (within the SLO)", "req/s"),
            Field("slo_attainment", "Requests within the SLO", "%", 1, 100.0),
            Field("output_throughput", "Output token throughput", "tok/s", 1),
            Field("total_token_throughput", "Total token throughput", "tok/s", 1),
            Field("output_throughput_per_gpu", "Output tokens per second and device", "tok/s", 1),
        ),
    ),
    (
        "Offline job",
        (
            Field("tail_s", "Tail: nobody waits for an engine any more", "s"),
            Field("tail_share", "  of the job's time", "%", 1, 100.0),
        ),
    ),
    (
        "Efficiency",
        (
            Field("mfu", "Model FLOP utilisation (MFU)", "%", 1, 100.0),
            Field("mbu", "Memory bandwidth utilisation (MBU)", "%", 1, 100.0),
            Field("kv_cache_usage_peak", "Peak KV cache usage", "%", 1, 100.0),
            Field("pipeline_bubble_share", "Pipeline bubbles", "%", 1, 100.0),
            Field("kv_cache_waste", "Empty share of held KV", "%", 1, 100.0),
            Field("prefix_cache_hit_rate", "Prefix cache hit rate", "%", 1, 100.0),
            Field("acceptance_rate", "Drafted tokens that were right", "%", 1, 100.0),
            Field("mean_acceptance_length", "Tokens of a draft, with the model's own", "", 2),
            Field("preemptions", "Preemptions", digits=0),
        ),
    ),
    (
        "Cost and energy",
        (
            Field("gpu_hours", "Device hours", "h", 3),
            Field("usd_total", "Bill", "USD", 4),
            Field("usd_per_million_tokens", "Cost per million tokens", "USD", 3),
            Field("usd_per_million_output_tokens", "Cost per million output tokens, all of it", "USD", 3),
            Field("usd_per_million_input_tokens_split", "  of a split bill, per million input tokens", "USD", 3),
            Field("usd_per_million_output_tokens_split", "  and per million output tokens", "USD", 3),
            Field("energy_j", "Energy", "J", 0),
            Field("energy_wh", "Energy", "Wh", 1),
            Field("mean_power_w", "Mean power of a device", "W", 0),
            Field("joules_per_output_token", "Energy per output token", "J", 3),
        ),
    ),
)

# (key in the summary, short name, full name)
LATENCIES = (
    ("ttft", "TTFT", "time to first token"),
    ("tpot", "TPOT", "time per output token after the first"),
    ("itl", "ITL", "inter-token latency"),
    ("e2el", "E2E", "end-to-end latency"),
)
_TOKEN_LATENCIES = (
    ("max_itl", "Longest gap", "longest time between two tokens of a request"),
    ("reader_wait", "Reader waits", "how long a reader of the SLO's speed waits for tokens, in all"),
)
STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")


def latencies_of(summary: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """`LATENCIES`, and those that `summary` has because a limit asks for them."""
    return LATENCIES + tuple(row for row in _TOKEN_LATENCIES if f"mean_{row[0]}_ms" in summary)


def latency(summary: Mapping[str, Any], statistic: str, metric: str) -> float | None:
    """One latency in milliseconds, or None if the run has none (a TPOT of one-token answers)."""
    value = summary.get(f"{statistic}_{metric}_ms")
    return float(value) if _is_number(value) else None


def prediction_interval(summary: Mapping[str, Any], metric: str) -> tuple[float, float] | None:
    """The 80 % prediction interval of the metric's mean in ms, if the calibration gave one."""
    intervals = summary.get("interval") or {}
    found = intervals.get(f"mean_{metric}_ms") or intervals.get(metric)
    if found is None or len(found) != 2 or not all(map(_is_number, found)):
        return None
    return float(found[0]), float(found[1])


def format_number(value: float | None, digits: int = 2) -> str:
    """A number with thousands separators and a fixed number of digits; a dash for None, nan and infinity."""
    return f"{value:,.{digits}f}" if _is_number(value) else MISSING


def format_si(value: float | None, unit: str, digits: int = 3) -> str:
    """`value` with an SI prefix and `digits` significant digits: 2.04 TB/s, 15.3 us, 104 GFLOP."""
    if not _is_number(value):
        return MISSING
    if value == 0:
        return f"0 {unit}".strip()
    exponent = min(max(3 * math.floor(math.log10(abs(value)) / 3 + 1e-12), -9), 18)
    prefix = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}[exponent]
    scaled = value / 10.0**exponent
    decimals = max(digits - 1 - math.floor(math.log10(abs(scaled)) + 1e-12), 0)
    return f"{scaled:.{decimals}f} {prefix}{unit}".strip()


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
