"""Stage two of a plan: finalists on the simulator, each point kept in the store as soon as it is known.

A trial is the search for one finalist's highest rate under one seed, by bisection over a fixed lattice of rates (2 %
apart), so that plans that begin elsewhere ask for the same points. Equal seeds give all finalists the same requests
(common random numbers), so that their differences scatter less than their rates do. A check is one run of the whole
deployment at the rate that is wanted.
"""

__all__ = ["METRICS", "Check", "Checked", "Trial", "Tried", "check", "highest_on_lattice", "lattice", "try_rates"]

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from pathlib import Path

from perfmodel.plan.candidates import Base, at_rate
from perfmodel.plan.points import Point, Record
from perfmodel.plan.store import Store, remembered
from perfmodel.specs.study_file import as_overrides

METRICS = (
    "request_goodput",
    "request_throughput",
    "output_throughput",
    *(f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "e2el") for statistic in ("median", "p90", "p95", "p99")),
    "usd_per_million_output_tokens",
    "usd_per_million_input_tokens_split",
    "usd_per_million_output_tokens_split",
    "joules_per_output_token",
    "kv_cache_usage_peak",
    "preemptions",
    "mfu",
    "mbu",
)
_RATIO = 1.02  # between rates of the lattice
_FIRST_STRIDE = 4
_MOST_STRIDES = 6  # doublings of the stride: down to a ten-thousandth of the first rate


@dataclass(frozen=True)
class Trial:
    """A deployment under one seed.

    choices: overrides of the base scenario
    start:   rate at which to begin
    store:   the store's file
    """

    base: Base
    choices: tuple[str, ...]
    seed: int
    start: float
    attainment: float
    num_requests: int
    store: str


@dataclass(frozen=True)
class Tried:
    """rate: requests per second, None where no rate is served. num_points: looked at."""

    rate: float | None
    num_points: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Check:
    """A whole deployment at one rate, under one seed."""

    base: Base
    choices: tuple[str, ...]
    seed: int
    rate: float
    num_requests: int
    store: str


@dataclass(frozen=True)
class Checked:
    """record: METRICS at the rate"""

    record: Record

    @property
    def attained(self) -> float:
        """The share of requests that met the SLO."""
        return _attained(self.record)


def try_rates(trial: Trial) -> Tried:
    """The highest rate of a trial. Raises SpecError for choices that are wrong."""
    store = Store(Path(trial.store))
    problems: list[str] = []
    count = 0

    def is_met(step: int) -> bool:
        nonlocal count
        count += 1
        record = _at(store, trial.base, trial.choices, trial.seed, _RATIO**step, trial.num_requests)
        if record.problem:
            problems.append(record.problem)
        return _attained(record) >= trial.attainment

    try:
        found = highest_on_lattice(is_met, lattice(trial.start))
    finally:
        store.close()
    return Tried(None if found is None else _RATIO**found, count, problems[0] if problems and found is None else "")


def check(task: Check) -> Checked:
    """A run of the deployment. Raises SpecError for choices that are wrong."""
    store = Store(Path(task.store))
    try:
        return Checked(_at(store, task.base, task.choices, task.seed, task.rate, task.num_requests))
    finally:
        store.close()


def lattice(rate: float) -> int:
    """The place on the lattice nearest to `rate`."""
    return round(log(rate) / log(_RATIO))


def highest_on_lattice(is_met: Callable[[int], bool], start: int) -> int | None:
    """The highest whole number that `is_met`, what is met at one being taken to be met below; None if none is.

    Strides that double away from `start`, then bisection: few looks where `start` is near.
    """
    stride = _FIRST_STRIDE
    if is_met(start):
        low, high = start, start + stride
        while is_met(high):
            stride *= 2
            low, high = high, high + stride
            if stride > _FIRST_STRIDE << _MOST_STRIDES:
                return low
    else:
        low, high = start - stride, start
        while not is_met(low):
            stride *= 2
            low, high = low - stride, low
            if stride > _FIRST_STRIDE << _MOST_STRIDES:
                return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def _at(store: Store, base: Base, choices: tuple[str, ...], seed: int, rate: float, num_requests: int) -> Record:
    traffic = as_overrides({**at_rate(base.load(), rate, num_requests), "seed": seed})
    return remembered(store, Point(base.path, METRICS, (*base.overrides, *choices, *traffic)))[1]


def _attained(record: Record) -> float:
    good, whole = record.values.get("request_goodput"), record.values.get("request_throughput")
    return good / whole if good is not None and whole else 0.0
