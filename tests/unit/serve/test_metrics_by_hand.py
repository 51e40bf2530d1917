"""`Histogram` and `EngineCounts`, value by value: buckets, sums, spans of a request, tokens per second."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import Request, StepPlan, StepRecord
from perfmodel.serve.emulator import RequestParams
from perfmodel.serve.metrics.counts import HISTOGRAMS, EngineCounts, Histogram, one_two_five
from perfmodel.sim.clock import TICKS_PER_S

BOUNDS = (0.5, 1.0, 2.0, 5.0)
values = st.lists(st.tuples(st.sampled_from([0.0, 0.4, 0.5, 0.6, 1.0, 3.0, 5.0, 5.1, 99.0]), st.integers(1, 9)))


@given(values, values)
def test_buckets_are_cumulative_and_sums_add_up(some, others) -> None:
    histograms = []
    for entries in (some, others):
        histogram = Histogram(BOUNDS)
        for value, times in entries:
            histogram.add(value, times)
        histograms.append(histogram)
    both, everything = histograms[0].plus(histograms[1]), [*some, *others]
    for name, count in both.buckets:
        assert count == sum(times for value, times in everything if value <= float(name))
    assert both.total == pytest.approx(sum(value * times for value, times in everything))
    assert both.num_values == sum(times for _, times in everything)


def test_buckets_of_tokens_are_those_of_vllm() -> None:
    assert one_two_five(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert one_two_five(300) == (1, 2, 5, 10, 20, 50, 100, 200)


def test_spans_and_tokens_of_a_finished_request() -> None:
    """It arrives at 10 s, runs from 12 s, has its first token at 15 s and its fifth and last at 23 s."""
    counts, request = EngineCounts({}), Request(0, 10 * TICKS_PER_S, 100, 5)
    request.first_scheduled_at, request.first_token_at = 12 * TICKS_PER_S, 15 * TICKS_PER_S
    request.finished_at = 23 * TICKS_PER_S
    request.num_cached_tokens, request.num_preemptions = 64, 2
    counts.add_finished(request, RequestParams(finish_reason="stop", max_tokens=8, n=3))
    sums = {name: counts.of[name].total for name in HISTOGRAMS if counts.of[name].num_values}
    seconds = {"e2e": 13, "queue": 2, "inference": 11, "prefill": 3, "decode": 8, "tpot": 2}
    tokens = {"prompt": 100, "generation": 5, "computed": 36, "max_tokens": 8, "preemptions": 2, "n": 3}
    assert sums == pytest.approx(seconds | tokens)
    assert counts.ended == {"stop": 1}
    assert (counts.done_prompt_tokens, counts.done_generation_tokens, counts.done_cached_tokens) == (100, 5, 64)


def test_an_answer_of_one_token_has_a_tpot_of_zero() -> None:
    counts, request = EngineCounts({}), Request(0, 0, 100, 1)
    request.first_scheduled_at = request.first_token_at = request.finished_at = TICKS_PER_S
    counts.add_finished(request, RequestParams())
    assert (counts.of["tpot"].total, counts.of["tpot"].num_values, counts.of["max_tokens"].total) == (0, 1, 1)


def test_prompts_are_cached_or_transferred() -> None:
    counts, here, moved = EngineCounts({}), Request(0, 0, 100, 5), Request(1, 0, 70, 5)
    here.num_cached_tokens = 30
    moved.num_transferred_tokens, moved.num_cached_tokens = 70, 16
    for request in (here, moved):
        counts.add_prompt(request)
    assert (counts.prompt_tokens, counts.num_cached, counts.num_transferred) == (170, 30, 70)


def step(counts: EngineCounts, number: int, plan: StepPlan, num_prompt: int = 0, **fields: int) -> None:
    """Steps of 2 s, one every 3 s."""
    row = dict.fromkeys(StepRecord._fields, 0) | {"num_decodes": len(plan.decodes)} | fields
    times = {"start": 3 * number * TICKS_PER_S, "end": (3 * number + 2) * TICKS_PER_S}
    counts.add_step(StepRecord(**(row | times)), plan, [(7 * TICKS_PER_S, 2)] if number == 0 else [], num_prompt)  # type: ignore[arg-type]


def plan_of(decodes: int, samples: int = 0) -> StepPlan:
    plan = StepPlan(0)
    plan.decodes = [Request(number, 0, 10, 10) for number in range(decodes)]
    plan.samples = [Request(100 + number, 0, 10, 10) for number in range(samples)]
    return plan


def test_counters_add_up_and_throughput_is_over_40_steps() -> None:
    """Steps of 4 decodes; the first also samples 2 prompts of 50 tokens. Idle seconds between steps count."""
    counts = EngineCounts({})
    for number in range(41):
        is_first = number == 0
        step(counts, number, plan_of(4, 2 * is_first), 50 * is_first, num_gaps=4, decode_context=100 + number)
        assert (counts.throughput > 0) == (number >= 39)
    assert counts.generation_tokens == 41 * 4 + 2
    assert (counts.of["iteration"].total, counts.of["iteration"].num_values) == (41 * 4 + 2 + 50, 41)
    assert (counts.of["itl"].total, counts.of["itl"].num_values) == (2 * 4 * 41 + 7 * 2, 4 * 41 + 2)
    assert counts.throughput == pytest.approx((40 * 4 + 2) / (3 * 39 + 2))
    assert counts.decode_context == 140
    for number in range(41, 80):
        step(counts, number, plan_of(4))
    assert counts.throughput == pytest.approx(40 * 4 / (40 * 3))


@pytest.mark.parametrize("splits", [False, True])
def test_tokens_of_one_step_count_as_one_gap_or_split_it(splits: bool) -> None:
    """Three requests with drafts of three tokens, of which 0, 1 and 3 are accepted, in a step of 2 s."""
    counts, plan = EngineCounts({}, splits_gaps=splits), plan_of(3)
    plan.draft_depths, plan.num_accepted = [3, 3, 3], [0, 1, 3]
    step(counts, 1, plan, num_gaps=3, num_drafts=3, num_draft_tokens=9, num_accepted_tokens=4)
    assert counts.of["itl"].total == pytest.approx(2 * 3)
    assert counts.of["itl"].num_values == (1 + 2 + 4 if splits else 3)
    assert counts.generation_tokens == 3 + 4
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 9, 4)
    assert counts.accepted == {0: 1, 1: 1, 3: 1}
