"""Stage two of a plan: finalists on the simulator, each point stored as soon as it is known.

The store stays with the process that plans, whose file it is: others, maybe on other machines, only run points.

A trial is the search for one finalist's highest rate under one seed, by bisection over a fixed lattice of rates (2 %
apart), so that plans that begin elsewhere ask for the same points. Equal seeds give all finalists the same requests
(common random numbers), so that their differences scatter less than their rates do. A check is one run of the whole
deployment at the rate that is wanted.
"""

__all__ = [
    "FIRST_STRIDE",
    "METRICS",
    "NUM_RUNS_FIRST",
    "NUM_RUNS_NEAR",
    "Check",
    "Checked",
    "Trial",
    "Tried",
    "check",
    "highest_on_lattice",
    "lattice",
    "try_rates",
]

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from pathlib import Path

from perfmodel.planning.deployments.judged import meets
from perfmodel.planning.screening.candidates import Base
from perfmodel.planning.screening.demand import at_rate
from perfmodel.planning.sweeps.forecast import Forecast
from perfmodel.planning.sweeps.points import Point, Record, evaluate_timed
from perfmodel.planning.sweeps.store import Store, key_of_point
from perfmodel.planning.sweeps.workers import Stepwise
from perfmodel.specs.overrides import as_overrides

METRICS = (
    "slo_attainment",
    "request_goodput",
    "request_throughput",
    "output_throughput",
    *(
        f"{statistic}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "max_itl", "e2el")
        for statistic in ("mean", "median", "p90", "p95", "p99")
    ),
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
FIRST_STRIDE = 4
# Mean runs of a trial: 2 to enclose the rate and 1 or 2 to halve the stride, more where it begins far off.
NUM_RUNS_FIRST, NUM_RUNS_NEAR = 6, 4
_MOST_STRIDES = 6  # doublings of the stride: down to a ten-thousandth of the first rate


@dataclass(frozen=True)
class Trial:
    """A deployment under one seed.

    choices: overrides of the base scenario
    start:   rate at which to begin
    stride:  steps of the lattice from it to the next rate
    store:   the store's file
    forecast: counts its requests
    """

    base: Base
    choices: tuple[str, ...]
    seed: int
    start: float
    attainment: float
    num_requests: int
    store: str
    stride: int = FIRST_STRIDE
    forecast: Forecast = field(default_factory=Forecast, compare=False)


@dataclass(frozen=True)
class Tried:
    """rate: requests per second, None where no rate is served. num_points: looked at."""

    rate: float | None
    num_points: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Check:
    """A whole deployment at one rate, under one seed. forecast: counts its requests."""

    base: Base
    choices: tuple[str, ...]
    seed: int
    rate: float
    num_requests: int
    store: str
    forecast: Forecast = field(default_factory=Forecast, compare=False)


@dataclass(frozen=True)
class Checked:
    """record: METRICS at the rate"""

    record: Record


class _UnknownError(Exception):
    """Which run a task needs before it can go on; caught where it is asked."""

    def __init__(self, rate: float, point: Point, key: str) -> None:
        super().__init__(key)
        self.rate, self.point, self.key = rate, point, key


class _Runs:
    """The runs of a task, which are its steps: records come from the store, new ones go there.

    solve: the task's result, from the record at any rate; asked anew after each run, until nothing is unknown
    """

    def __init__(self, task: Trial | Check, solve: Callable[[Callable[[float], Record]], Tried | Checked]) -> None:
        self._task, self._solve = task, solve
        self._base, self._store = task.base.load(), Store(Path(task.store))
        self._records: dict[float, Record] = {}
        self._unknown: _UnknownError | None = None
        self._result: Tried | Checked | None = None

    def wanted(self) -> tuple[Point, ...]:
        if self._unknown is None and self._result is None:
            try:
                self._result = self._solve(self._record)
                self._store.close()
                self._task.forecast.expect(self._task, 0)
            except _UnknownError as unknown:
                self._unknown = unknown
        return () if self._unknown is None else (self._unknown.point,)

    def take(self, answer: tuple[Record, float]) -> None:
        assert self._unknown is not None  # it was wanted
        self._store.put(self._unknown.key, *answer)
        self._records[self._unknown.rate], self._unknown = answer[0], None
        self._task.forecast.did(self._task, self._task.num_requests)

    def result(self) -> Tried | Checked:
        assert self._result is not None  # nothing is wanted any more
        return self._result

    def _record(self, rate: float) -> Record:
        """Raises _UnknownError, and SpecError for choices that are wrong."""
        if rate not in self._records:
            task = self._task
            traffic = as_overrides({**at_rate(self._base, rate, task.num_requests), "seed": task.seed})
            point = Point(task.base.path, METRICS, (*task.base.overrides, *task.choices, *traffic))
            key = key_of_point(point)
            record = self._store.get(key)
            if record is None:
                raise _UnknownError(rate, point, key)
            self._records[rate] = record
        return self._records[rate]


def _runs_of_trial(trial: Trial) -> _Runs:
    slo = trial.base.load().slo

    def solve(record: Callable[[float], Record]) -> Tried:
        looked_at: list[Record] = []

        def is_met(step: int) -> bool:
            looked_at.append(record(_RATIO**step))
            return meets(looked_at[-1:], slo, trial.attainment)

        found = highest_on_lattice(is_met, lattice(trial.start), trial.stride)
        if found is not None:
            return Tried(_RATIO**found, len(looked_at))
        return Tried(None, len(looked_at), next((each.problem for each in looked_at if each.problem), ""))

    return _Runs(trial, solve)


# The highest rate of a trial, and a run of a deployment. Both raise SpecError for choices that are wrong.
try_rates: Stepwise[Trial, Tried] = Stepwise(_runs_of_trial, evaluate_timed)
check: Stepwise[Check, Checked] = Stepwise(
    lambda task: _Runs(task, lambda record: Checked(record(task.rate))), evaluate_timed
)


def lattice(rate: float) -> int:
    """The place on the lattice nearest to `rate`."""
    return round(log(rate) / log(_RATIO))


def highest_on_lattice(is_met: Callable[[int], bool], start: int, stride: int = FIRST_STRIDE) -> int | None:
    """The highest whole number that `is_met`, what is met at one being taken to be met below; None if none is.

    Strides that double away from `start`, then bisection: few looks where `start` is near.
    """
    longest = stride << _MOST_STRIDES
    if is_met(start):
        low, high = start, start + stride
        while is_met(high):
            stride *= 2
            low, high = high, high + stride
            if stride > longest:
                return low
    else:
        low, high = start - stride, start
        while not is_met(low):
            stride *= 2
            low, high = low - stride, low
            if stride > longest:
                return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low
