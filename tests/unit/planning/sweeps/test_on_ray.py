"""The Ray engine: the answers of local processes, bit for bit, and a lost worker costs only its own step.

`TestRay` starts a cluster of this machine's own where Ray is installed (extra `ray`); what is asked of a scheduler is
tested everywhere, with one that stands in for Ray.
"""

import importlib.util
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stored_points import StoredPoints

from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError
from perfmodel.planning import workers as on_ray
from perfmodel.planning.points import Point
from perfmodel.planning.result import PlanResult
from perfmodel.planning.search import make_plan
from perfmodel.planning.study import load_study, quick, simulated_points
from perfmodel.planning.sweep import sweep
from perfmodel.planning.whatif import ask_whatif
from perfmodel.planning.workers import spread

HAS_RAY = importlib.util.find_spec("ray") is not None
FEW = ("traffic.num_requests=30",)
PLAN = (
    "traffic.input_tokens={distribution: fixed, value: 300}",
    "traffic.output_tokens={distribution: fixed, value: 60}",
    "plan={finalists: 2, seeds: 2, num_requests: 100, max_gpus: 2, space: {tensor_parallel_size: [1, 2], "
    "max_num_seqs: [16, 64], max_num_batched_tokens: [2048]}}",
)


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


def gone_at_once(item: tuple[int, Path]) -> int:
    number, mark = item
    if number == 3 and not mark.exists():
        mark.touch()
        os._exit(7)
    return number * number


def said(item: object, reason: str) -> str:
    return f"{item}: {reason}"


class LostError(Exception):
    """What stands for `ray.exceptions.RayError`."""


class TaskError(LostError):
    """What stands for `ray.exceptions.RayTaskError`."""


@dataclass
class Scheduler:
    """What `spread` asks of Ray: tasks run one after the other, when waited for, the last one first."""

    lost: tuple[Any, ...] = ()
    pending: dict[int, Any] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    most_pending: int = 0
    count: int = 0

    def module(self) -> ModuleType:
        ray: Any = ModuleType("ray")
        ray.exceptions = SimpleNamespace(RayError=LostError, RayTaskError=TaskError)
        ray.is_initialized = lambda: True
        ray.cluster_resources = lambda: {"CPU": 2.0}
        ray.remote = lambda **_: lambda function: SimpleNamespace(remote=lambda *given: self.submit(function, given))
        ray.wait, ray.get = self.wait, self.get
        ray.cancel = lambda task, force: self.cancelled.append(task)
        return ray

    def submit(self, function: Any, given: tuple[Any, ...]) -> int:
        self.count += 1
        self.pending[self.count] = (function, given)
        self.most_pending = max(self.most_pending, len(self.pending))
        return self.count

    def wait(self, tasks: list[int]) -> tuple[list[int], list[int]]:
        print("(raylet) says something")
        last = max(tasks)
        function, given = self.pending.pop(last)
        self.answers[last] = LostError() if given[1] in self.lost else function(*given)
        return [last], [task for task in tasks if task != last]

    def get(self, task: int) -> Any:
        if isinstance(self.answers[task], Exception):
            raise self.answers[task]
        return self.answers[task]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    found = Scheduler()
    monkeypatch.setitem(sys.modules, "ray", found.module())
    return found


def test_tasks_are_sent_as_the_cluster_takes_them_and_answers_are_in_order(
    scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spread(squared, range(40), said, engine="ray") == [item * item for item in range(40)]
    assert "raylet" not in capsys.readouterr().out  # which is for the answer, maybe a JSON document
    assert scheduler.most_pending == 4  # twice the processors: not forty, which a head would have to hold


def test_a_task_that_is_lost_is_tried_once_more_at_the_end(scheduler: Scheduler) -> None:
    scheduler.lost = (3,)
    answers = spread(squared, range(6), said, engine="ray")
    assert answers[:3] + answers[4:] == [item * item for item in range(6) if item != 3]
    assert answers[3] == "3: its Ray worker was lost (LostError), twice"
    assert scheduler.count == 7


def test_what_is_under_way_is_cancelled_when_the_function_refuses(scheduler: Scheduler) -> None:
    with pytest.raises(SpecError, match=r"three is refused\."):
        spread(refused, range(9), said, engine="ray")
    assert scheduler.cancelled == list(scheduler.pending)


def test_a_node_with_another_perfmodel_is_told_from_one_that_may_answer(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers would be another version's, and the store would keep them under this one's name."""
    versions = iter(["here", "there"])
    monkeypatch.setattr(on_ray, "installed_version", lambda: next(versions))
    with pytest.raises(PerfmodelError, match=r"has another perfmodel \(there\) than this machine \(here\)"):
        spread(squared, range(3), said, engine="ray")


@pytest.mark.parametrize(
    ("engine", "mode", "says"),
    [
        ("ray:auto", None, r"no usable Ray cluster here \(not found\); start one with `ray start --head`"),
        (
            "ray://somewhere",
            None,
            r"somewhere refuses connections \(not found\); if it asks for tokens, set RAY_AUTH_MODE=token",
        ),
        (
            "ray://somewhere",
            "token",
            r"the same versions of Ray and Python, and, with RAY_AUTH_MODE=token, the same token",
        ),
        ("ray", None, r"Ray does not start on this machine \(not found\); use --engine local"),
    ],
)
def test_a_cluster_that_lets_nobody_in_is_told_with_the_way_in(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, engine: str, mode: str | None, says: str
) -> None:
    def init(*_: Any, **__: Any) -> None:
        raise ConnectionError("not found.\nand a page about it")

    ray: Any = sys.modules["ray"]
    ray.is_initialized, ray.init = (lambda: False), init
    monkeypatch.setattr(on_ray, "_knock", lambda _: None)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(PerfmodelError, match=says):
        spread(squared, [1], said, engine=engine)


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_extra_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[ray\]'"):
        spread(squared, range(3), said, engine="ray")


@pytest.fixture(scope="class")
def ray_of_this_machine() -> Any:
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
    """Each question is asked here and there; what is compared is every number of the answer, not rounded."""

    def test_a_sweep(self) -> None:
        metrics = ("output_throughput", "mean_ttft_ms")
        points = [Point("tiny-llama-cpu", metrics, ("traffic.num_requests=5", f"seed={n}")) for n in (0, 1, 2, 0)]
        assert sweep(points, workers=2, engine="ray") == sweep(points, workers=1)

    def test_a_study(self) -> None:
        file = load_study("routers", ("traffic.num_requests=60",))
        points = list(quick(simulated_points(file), changes=False).points.values())
        found = sweep(points, workers=2, engine="ray")
        assert found == sweep(points, workers=1)
        assert all(record.values and not record.problem for record in found)

    def test_a_whatif(self) -> None:
        vary, against = ["traffic.arrivals.rate=1..16:3"], ("engine.quantization=fp8",)
        here, there = (
            ask_whatif("llama-3.1-8b-a100", vary, FEW, ("mean_tpot_ms",), against=against, workers=w, engine=engine)
            for w, engine in ((1, "local"), (2, "ray"))
        )
        assert here.to_json() == there.to_json()

    def test_a_plan_whose_points_this_process_keeps(self, tmp_path: Path) -> None:
        def of(engine: str, name: str) -> PlanResult:
            return make_plan("llama-3.1-8b-a100", PLAN, tmp_path / name, 2, engine)

        there, here = of("ray", "there.sqlite"), of("local", "here.sqlite")
        assert there.to_json() == here.to_json()
        one, other = StoredPoints(tmp_path / "there.sqlite"), StoredPoints(tmp_path / "here.sqlite")
        assert one.records() == other.records()
        assert one.most_evaluations() == 1
        again = of("ray", "there.sqlite")
        assert again.to_json() == here.to_json()
        assert (len(one), one.most_evaluations()) == (len(other), 1)

    def test_a_killed_worker_costs_only_its_own_item(self) -> None:
        answers = spread(killed_each_time, range(6), said, workers=2, engine="ray")
        assert answers[:3] + answers[4:] == [item * item for item in range(6) if item != 3]
        assert "Ray worker was lost" in answers[3]
        assert "twice" in answers[3]

    def test_an_item_whose_worker_left_once_has_its_answer(self, tmp_path: Path) -> None:
        items = [(number, tmp_path / "mark") for number in range(6)]
        assert spread(gone_at_once, items, said, workers=2, engine="ray") == [number * number for number, _ in items]
        assert (tmp_path / "mark").exists()

    def test_what_the_function_raises_is_raised(self) -> None:
        with pytest.raises(SpecError, match=r"three is refused\."):
            spread(refused, range(6), said, workers=2, engine="ray")

    def test_a_cluster_that_is_not_there_is_a_sentence(self) -> None:
        import ray

        ray.shutdown()
        with pytest.raises(PerfmodelError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 "):
            spread(squared, range(3), said, engine="ray:127.0.0.1:1")
