"""Engines of sweeps: equal answers in equal order everywhere, and a lost worker costs only its own item."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from pickle import PickleError

import pytest

from perfmodel.errors import SpecError
from perfmodel.planning.points import Point
from perfmodel.planning.sweep import sweep
from perfmodel.planning.workers import Stepwise, engine_of, spread


def squared(item: int) -> int:
    return item * item


def refused(item: int) -> int:
    if item == 3:
        raise SpecError("three is refused.")
    return item


def unsendable(item: int) -> object:
    return (lambda: None) if item == 3 else item


def killed_each_time(item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def killed_once(item: tuple[int, Path]) -> int:
    number, mark = item
    if number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def said(item: object, reason: str) -> str:
    return f"{item}: {reason}"


def doubling(start: int, mark: Path | None = None) -> Generator[tuple[int, Path | None], int, list[int]]:
    """A chain: what was found is doubled until it is over a hundred. With a mark, its processes die once at each step
    beyond 10."""
    numbers = [start]
    while numbers[-1] <= 100:
        numbers.append((yield numbers[-1], mark))
    return numbers


def doubled(step: tuple[int, Path | None]) -> int:
    number, mark = step
    if mark is not None and number > 10 and not (place := mark / str(number)).exists():
        place.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def always_killed(step: tuple[int, Path | None]) -> int:
    if step[0] == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * step[0]


doublings: Stepwise[int, list[int]] = Stepwise(doubling, doubled)


def here(*items: int) -> list[list[int]]:
    return spread(doublings, items, said, workers=1)


def small_points() -> list[Point]:
    return [
        Point("tiny-llama-cpu", ("output_throughput", "mean_ttft_ms"), ("traffic.num_requests=5", f"seed={seed}"))
        for seed in (0, 1, 2, 0, 3)
    ]


def test_answers_come_in_the_order_of_the_items_and_progress_counts_them():
    seen: list[tuple[int, int | None]] = []
    answers = spread(squared, range(20), said, lambda done, total: seen.append((done, total)), workers=2)
    assert answers == [item * item for item in range(20)]
    assert seen == [(done, 20) for done in range(1, 21)]


def test_nothing_to_do_is_no_error():
    assert spread(squared, [], said, workers=2) == []


@pytest.mark.release
def test_a_killed_worker_costs_only_its_own_item():
    answers = spread(killed_each_time, range(8), said, workers=2)
    assert answers[:3] + answers[4:] == [item * item for item in range(8) if item != 3]
    assert answers[3] == "3: its worker process was lost (signal SIGKILL, as when memory runs out), twice"


def test_an_item_whose_worker_was_lost_once_has_its_answer(tmp_path):
    items = [(number, tmp_path / "mark") for number in range(6)]
    assert spread(killed_once, items, said, workers=2) == [number * number for number, _ in items]


def test_steps_of_a_chain_follow_each_other_and_what_they_add_up_to_stays_here():
    progress: list[int] = []
    answers = spread(doublings, [5, 200, 7, 30], said, lambda done, _: progress.append(done), workers=2)
    assert answers == here(5, 200, 7, 30)
    assert answers[:2] == [[5, 10, 20, 40, 80, 160], [200]]
    assert progress == [1, 2, 3, 4]


@pytest.mark.release
def test_a_chain_goes_on_where_it_lost_a_worker_and_ends_where_it_lost_two(tmp_path):
    twice = Stepwise(lambda item: doubling(item, tmp_path / str(item)), doubled)
    for item in (5, 7):
        (tmp_path / str(item)).mkdir()
    assert spread(twice, [5, 7], said, workers=2) == here(5, 7)
    assert sorted(int(each.name) for each in (tmp_path / "5").iterdir()) == [20, 40, 80]
    lost = spread(Stepwise(doubling, always_killed), [5, 7], said, workers=2)
    assert lost[1:] == here(7)
    assert lost[0].endswith(", twice")


def test_what_the_function_raises_is_raised():
    with pytest.raises(SpecError, match=r"three is refused\."):
        spread(refused, range(6), said, workers=2)


def test_an_answer_that_cannot_be_sent_is_an_error_and_no_lost_worker():
    with pytest.raises((AttributeError, PickleError), match=r"(?i)pickle"):
        spread(unsendable, range(6), said, workers=2)


def test_a_point_that_does_not_fit_is_told_by_its_worker():
    points = [replace(point, overrides=("engine.gpu_memory_utilization=0.01",)) for point in small_points()[:1]]
    points += small_points()[1:3]
    found = sweep([replace(points[0], scenario="llama-3.1-70b-h100-tp4"), *points[1:]], workers=2)
    assert "lost" not in found[0].problem
    assert found[0].problem
    assert not found[1].problem


def test_a_lost_point_is_a_record_with_the_problem(monkeypatch):
    """`sweep` names what to record: the planner and studies show it beside points that did not fit."""
    from perfmodel.planning import sweep as module

    points = small_points()[:1]
    monkeypatch.setattr(module, "spread", lambda _, items, if_lost, *rest: [if_lost(item, "lost") for item in items])
    assert [(record.problem, dict(record.values)) for record in sweep(points)] == [("lost.", {})]


@pytest.mark.parametrize(
    ("text", "name", "address"),
    [
        ("local", "local", None),
        ("ray", "ray", None),
        ("ray:auto", "ray", "auto"),
        ("ray:10.0.0.1:6379", "ray", "10.0.0.1:6379"),
        ("ray://10.0.0.1:10001", "ray", "ray://10.0.0.1:10001"),
    ],
)
def test_engines_have_a_name_and_an_address(text, name, address):
    assert engine_of(text) == (name, address)


@pytest.mark.parametrize("text", ["lokal", "local:3", "ray:", "dask", ""])
def test_other_engines_are_refused_in_a_sentence(text):
    with pytest.raises(SpecError, match="expected local, ray or ray:ADDRESS"):
        engine_of(text)


def test_workers_that_cannot_begin_are_not_started_for_ever(tmp_path):
    """A script without `if __name__ == "__main__":` starts itself in each worker; the error says so."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from perfmodel.planning.workers import spread\n"
        "def same(item): return item\n"
        "print(spread(same, range(4), same, workers=2))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode
    assert "ended at its start" in done.stderr
