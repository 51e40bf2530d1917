"""Points that are kept: found again, shared, and not lost when a plan is killed."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from stored_points import StoredPoints

from perfmodel.errors import PerfmodelError
from perfmodel.planning.points import Point, Record
from perfmodel.planning.runs import Trial, highest_on_lattice, try_rates
from perfmodel.planning.space import Base
from perfmodel.planning.sweep import StoredSweep, key_of
from perfmodel.planning.workers import Stepwise, program_version, spread
from perfmodel.specs import load_scenario

METRICS = ("request_throughput",)
SMALL = (
    "traffic.num_requests=20",
    "traffic.input_tokens={distribution: fixed, value: 200}",
    "traffic.output_tokens={distribution: fixed, value: 20}",
)


def highest(is_met: Callable[[int], bool], start: int) -> int | None:
    def asked(step: int) -> Generator[int, bool, bool]:
        return (yield step)

    search: Stepwise[int, int | None] = Stepwise(lambda begin: highest_on_lattice(asked, begin), is_met)
    return spread(search, [start], lambda *_: None, workers=1)[0]


@pytest.mark.parametrize("seed", range(20))
def test_the_highest_step_is_found_from_anywhere_in_few_looks(seed: int) -> None:
    """Whatever the truth and the start: exactly, in 2 log2(distance) looks or so."""
    rng = random.Random(seed)
    truth, start = rng.randint(-150, 150), rng.randint(-150, 150)
    looks: list[int] = []

    def is_met(step: int) -> bool:
        looks.append(step)
        return step <= truth

    assert highest(is_met, start) == truth
    assert len(looks) <= 18
    assert len(set(looks)) == len(looks)


def test_what_is_met_everywhere_is_met_where_the_search_ends() -> None:
    """A search that never finds the edge stops after so many doublings, at the highest place that it looked at."""
    looks: list[int] = []
    found = highest(lambda step: not looks.append(step), 0)  # type: ignore[func-returns-value]
    assert found in looks
    assert found is not None
    assert found > 150


def test_all_at_once_is_no_rate() -> None:
    """If requests take 2 s at any rate, 100 of them show no more than 200 requests/s (Little's law, four times)."""
    kept = Record({"slo_attainment": 1.0, "mean_e2el_ms": 2000.0})
    trial = Trial(Base("llama-3.1-8b-a100", ()), (), 0, 10.0, 0.9, 100)
    search: Stepwise[Point, Record | None] = Stepwise(try_rates, lambda _: kept)
    (rate,) = spread(search, [trial], lambda *_: None, workers=1)
    assert 196 < rate <= 200


def test_nothing_that_is_met_is_told() -> None:
    assert highest(lambda _: False, 0) is None


def key(overrides: tuple[str, ...], metrics: tuple[str, ...] = METRICS) -> str:
    point = Point("llama-3.1-8b-a100", metrics, overrides)
    return key_of(load_scenario(point.scenario, overrides), point)


def test_a_key_is_of_what_the_answer_depends_on_and_of_nothing_else() -> None:
    same = key(SMALL)
    assert key((*SMALL, "name=another")) == same
    assert key((*SMALL, "plan={objective: fewest_gpus}")) == same
    assert key(SMALL, ("mfu",)) != same
    assert key((*SMALL, "seed=1")) != same
    assert key((*SMALL, "hardware.hbm.bandwidth=1.01x")) != same
    assert key((*SMALL, "engine.profile=sglang")) != same
    assert key((*SMALL, "cluster.network.link=infiniband-hdr")) != same


def test_a_key_is_of_what_the_files_of_networks_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolved scenario names them."""
    now = program_version.__wrapped__()
    monkeypatch.setattr("perfmodel.planning.workers.data_dir", lambda kind: tmp_path)
    (tmp_path / "infiniband-ndr.yaml").write_text("bandwidth_bytes_per_s: 1\n", encoding="utf-8")
    assert program_version.__wrapped__() != now


def _key_elsewhere(_: int) -> str:
    return key(SMALL)


def test_a_key_is_the_same_in_every_process() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(_key_elsewhere, [0]) == [key(SMALL)]


def test_a_point_is_evaluated_once_and_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "points.sqlite"
    points = [Point("llama-3.1-8b-a100", METRICS, SMALL)]
    (first,) = StoredSweep(str(file)).records(points, [20])
    assert StoredSweep(str(file)).records(points, [20]) == [first]  # another plan
    assert first.values["request_throughput"]
    assert (len(StoredPoints(file)), StoredPoints(file).most_evaluations()) == (1, 1)


def test_a_store_that_cannot_be_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(PerfmodelError, match="--store"):
        StoredPoints(tmp_path / "file" / "points.sqlite")


def test_a_model_that_cannot_serve_is_a_record_too(tmp_path: Path) -> None:
    store = StoredPoints(tmp_path / "points.sqlite")
    store.put("key", Record(problem="does not fit"))
    found = store.get("key")
    assert found is not None
    assert found.problem == "does not fit"


def test_equal_seeds_ask_for_the_same_points(tmp_path: Path) -> None:
    """A trial that begins elsewhere finds the same rate, mostly from what is known."""

    def highest_rate(start: float, name: str) -> float | None:
        trial = Trial(Base("llama-3.1-8b-a100", SMALL), ("engine.max_num_seqs=8",), 0, start, 0.9, 60)
        return StoredSweep(str(tmp_path / name)).run(try_rates, {trial: 60}, lambda *_: None)[0]

    one = highest_rate(20.0, "shared")
    count = len(StoredPoints(tmp_path / "shared"))
    assert one is not None
    assert highest_rate(24.0, "shared") == pytest.approx(one)
    assert highest_rate(24.0, "own") == pytest.approx(one)
    assert len(StoredPoints(tmp_path / "shared")) < count + len(StoredPoints(tmp_path / "own"))


_PLAN = """
from pathlib import Path
from perfmodel.planning.search import make_plan
import sys
overrides = [
    "traffic.input_tokens={distribution: fixed, value: 300}",
    "traffic.output_tokens={distribution: fixed, value: 60}",
    "plan={finalists: 2, seeds: 2, num_requests: 150, max_gpus: 2, space: {tensor_parallel_size: [1, 2], "
    "max_num_seqs: [16, 64], max_num_batched_tokens: [2048]}}",
]
result = make_plan("llama-3.1-8b-a100", overrides, Path(sys.argv[1]), workers=1)
print(result.winner.label, [round(rate, 6) for rate in result.winner.rates])
"""


def _count(file: Path) -> int:
    return len(StoredPoints(file)) if file.exists() else 0


@pytest.mark.release
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups are a matter of POSIX")
def test_a_killed_plan_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed in the middle and started again: no point twice, none lost, and the answer of one that was not killed."""
    script, file, whole = tmp_path / "plan.py", tmp_path / "points.sqlite", tmp_path / "whole.sqlite"
    script.write_text(_PLAN, encoding="utf-8")
    killed = subprocess.Popen([sys.executable, script, file], start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while _count(file) < 4:
        assert time.monotonic() < deadline
        assert killed.poll() is None, "the plan was over before it could be killed"
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    before = _count(file)
    resumed = subprocess.run([sys.executable, script, file], check=True, capture_output=True, text=True)
    undisturbed = subprocess.run([sys.executable, script, whole], check=True, capture_output=True, text=True)
    assert resumed.stdout == undisturbed.stdout
    store = StoredPoints(file)
    assert store.most_evaluations() == 1
    assert before < len(store) == len(StoredPoints(whole))
