"""Engines of sweeps: equal answers in equal order everywhere, and a lost worker costs only its own item."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError
from perfmodel.plan.points import Point
from perfmodel.plan.sweep import sweep
from perfmodel.plan.workers import engine_of, spread

HAS_RAY = importlib.util.find_spec("ray") is not None


def squared(item: int) -> int:
    return item * item


def refused(item: int) -> int:
    if item == 3:
        raise SpecError("three is refused.")
    return item


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


def test_a_killed_worker_costs_only_its_own_item():
    answers = spread(killed_each_time, range(8), said, workers=2)
    assert answers[:3] + answers[4:] == [item * item for item in range(8) if item != 3]
    assert answers[3] == "3: its worker process was lost (signal SIGKILL, as when memory runs out), twice"


def test_an_item_whose_worker_was_lost_once_has_its_answer(tmp_path):
    items = [(number, tmp_path / "mark") for number in range(6)]
    assert spread(killed_once, items, said, workers=2) == [number * number for number, _ in items]


def test_what_the_function_raises_is_raised():
    with pytest.raises(SpecError, match=r"three is refused\."):
        spread(refused, range(6), said, workers=2)


def test_a_lost_point_is_a_record_with_the_problem(monkeypatch):
    """`sweep` names what to record: the planner and studies show it beside points that did not fit."""
    from perfmodel.plan import sweep as module

    points = small_points()[:1]
    monkeypatch.setattr(module, "spread", lambda _, items, if_lost, *rest: [if_lost(item, "lost") for item in items])
    assert [(record.problem, dict(record.values)) for record in sweep(points)] == [("lost.", {})]


@pytest.mark.parametrize("text", ["lokal", "local:3", "ray:", "dask", ""])
def test_other_engines_are_refused_in_a_sentence(text):
    with pytest.raises(SpecError, match="allowed local, ray or ray:ADDRESS"):
        engine_of(text)


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_extra_is_named():
    with pytest.raises(MissingExtraError, match=r"pip install 'perfmodel\[ray\]'"):
        spread(squared, range(3), said, engine="ray")


@pytest.fixture(scope="class")
def ray_of_this_machine():
    """Ray's workers import functions by their module: they look where its processes' PYTHONPATH says."""
    import ray

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), before])
    yield
    os.environ["PYTHONPATH"] = before
    ray.shutdown()


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (extra `ray`)")
@pytest.mark.usefixtures("ray_of_this_machine")
class TestRay:
    def test_points_have_the_same_records_as_in_this_process(self):
        assert sweep(small_points(), workers=2, engine="ray") == sweep(small_points(), workers=1)

    def test_a_killed_worker_costs_only_its_own_item(self):
        answers = spread(killed_each_time, range(6), said, workers=2, engine="ray")
        assert answers[:3] + answers[4:] == [item * item for item in range(6) if item != 3]
        assert "Ray worker was lost" in answers[3]
        assert "twice" in answers[3]

    def test_a_cluster_that_is_not_there_is_a_sentence(self):
        import ray

        ray.shutdown()
        with pytest.raises(PerfmodelError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 "):
            spread(squared, range(3), said, engine="ray:127.0.0.1:1")

    def test_what_the_function_raises_is_raised(self):
        with pytest.raises(SpecError, match=r"three is refused\."):
            spread(refused, range(6), said, workers=2, engine="ray")


def test_workers_that_cannot_begin_are_not_started_for_ever(tmp_path):
    """A script without `if __name__ == "__main__":` starts itself in each worker; the error says so."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from perfmodel.plan.workers import spread\n"
        "def same(item): return item\n"
        "print(spread(same, range(4), same, workers=2))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode
    assert "ended before it began" in done.stderr
