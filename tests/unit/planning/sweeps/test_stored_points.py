"""Points that are kept one by one: found again, and nothing kept of those whose worker was lost."""

import os
import signal
from pathlib import Path

from perfmodel.planning.sweeps import sweep as module
from perfmodel.planning.sweeps.points import Point, Record, evaluate_timed
from perfmodel.planning.sweeps.store import Store
from perfmodel.planning.sweeps.sweep import StoredPoint, stored_records
from perfmodel.planning.sweeps.workers import Stepwise, spread


def points(file: Path) -> list[StoredPoint]:
    overrides = [("traffic.num_requests=3", f"seed={seed}") for seed in range(4)]
    return [StoredPoint(Point("tiny-llama-cpu", ("output_throughput",), each), str(file)) for each in overrides]


def lost(_: StoredPoint, reason: str) -> Record:
    return Record(problem=reason)


def killed_at_two(point: Point) -> tuple[Record, float]:
    if point.overrides[-1] == "seed=2":
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate_timed(point)


def test_points_are_evaluated_once(tmp_path: Path) -> None:
    asked = points(tmp_path / "points.sqlite")
    first = spread(stored_records, asked, lost, workers=2)
    assert all(record.values["output_throughput"] for record in first)
    assert spread(stored_records, asked, lost, workers=2) == first
    store = Store(tmp_path / "points.sqlite")
    assert (len(store), store.most_evaluations()) == (4, 1)


def test_what_a_lost_worker_leaves_is_not_kept(tmp_path: Path) -> None:
    """The others are, one by one: the next plan asks for the lost one alone, and has it."""
    asked = points(tmp_path / "points.sqlite")
    dying: Stepwise[StoredPoint, Record] = Stepwise(module._Chain, killed_at_two)
    found = spread(dying, asked, lost, workers=2)
    assert [bool(record.problem) for record in found] == [False, False, True, False]
    assert len(Store(tmp_path / "points.sqlite")) == 3
    assert not spread(stored_records, asked, lost, workers=2)[2].problem
    assert Store(tmp_path / "points.sqlite").most_evaluations() == 1
