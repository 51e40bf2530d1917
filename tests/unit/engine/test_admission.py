"""Scheduling order and reserved tokens of requests, by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import DISCIPLINES, POLICIES, KVBlockManager, Request, Scheduler, SchedulerConfig, Speculation
from perfmodel.engine.admission import Reservations
from perfmodel.errors import WorkloadError

rows = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 2)), min_size=2, max_size=12)


@given(rows)
def test_policies_order_by_their_key_and_break_ties_by_arrival(shapes: list[tuple[int, int, int]]) -> None:
    """Rows are (arrival, prompt, priority); at equal arrivals the lower number goes first."""
    requests = [
        Request(number, arrival, prompt, 5, (), urgency) for number, (arrival, prompt, urgency) in enumerate(shapes)
    ]
    first = {"fcfs": lambda r: 0, "priority": lambda r: r.priority, "shortest-first": lambda r: r.num_prompt_tokens}
    for name, amount in first.items():
        for before, after in pairwise(sorted(requests, key=POLICIES[name])):
            came = (before.arrival, before.request_id) < (after.arrival, after.request_id)
            assert amount(before) < amount(after) or (amount(before) == amount(after) and came)


def reserved(prompt: int, output: int, needed: int = 7, **settings: object) -> int:
    config = SchedulerConfig(**({"max_model_len": 100, "block_size": 4} | settings))  # type: ignore[arg-type]
    return Reservations(config, DISCIPLINES[config.batching]).num_tokens(Request(0, 0, prompt, output), needed)


def test_reserved_tokens_by_batching_discipline() -> None:
    """The last token of an answer is sampled and never computed: 10 + 5 - 1 tokens."""
    assert reserved(10, 5) == 7
    assert reserved(10, 5, reserves_output=True) == 14
    assert reserved(98, 50, reserves_output=True) == 100
    assert reserved(10, 5, batching="iteration") == reserved(10, 5, batching="static") == 100
    assert reserved(10, 5, is_contiguous=True) == 100
    assert reserved(10, 5, is_contiguous=True, reserves_output=True) == 14


@pytest.mark.parametrize(("output", "rounded"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)])
def test_orca_pow2_rounds_an_answer_up_to_a_power_of_two(output: int, rounded: int) -> None:
    """Kwon et al. 2023, section 6.1."""
    assert reserved(10, output, reserves_output=True, rounds_output=True) == 10 + rounded - 1


def test_drafts_and_lookahead_slots_are_reserved_after_the_tokens() -> None:
    """A tree of 0, 3 and 5 nodes needs 3 slots for nodes that it rejects; a drafter writes 4 tokens ahead."""
    assert reserved(10, 5, reserves_output=True, speculation=Speculation((0, 3, 5))) == 14 + 3
    assert reserved(10, 5, batching="iteration", speculation=Speculation((0, 3, 5))) == 100 + 3
    ahead = Speculation((0, 1), num_lookahead=4)
    assert reserved(10, 5, speculation=ahead) == 7 + 4
    assert reserved(10, 5, needed=98, speculation=ahead) == 100
    assert reserved(10, 5, needed=100, speculation=ahead) == 100


@pytest.mark.parametrize(
    ("settings", "num_blocks", "longest"),
    [
        ({}, 100, 100),  # max_model_len
        ({}, 10, 40),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 30}, 100, 30),
        ({"batching": "iteration"}, 25, 100),
        ({"speculation": Speculation((0, 3, 5))}, 10, 37),
    ],
)
def test_the_longest_request_that_can_run_is_accepted_and_one_token_more_is_rejected(
    settings: dict[str, object], num_blocks: int, longest: int
) -> None:
    """Computed tokens: the prompt and all of the answer but its last token."""
    for prompt in (1, longest // 2, longest):
        output = longest - prompt + 1
        config = SchedulerConfig(**({"max_model_len": 100, "block_size": 4, "max_num_batched_tokens": 64} | settings))  # type: ignore[arg-type]
        engine = Scheduler(config, KVBlockManager(num_blocks, 4))
        engine.check_can_ever_run(Request(0, 0, prompt, output))
        with pytest.raises(WorkloadError):
            engine.check_can_ever_run(Request(0, 0, prompt, output + 1))


def test_buffers_need_their_own_blocks() -> None:
    config = SchedulerConfig(max_model_len=100, block_size=4)
    for num_blocks, fits in ((13, True), (12, False)):
        engine = Scheduler(config, KVBlockManager(num_blocks, 4, num_buffers=3))
        if fits:
            engine.check_can_ever_run(Request(0, 0, 30, 11))
        else:
            with pytest.raises(WorkloadError, match="the pool has 12 blocks"):
                engine.check_can_ever_run(Request(0, 0, 30, 11))


@pytest.mark.parametrize(("batching", "counts"), [("static", (2, 1, 10)), ("iteration", (1, 1, 5))])
def test_a_static_batch_keeps_the_slots_and_blocks_of_finished_requests(batching: str, counts: tuple[int, ...]) -> None:
    """20 tokens per request, in blocks of 4. The first request finishes with its only token, the second continues."""
    config = SchedulerConfig(max_num_seqs=2, max_model_len=20, block_size=4, batching=batching)
    engine = Scheduler(config, KVBlockManager(100, 4))
    for number, output in enumerate((1, 3, 1)):
        engine.add(Request(number, 0, 4, output))
    (done,) = engine.apply(engine.plan(0), 1)
    assert done.request_id == 0
    assert engine.counts() == counts
