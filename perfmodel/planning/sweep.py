"""`Store`: evaluated points on disk, so that stopped plans resume and plans share results.

One SQLite file in write-ahead mode: each point is committed when done, and several processes may write. The key hashes
everything the result depends on: the resolved scenario (file contents, not paths), its pools' calibrations and
profiles, the metrics, and the program's sources. Names, plans and notes are left out."""

import dataclasses
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from perfmodel.cores import num_processes
from perfmodel.cost import scenario_fits
from perfmodel.errors import PerfmodelError
from perfmodel.planning.points import Point, Record, evaluate, evaluate_timed, load_point
from perfmodel.planning.workers import Progress, Stepwise, engine_of, one_step, program_version, spread
from perfmodel.renderable import Renderable
from perfmodel.specs.scenario import Scenario

_PATIENCE_S = 10.0  # for another process's commit, which takes milliseconds
_SPEAKS_OF_NOTHING = {"name", "plan", "published", "technique"}  # fields that no answer depends on
_SCHEMA = """CREATE TABLE IF NOT EXISTS points (
    key TEXT PRIMARY KEY, record TEXT NOT NULL, seconds REAL, times INTEGER NOT NULL DEFAULT 1)"""
_PUT = """INSERT INTO points (key, record, seconds) VALUES (?, ?, ?)
    ON CONFLICT (key) DO UPDATE SET times = times + 1"""


class Store:
    """Records by key, in the file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._refusing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None)
        self._rows("PRAGMA journal_mode=WAL")
        self._rows(_SCHEMA)

    def get(self, key: str) -> Record | None:
        rows = self._rows("SELECT record FROM points WHERE key = ?", (key,))
        return self._record(rows[0][0]) if rows else None

    def put(self, key: str, record: Record, seconds: float = 0.0) -> None:
        """Store a point's record with its duration. An existing one stays and counts as evaluated again."""
        fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        text = json.dumps(fields | {"values": dict(record.values), "intervals": dict(record.intervals)})
        self._rows(_PUT, (key, text, seconds))

    def _rows(self, statement: str, values: tuple[str | float, ...] = ()) -> list[Any]:
        with self._refusing():
            return self._connection.execute(statement, values).fetchall()

    def _record(self, text: str) -> Record:
        with self._refusing():
            data = json.loads(text)
            return Record(**{**data, "notes": tuple(data["notes"])})

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise PerfmodelError for an unreadable, unwritable, locked or damaged file."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            reason = str(error)
        except (ValueError, TypeError, KeyError) as error:
            reason = f"a damaged record: {error}"
        else:
            return
        raise PerfmodelError(f"--store {self._path}: cannot be used ({reason}); name another file.")

    def close(self) -> None:
        self._connection.close()


def default_store() -> Path:
    """The user's store, in the XDG cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perfmodel" / "points.sqlite"


def key_of(scenario: Scenario, point: Point) -> str:
    """Hash of everything that the point's metrics depend on; `scenario` is the point's."""
    content = {key: _plain(getattr(scenario, key)) for key in Scenario.model_fields if key not in _SPEAKS_OF_NOTHING}
    fits = [_plain(scenario_fits(scenario.of_pool(pool))) for pool in scenario.pools]
    whole = [content, fits, point.metrics, _plain(point.step), point.intervals, program_version()]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Canonical JSON, equal in every process."""
    if isinstance(value, BaseModel):
        return _plain({name: getattr(value, name) for name in type(value).model_fields})
    if dataclasses.is_dataclass(value):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@dataclass(frozen=True, repr=False)
class SweepResult(Renderable):
    """Records of all combinations of values, the last path varying fastest."""

    paths: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    metrics: tuple[str, ...]
    records: tuple[Record, ...]

    def columns(self) -> dict[str, NDArray[Any]]:
        """The varied values by path, metrics (nan without a value), and `problem`."""
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
    """A record for each point, in order; equal points are evaluated once. Results are the same on every engine.

    progress: called with (points done, points in all)
    workers:  processes; default: the available cores, none for a few points
    engine:   local | ray | ray:ADDRESS, see perfmodel.planning.workers

    A point whose worker dies (out of memory) gives a record with that problem. Raises SpecError for wrong overrides."""
    distinct = list(dict.fromkeys(points))
    records = dict(zip(distinct, spread(evaluate, distinct, _lost, progress, workers, engine), strict=True))
    return [records[point] for point in points]


def _lost(_: object, reason: str) -> Record:
    return Record(problem=f"{reason}.")


class Forecast:
    """Progress of a search in simulated requests, which run time is proportional to. A search for a highest rate takes
    several runs. progress: called with (requests simulated, requests expected in all)"""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress, self._done = progress, 0.0
        self._ahead: dict[Hashable, float] = {}

    def expect(self, task: Hashable, requests: float) -> None:
        """Expect `task` to simulate `requests` more; 0: it is over."""
        self._ahead[task] = requests
        if self._progress is not None:
            self._progress(round(self._done), round(self._done + sum(self._ahead.values())))

    def did(self, task: Hashable, requests: float, is_last: bool = False) -> None:
        """Count a run of `task`. Unless `is_last`, expect at least one more such run."""
        self._done += requests
        self.expect(task, 0.0 if is_last else max(self._ahead.get(task, 0.0) - requests, requests))


T = TypeVar("T", bound=Hashable)
R = TypeVar("R")
Ask = Callable[[T], Generator[Point, Record, R]]  # points of a task, one after the other, each sent its record
_LONG_REQUESTS = 5000  # of several tasks: seconds, longer than processes take to start


@dataclass(frozen=True)
class StoredSweep:
    """Simulations of a search, cached in the store's file. workers, engine: as of `sweep`; forecast: of requests"""

    store: str
    workers: int | None = None
    engine: str = "local"
    forecast: Forecast = field(default_factory=Forecast)

    def records(self, points: Sequence[Point], num_requests: Sequence[int]) -> list[Record]:
        """A record for each point, which simulates `num_requests`; equal points are evaluated once."""
        counts = dict(zip(points, num_requests, strict=True))
        records = dict(zip(counts, self.run(one_step, counts, _lost), strict=True))
        return [records[point] for point in points]

    def run(
        self, ask: Ask[T, R], num_requests: Mapping[T, int], if_lost: Callable[[T, str], R], num_runs: int = 1
    ) -> list[R]:
        """Run `ask` for each task, locally on all cores even for a few tasks if they are long. num_requests: per run of
        a task; num_runs: expected runs of a task; if_lost: as for `spread`. Raises SpecError for wrong overrides."""
        for task, count in num_requests.items():
            self.forecast.expect(task, count * num_runs)
        workers, total = self.workers, sum(num_requests.values())
        if workers is None and total >= _LONG_REQUESTS and engine_of(self.engine)[0] == "local":
            workers = num_processes(len(num_requests))

        def begin(task: T) -> Generator[Point, tuple[Record, float], R]:
            """Run `ask` of a task, answering its points from the store if cached, else storing them."""
            asked = ask(task)
            record: Any = None
            while True:
                try:
                    point = asked.send(record)
                except StopIteration as end:
                    self.forecast.expect(task, 0)
                    result: R = end.value
                    return result
                key = key_of(load_point(point)[0], point)
                with closing(Store(Path(self.store))) as store:
                    record = store.get(key)
                if record is None:
                    record, seconds = yield point
                    with closing(Store(Path(self.store))) as store:
                        store.put(key, record, seconds)
                    self.forecast.did(task, num_requests[task])

        return spread(Stepwise(begin, evaluate_timed), list(num_requests), if_lost, None, workers, self.engine)
