"""The loop of `perfmodel watch`: readings by a clock of the test, and the metrics that it serves."""

from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from perfmodel.errors import SpecError
from perfmodel.evidence.drift import Judgement, Observed, read_counts
from perfmodel.serve.watch import Watch, fetched, serve_metrics

MEANS = {"mean_ttft_ms": 50.0, "mean_tpot_ms": 10.0, "mean_e2el_ms": 900.0}


def text(count):
    """Counters after `count` requests of 3 s."""
    names = ("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds")
    lines = [f"vllm:{name}_{part} {value * count}" for name in names for part, value in (("count", 1), ("sum", 3))]
    return "\n".join(lines)


class Guard:
    """Finds drift in the readings that it is given."""

    def __init__(self, drifts):
        self._drifts, self.seen = iter(drifts), []

    def counts(self, text):
        return read_counts(text)

    def judge(self, observed):
        self.seen.append(observed)
        intervals = {metric: (0.9 * value, 1.1 * value) for metric, value in MEANS.items()}
        drifted = ("mean_tpot_ms",) if next(self._drifts) else ()
        return Judgement(Observed(2.0, 100.0, MEANS, {}, 0, 0), MEANS, intervals, drifted, "Told." if drifted else "")


def watch(drifts, longest_s=60.0, readings=None):
    """A watch of 30 s steps on a clock that only its sleeping moves."""
    clock = SimpleNamespace(now=0.0)
    answers = iter(readings or [text(10 * number) for number in range(100)])

    def fetch(url):
        answer = next(answers)
        if isinstance(answer, SpecError):
            raise answer
        return answer

    def sleep(seconds):
        clock.now += seconds

    return Watch("http://x/metrics", Guard(drifts), 30.0, longest_s, fetch, sleep, lambda: clock.now)


@pytest.mark.parametrize(
    ("drifts", "has_drifted"),
    [
        ([0, 0, 0, 0], False),
        ([1, 1, 0, 1], False),  # 60 s at most, which it may last
        ([0, 1, 1, 1], True),
        ([1, 1, 1, 0], True),  # it is over, and has been
    ],
)
def test_drift_that_lasts_longer_than_it_may_is_the_answer(drifts, has_drifted):
    lines = []
    assert watch(drifts).run(lines.append, 120.0) is has_drifted
    assert len(lines) == 4
    assert any(line.startswith("DRIFT") for line in lines) is has_drifted


def test_each_judgement_is_of_what_came_since_the_reading_before():
    one = watch([0] * 4)
    one.run(lambda _: None, 120.0)
    assert [observed.rate for observed in one.guard.seen] == pytest.approx([10 / 30] * 4)
    assert one.guard.seen[0].means["mean_e2el_ms"] == 3000.0


def test_a_server_that_is_away_or_begins_anew_is_said_and_waited_for():
    gone = SpecError("http://x/metrics: does not answer: refused.")
    one, lines = watch([0] * 4, readings=[text(10), gone, text(0), text(0), text(20)]), []
    assert one.run(lines.append, 120.0) is False
    assert lines[0] == str(gone)
    assert lines[1].startswith("no request has finished, or the server has begun anew")
    assert "2 req/s" in lines[3]


def test_what_was_judged_last_is_served_as_metrics():
    one = watch([1])
    one.run(lambda _: None, 30.0)
    server = serve_metrics(one, "127.0.0.1", 0)
    try:
        with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=5) as answer:
            body = answer.read().decode()
        with pytest.raises(SpecError, match="--port"):
            serve_metrics(one, "127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        server.server_close()
    assert "perfmodel_drifted_seconds 30" in body
    assert 'perfmodel_mean_tpot_ms{of="high"} 11' in body


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:8000", "http://127.0.0.1:1/metrics"])
def test_what_is_no_server_is_refused_with_a_sentence(url):
    with pytest.raises(SpecError, match=r"expected a server's metrics|does not answer"):
        fetched(url)
