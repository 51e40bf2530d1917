"""`Store`: evaluated points on disk, so that a plan that was stopped goes on where it was, and plans share answers.

One SQLite file in write-ahead mode: each point is committed when it is done, and several processes may write. The key
is a hash of everything that the answer depends on: the resolved scenario (what its files say, not where they are), the
calibrations and profiles of its pools, the metrics, and the program's own sources. Names, plans and notes leave it as
it is.
"""

__all__ = ["Store", "default_store", "installed_version", "key_of", "key_of_point", "program_version"]

import dataclasses
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from perfmodel.cost import scenario_fits
from perfmodel.errors import PerfmodelError
from perfmodel.files.catalog import Kind, data_dir
from perfmodel.planning.sweeps.points import Point, Record, load_point
from perfmodel.specs.scenario import Scenario
from perfmodel.version import RELEASE

_PATIENCE_S = 10.0  # for another process's commit, which takes milliseconds
_SPEAKS_OF_NOTHING = {"name", "plan", "published", "technique"}  # fields that no answer depends on
_SCHEMA = """CREATE TABLE IF NOT EXISTS points (
    key TEXT PRIMARY KEY, record TEXT NOT NULL, seconds REAL, times INTEGER NOT NULL DEFAULT 1)"""
_PUT = """INSERT INTO points (key, record, seconds) VALUES (?, ?, ?)
    ON CONFLICT (key) DO UPDATE SET times = times + 1"""
# What answers come from; the rest of the program may change and leave them as they are.
_SOURCES = (
    *("files", "models", "specs", "ops", "cost", "engine", "sim", "planning/metrics.py"),
    *(f"planning/sweeps/{name}.py" for name in ("points", "metrics", "typical_step")),
)
_DATA: tuple[Kind, ...] = ("hardware", "models", "traffic", "scenarios")
_NAMED: tuple[Kind, ...] = ("engines", "networks")  # which a resolved scenario still has by name


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
        """Keep the record of a point that took so long; one that is there already stays, and counts as evaluated again
        (two plans at once may do so)."""
        fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        text = json.dumps(fields | {"values": dict(record.values), "intervals": dict(record.intervals)})
        self._rows(_PUT, (key, text, seconds))

    def __len__(self) -> int:
        return int(self._rows("SELECT COUNT(*) FROM points")[0][0])

    def records(self) -> dict[str, Record]:
        """All of them by key."""
        return {key: self._record(text) for key, text in self._rows("SELECT key, record FROM points ORDER BY key")}

    def most_evaluations(self) -> int:
        """How often the point that was evaluated most often was: 1 where no work was done twice."""
        return int(self._rows("SELECT COALESCE(MAX(times), 0) FROM points")[0][0])

    def _rows(self, statement: str, values: tuple[str | float, ...] = ()) -> list[Any]:
        with self._refusing():
            return self._connection.execute(statement, values).fetchall()

    def _record(self, text: str) -> Record:
        with self._refusing():
            data = json.loads(text)
            return Record(**{**data, "notes": tuple(data["notes"])})

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raises PerfmodelError for a file that cannot be read or written, is locked for long, or is damaged."""
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
    """The user's own, in the cache folder that the XDG base directory specification names."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perfmodel" / "points.sqlite"


def key_of_point(point: Point) -> str:
    """`key_of` of the point with its scenario loaded. Raises SpecError where an override is wrong."""
    return key_of(load_point(point)[0], point)


def key_of(scenario: Scenario, point: Point) -> str:
    """A hash of all that the metrics of the point, whose scenario this is, depend on."""
    content = {
        name: _plain(getattr(scenario, name)) for name in Scenario.model_fields if name not in _SPEAKS_OF_NOTHING
    }
    fits = [_plain(scenario_fits(scenario.of_pool(pool))) for pool in scenario.pools]
    whole = [content, fits, point.metrics, _plain(point.step), point.intervals, program_version()]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def program_version() -> str:
    """The version, and a hash of the sources that answers come from, descriptions of engines among them."""
    root = Path(__file__).resolve().parents[2]
    rooms = [root / name for name in _SOURCES]
    files = [file for room in rooms for file in ([room] if room.suffix else sorted(room.rglob("*.py")))]
    for kind in _NAMED:
        files += sorted(data_dir(kind).glob("*.yaml"))
    return f"{RELEASE}+{_hash_of(files)}"


@lru_cache(maxsize=1)
def installed_version() -> str:
    """`program_version`, and a hash of the hardware, calibrations, models and scenarios that are installed with it."""
    files = [file for kind in _DATA for file in sorted(data_dir(kind).rglob("*.yaml"))]
    return f"{program_version()}+{_hash_of(files)}"


def _hash_of(files: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """JSON with one form for equal values, whatever the process."""
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
