"""Many points, evaluated in processes of this machine or on Ray, answered in the order in which they were asked.

`sweep` evaluates them; a `StoredSweep` also keeps each record in a store as soon as it is known, and asks there first,
so that what was stopped goes on where it was. The store stays with the process that asks, whose file it is: others,
maybe on other machines, only run points. One that was lost with its worker has no record, and nothing is stored for it.
"""

__all__ = [
    "Forecast",
    "StoredPoint",
    "StoredSweep",
    "StoredTask",
    "SweepResult",
    "from_store",
    "stored_records",
    "sweep",
]

from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cores import num_processes
from perfmodel.planning.sweeps.points import Point, Record, evaluate, evaluate_timed
from perfmodel.planning.sweeps.store import Store, key_of_point
from perfmodel.planning.sweeps.workers import Progress, Stepwise, engine_of, spread
from perfmodel.printable import Printable

_LONG_REQUESTS = 5000  # of several tasks, which take seconds: more than processes take to start


@dataclass(frozen=True, repr=False)
class SweepResult(Printable):
    """Records of all combinations of some values, the last path varying fastest."""

    paths: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    metrics: tuple[str, ...]
    records: tuple[Record, ...]

    def columns(self) -> dict[str, NDArray[Any]]:
        """The varied values by path, the metrics (nan without a value), and `problem`: why there is none."""
        columns: dict[str, NDArray[Any]] = {
            path: np.array([row[number] for row in self.values]) for number, path in enumerate(self.paths)
        }
        for name in self.metrics:
            columns[name] = np.array([record.values.get(name) for record in self.records], dtype=np.float64)
        columns["problem"] = np.array([record.problem for record in self.records])
        return columns


def sweep(
    points: Sequence[Point], progress: Progress | None = None, workers: int | None = None, engine: str = "local"
) -> list[Record]:
    """A record for each point, in order; equal points are evaluated once. Equal on every engine.

    progress: called with (points done, points in all)
    workers:  processes; by default as many as this one may use cores, none for a few points
    engine:   local | ray | ray:ADDRESS, see perfmodel.planning.sweeps.workers

    A point whose worker is lost (memory runs out) is a record with that problem. Raises SpecError where overrides are
    wrong.
    """
    distinct = list(dict.fromkeys(points))
    records = dict(zip(distinct, spread(evaluate, distinct, _lost, progress, workers, engine), strict=True))
    return [records[point] for point in points]


def _lost(_: object, reason: str) -> Record:
    return Record(problem=f"{reason}.")


class Forecast:
    """How many requests a search has simulated, and how many it still expects to simulate.

    A run takes time in proportion to its requests, and a search for a highest rate takes several runs. So a forecast
    counts requests, not searches: the share of them that is done is the share of the time that has passed.

    progress: called with (requests simulated, requests expected in all)
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress, self._done = progress, 0.0
        self._ahead: dict[Hashable, float] = {}

    def expect(self, task: Hashable, requests: float) -> None:
        """Expect `task` to simulate so many requests from now on; 0: it is over."""
        self._ahead[task] = requests
        if self._progress is not None:
            self._progress(round(self._done), round(self._done + sum(self._ahead.values())))

    def did(self, task: Hashable, requests: float, is_last: bool = False) -> None:
        """Count a run of `task` with so many requests. Expect at least one more such run unless this one `is_last`."""
        self._done += requests
        self.expect(task, 0.0 if is_last else max(self._ahead.get(task, 0.0) - requests, requests))


class StoredTask(Protocol):
    """What asks for points, one after the other: the store's file, and the requests of each run that it counts."""

    def __hash__(self) -> int: ...
    @property
    def store(self) -> str: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def forecast(self) -> Forecast: ...


@dataclass(frozen=True)
class StoredPoint:
    """A point, and the file of the store that has its record, or will have it."""

    point: Point
    store: str
    num_requests: int = 0
    forecast: Forecast = field(default_factory=Forecast, compare=False)


T = TypeVar("T", bound=StoredTask)
R = TypeVar("R")


def from_store(task: StoredTask, asked: Generator[Point, Record, R]) -> Generator[Point, tuple[Record, float], R]:
    """`asked`, whose points are answered from the task's store where that has them, and kept there otherwise."""
    record: Any = None
    while True:
        try:
            point = asked.send(record)
        except StopIteration as end:
            task.forecast.expect(task, 0)
            result: R = end.value
            return result
        key, file = key_of_point(point), Path(task.store)
        with closing(Store(file)) as store:
            record = store.get(key)
        if record is None:
            record, seconds = yield point
            with closing(Store(file)) as store:
                store.put(key, record, seconds)
            task.forecast.did(task, task.num_requests)


def _one_point(stored: StoredPoint) -> Generator[Point, Record, Record]:
    return (yield stored.point)


# Raises SpecError for overrides that are wrong.
stored_records: Stepwise[StoredPoint, Record] = Stepwise(
    lambda stored: from_store(stored, _one_point(stored)), evaluate_timed
)


@dataclass(frozen=True)
class StoredSweep:
    """The simulations of a search. workers, engine: as for `sweep`; forecast: counts their requests"""

    store: str
    workers: int | None = None
    engine: str = "local"
    forecast: Forecast = field(default_factory=Forecast)

    def records(self, points: Sequence[Point], num_requests: Sequence[int]) -> list[Record]:
        """A record for each point, which simulates so many requests; equal points are evaluated once."""
        tasks = {
            point: StoredPoint(point, self.store, count, self.forecast)
            for point, count in zip(points, num_requests, strict=True)
        }
        for task in tasks.values():
            self.forecast.expect(task, task.num_requests)
        records = dict(zip(tasks, self.run(stored_records, list(tasks.values()), _lost), strict=True))
        return [records[point] for point in points]

    def run(self, function: Stepwise[T, R], tasks: Sequence[T], if_lost: Callable[[T, str], R]) -> list[R]:
        """`function` of each task; of this machine on as many processes as it has cores, also for a few tasks that take
        long."""
        workers = self.workers
        is_long = sum(task.num_requests for task in tasks) >= _LONG_REQUESTS
        if workers is None and is_long and engine_of(self.engine).name == "local":
            workers = num_processes(len(tasks))
        return spread(function, tasks, if_lost, None, workers, self.engine) if tasks else []
