"""Registry of metrics (metrics.csv): key, label, unit, digits, and direction. Tables, plots, studies, what-ifs, plans
and comparisons take their labels from here. Keys of runs are those of vLLM's `bench serve`; a published figure's follow
its basis."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

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


_LATENCY_METRICS = {
    f"{statistic}_{name}_ms": Metric(f"{statistic}_{name}_ms", f"{statistic} {label}", "ms", True)
    for statistic in STATISTICS
    for name, (label, _) in LATENCIES.items()
}


def _read_tables() -> dict[str, dict[str, Metric]]:
    """What each row of metrics.csv is of: a basis; `summary`: what a summary, its pools or its classes have beside what
    can be asked for by name; `compared`: what predictions are compared with measurements by, in `perfmodel validate`;
    `plan`: what plans say of a finalist beside its runs, and steps of themselves. A row without a label is that of the
    same key before."""
    tables: dict[str, dict[str, Metric]] = {}
    known: dict[str, Metric] = {}
    with Path(__file__).with_name("metrics.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key, better = row["key"], row["better"]
            if row["label"]:
                more = {"needs_context": bool(row["needs_context"]), "is_neutral": not better}
                known[key] = Metric(key, row["label"], row["dimension"], better == "low", int(row["digits"]), **more)
            tables.setdefault(row["of"], {})[key] = known[key]
    return tables


_TABLES = _read_tables()
_TABLES["run"] = {k: v for k, v in _LATENCY_METRICS.items() if not k.startswith("std_")} | _TABLES["run"]
_SUMMARY, _RUN, _STEP, _MEMORY, _PLAN = (_TABLES[of] for of in ("summary", "run", "step", "memory", "plan"))
# Renting against owning and an API; a run has them where `price.owned` or `price.api` is given.
ALTERNATIVES = (
    *("rent_usd_per_hour", "own_usd_per_hour", "own_idle_usd_per_hour", "api_usd_per_hour"),
    *("own_usd_per_million_tokens", "api_usd_per_million_tokens"),
    *("rent_api_break_even_share", "rent_api_break_even_req_s"),
    *("own_rent_break_even_share", "own_api_break_even_share"),
)
_METRICS: Mapping[Basis, Mapping[str, Metric]] = {basis: _TABLES[basis] for basis in get_args(Basis)}
_COMPARED = _TABLES["compared"] | {name: Metric(name, label, "s", True) for name, (label, _) in LATENCIES.items()}
_EVERYTHING = _PLAN | _SUMMARY | _LATENCY_METRICS | _RUN | _STEP | _TABLES["operator"] | _MEMORY
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
