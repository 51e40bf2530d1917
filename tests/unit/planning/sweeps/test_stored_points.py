"""Points that are kept one by one: found again, and nothing kept of those whose worker was lost."""

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from stored_points import StoredPoints

from perfmodel.errors import PerfmodelError
from perfmodel.planning import search
from perfmodel.planning import sweep as store_module
from perfmodel.planning.points import Point, Record, evaluate_timed
from perfmodel.planning.sweep import StoredSweep

POINTS = [
    Point("tiny-llama-cpu", ("output_throughput",), ("traffic.num_requests=3", f"seed={seed}")) for seed in range(4)
]


def records(file: Path) -> list[Record]:
    return StoredSweep(str(file), workers=2).records(POINTS, [3] * len(POINTS))


def killed_at_two(point: Point) -> tuple[Record, float]:
    if point.overrides[-1] == "seed=2":
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate_timed(point)


def test_points_are_evaluated_once(tmp_path: Path) -> None:
    file = tmp_path / "points.sqlite"
    first = records(file)
    assert all(record.values["output_throughput"] for record in first)
    assert records(file) == first
    assert (len(StoredPoints(file)), StoredPoints(file).most_evaluations()) == (4, 1)


@pytest.mark.release
def test_what_a_lost_worker_leaves_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are, one by one: the next plan asks for the lost one alone, and has it."""
    file = tmp_path / "points.sqlite"
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "evaluate_timed", killed_at_two)
        found = records(file)
    assert [bool(record.problem) for record in found] == [False, False, True, False]
    assert len(StoredPoints(file)) == 3
    assert not records(file)[2].problem
    assert StoredPoints(file).most_evaluations() == 1


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """The database locked by another connection."""
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("CREATE TABLE IF NOT EXISTS others (number INTEGER)")
        other.execute("BEGIN EXCLUSIVE")
        yield


def test_an_unusable_store_is_refused_in_one_sentence_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(search, "_plan_rate", lambda *_: pytest.fail("searched"))
    file, folder, text = tmp_path / "points.sqlite", tmp_path / "folder", tmp_path / "text"
    folder.mkdir()
    text.write_text("no database" * 99, encoding="utf-8")
    for path in (folder, text, text / "points.sqlite"):
        with pytest.raises(PerfmodelError, match=rf"--store {path}: cannot be used \(.*\); name another file"):
            search.make_plan("llama-3.1-8b-a100", ["plan={}"], path)
    with locked(file), pytest.raises(PerfmodelError, match=r"cannot be used .*locked"):
        search.make_plan("llama-3.1-8b-a100", ["plan={}"], file)


def test_a_store_locked_or_damaged_during_the_search_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_PATIENCE_S", 0.1)
    file = tmp_path / "points.sqlite"
    store = StoredPoints(file)
    with locked(file), pytest.raises(PerfmodelError, match=rf"--store {file}: cannot be used .*locked"):
        store.put("a", Record(problem="x"))
    store.put("a", Record(problem="x"))
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("UPDATE points SET record = '{'")
    for read in (lambda: store.get("a"), store.records):
        with pytest.raises(PerfmodelError, match=rf"--store {file}: cannot be used .*a damaged record"):
            read()
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("DROP TABLE points")
    for use in (lambda: store.get("a"), store.records, lambda: len(store), store.most_evaluations):
        with pytest.raises(PerfmodelError, match=rf"--store {file}: cannot be used .*no such table"):
            use()
