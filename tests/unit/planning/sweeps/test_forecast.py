"""The progress of a search: requests done over requests expected, updated as the search proceeds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perfmodel.planning.search import make_plan
from perfmodel.planning.sweep import Forecast

SHORT = (
    "traffic.input_tokens={distribution: fixed, value: 300}",
    "traffic.output_tokens={distribution: fixed, value: 40}",
    "traffic.arrivals.rate=60",
)
SPACE = "tensor_parallel_size: [1, 2], max_num_seqs: [64], max_num_batched_tokens: [2048]"


def test_a_forecast_counts_done_and_expected_requests() -> None:
    """By hand: three runs of 10 requests expected, four made; the fourth is expected only after the third was not the
    last."""
    shown: list[tuple[int, int | None]] = []
    forecast = Forecast(lambda done, total: shown.append((done, total)))
    forecast.expect("search", 30)
    for is_last in (False, False, False, True):
        forecast.did("search", 10, is_last)
    assert shown == [(0, 30), (10, 30), (20, 30), (30, 40), (40, 40)]


def test_a_task_that_ends_early_lowers_the_total() -> None:
    shown: list[tuple[int, int | None]] = []
    forecast = Forecast(lambda done, total: shown.append((done, total)))
    forecast.expect("one", 60)
    forecast.expect("other", 40)
    forecast.did("one", 20)
    forecast.expect("one", 0)
    assert shown[-1] == (20, 60)


def test_a_search_takes_its_forecast_within_a_factor_of_two(tmp_path: Path) -> None:
    """From a tenth of the search on. Time is proportional to requests, so their ratio is the ratio of durations."""
    counts: list[tuple[int, int]] = []

    @contextmanager
    def stage(name: str) -> Iterator[object]:
        yield (lambda done, total: counts.append((done, total))) if "finalists" in name else None

    plan = f"plan={{finalists: 3, seeds: 2, max_gpus: 4, num_requests: 200, space: {{{SPACE}}}}}"
    make_plan("llama-3.1-8b-a100", (*SHORT, plan), tmp_path / "points.sqlite", 1, stages=stage)  # type: ignore[arg-type]
    whole = counts[-1][0]
    assert counts[-1] == (whole, whole)
    assert [done for done, _ in counts] == sorted(done for done, _ in counts)
    ratios = [total / whole for done, total in counts if done >= 0.1 * whole]
    assert min(ratios) >= 0.5
    assert max(ratios) <= 2.0
