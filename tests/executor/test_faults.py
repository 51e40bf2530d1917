"""A rank that dies ends the run with one sentence, and with what was answered until then."""

import time

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.specs import load_scenario  # noqa: E402
from perfmodel_executors.parallel.ranks import RankDiedError  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402

SETTINGS = (
    "engine.tensor_parallel_size=2",
    "traffic.num_requests=200",
    "traffic.input_tokens={distribution: fixed, value: 24}",
    "traffic.output_tokens={distribution: fixed, value: 4}",
)


class Killing:
    """Ends the second rank's process before a step, and notes when."""

    def __init__(self, backend, before_step):
        self.backend, self.left, self.killed_at = backend, before_step, None

    def execute(self, plan):
        self.left -= 1
        if not self.left:
            self.backend.runner._ranks.processes[0].kill()
            self.killed_at = time.monotonic()
        return self.backend.execute(plan)


def run(before_step):
    made = []

    def wrap(backend, _):
        made.append(Killing(backend, before_step))
        return made[0]

    try:
        return execute_scenario(load_scenario("tiny-llama-cpu", SETTINGS), wrap=wrap), time.monotonic() - made[
            0
        ].killed_at
    except RankDiedError as error:
        return error, time.monotonic() - made[0].killed_at


@pytest.mark.xdist_group("ranks")
def test_what_was_answered_is_kept_and_the_end_comes_soon():
    result, seconds = run(before_step=40)
    assert 0 < result.summary["completed"] < 200
    assert result.cut_short.startswith("rank 1 of 2 ended in the middle of a step (exit status -9)")
    assert any(note.startswith("Cut short: rank 1") for note in result.notes)
    assert seconds < 10
    assert result.to_json()["cut_short"] == result.cut_short


@pytest.mark.xdist_group("ranks")
def test_without_an_answer_there_is_the_sentence_alone():
    error, seconds = run(before_step=2)
    assert str(error).startswith("rank 1 of 2 ended")
    assert seconds < 10
