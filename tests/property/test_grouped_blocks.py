"""Laws of KV blocks in groups: conservation, leaps, what a window never shorter than the sequence equals, hits."""

from dataclasses import replace

import pytest
from engine_integrity import blocks_of, check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st
from test_leaps import run

from perfmodel.engine import DISCIPLINES, GroupedKVBlocks, Request, Scheduler, SchedulerConfig, ServeLoop, StepPlan
from perfmodel.kv_groups import KVGroup, most_rows
from workloads import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Case,
    cases,
    grouped_cases,
    serve_in_stages,
    serve_stepwise,
    speculating_cases,
)


@given(grouped_cases())
@settings(max_examples=150, deadline=None)
def test_blocks_of_all_groups_are_conserved_and_every_request_ends(case: Case) -> None:
    most = {g: _most_of(g, case.max_in_flight_tokens) for g in case.groups}

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        check_integrity(loop.scheduler)
        for request in loop.scheduler.running:
            if request.tables is not None:
                rows = len(request.block_ids)
                for group, first in zip(case.groups, request.tables.firsts, strict=True):
                    assert rows - first <= most[group]

    served = serve_stepwise(case, after_step)
    assert sorted(r.request_id for r in served.requests) == list(range(len(case.rows)))
    assert all(r.num_output_tokens == r.max_output_tokens and not r.block_ids for r in served.requests)


def _most_of(group: KVGroup, num_new_tokens: int) -> int:
    return most_rows([group], MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, num_new_tokens)


@given(grouped_cases(), st.sampled_from([1, 1, 2]), st.sampled_from([None, None, 1, 3]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_leaps_change_nothing(case: Case, num_replicas: int, concurrency: int | None, in_lockstep: bool) -> None:
    stepped, steps, _ = run(case, False, num_replicas, concurrency, in_lockstep)
    leapt, leap_steps, num_records = run(case, True, num_replicas, concurrency, in_lockstep)
    assert leapt == stepped
    assert leap_steps == steps
    assert num_records <= steps


@given(cases(), st.integers(1, 3), st.sampled_from([MAX_MODEL_LEN, MAX_MODEL_LEN + 3, 10_000]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_windows_as_long_as_any_sequence_are_full_attention(case: Case, count: int, span: int, is_chunk: bool) -> None:
    """n groups that keep all tokens take n times as many blocks, from a pool n times as large."""
    case = replace(case, rolling_span=None, has_prefix_cache=False, config=replace(case.config, batching="continuous"))
    kinds = [KVGroup(1), *[KVGroup(1, span if not is_chunk else -(-span // 4) * 4, is_chunk)] * count]
    grouped = replace(case, groups=tuple(kinds), num_blocks=case.num_blocks * len(kinds))
    assert serve_stepwise(grouped).fingerprints == serve_stepwise(case).fingerprints


@given(cases(), st.sampled_from([1, 4, 7, 20]))
@settings(max_examples=100, deadline=None)
def test_with_room_for_all_groups_change_no_plan_but_what_is_found_in_the_cache(case: Case, span: int) -> None:
    config = replace(case.config, batching="continuous", reserves_output=False)
    case = replace(case, rolling_span=None, num_blocks=100_000, config=config)
    grouped = replace(case, groups=(KVGroup(1), KVGroup(1, span)))
    plain, windowed = serve_stepwise(case), serve_stepwise(grouped)
    assert windowed.fingerprints == plain.fingerprints  # nothing was ever reused, so windows are there, too
    usage = [(one.used_blocks, other.used_blocks) for one, other in zip(windowed.records, plain.records, strict=True)]
    assert all(grouped <= 2 * full for grouped, full in usage)


@given(speculating_cases(), st.sampled_from([1, 6, 20]))
@settings(max_examples=100, deadline=None)
def test_groups_under_speculation_and_pipelines_keep_their_books(case: Case, span: int) -> None:
    groups = (KVGroup(1), KVGroup(1, span), KVGroup(1, 16, is_chunk=True))
    config = replace(case.config, batching="continuous", reserves_output=False)
    case = replace(case, rolling_span=None, groups=groups, config=config, num_blocks=(case.num_blocks + 40) * 3)
    serve_stepwise(case, lambda loop, plan: check_integrity(loop.scheduler))
    staged = replace(case, config=replace(config, speculation=None, pipeline_parallel_size=3))
    serve_in_stages(staged, lambda loop, plan: check_integrity(loop.scheduler))


@given(st.sampled_from([1, 4, 16]), st.integers(1, 140), st.integers(0, 400), st.integers(1, 64))
def test_what_a_window_keeps_is_what_a_query_sees(block: int, window: int, computed: int, new: int) -> None:
    """With c tokens computed the next query, of token c, sees tokens c - W + 1 to c: rows before the first are free."""
    group = KVGroup(1, window)
    seen = {token // block for token in range(max(0, computed - window + 1), computed + new)}
    assert min(seen) == group.first_row(computed, block)
    assert len(seen) <= group.most_kept(block, new)
    assert len(seen) <= group.most_reserved(new, computed + new, block)


@given(st.sampled_from([1, 4, 16]), st.integers(1, 8), st.integers(0, 400), st.integers(1, 64))
def test_what_a_chunk_keeps_is_what_a_query_sees(block: int, blocks_of_chunk: int, computed: int, new: int) -> None:
    chunk = blocks_of_chunk * block
    group = KVGroup(1, chunk, is_chunk=True)
    assert group.first_row(computed, block) == computed // chunk * blocks_of_chunk
    assert -(-(computed + new) // block) - group.first_row(computed, block) <= group.most_kept(block, new)


@given(st.sampled_from([1, 4, 16]), st.integers(1, 140), st.booleans(), st.integers(0, 30))
def test_a_row_is_given_up_at_the_first_count_of_tokens_that_no_longer_sees_it(
    block: int, span: int, is_chunk: bool, row: int
) -> None:
    group = KVGroup(1, span, is_chunk)
    given_up_at = group.given_up_at(row, block)
    assert group.first_row(given_up_at - 1, block) <= row < group.first_row(given_up_at, block)


@pytest.mark.parametrize("name", sorted(DISCIPLINES))
def test_reservations_of_other_disciplines_are_kept_too(name: str) -> None:
    groups = (KVGroup(1), KVGroup(1, 8))
    rows = tuple((0, 20, 60, (), 0) for _ in range(6))
    case = Case(replace(SMALL.config, batching=name), 200, False, True, rows, groups=groups)
    serve_stepwise(case, lambda loop, plan: check_integrity(loop.scheduler))


def test_a_hit_needs_the_window_before_it() -> None:
    """vLLM: of a windowed group the last ceil((W - 1) / b) rows before the hit, of full attention all.

    A first request of 10 rows with a window of 9 tokens (2 rows of 4, and the one that the query is in) leaves all of
    the first group and all of the second; then rows 0 to 7 of the window's group are reused for something else: rows 8
    and 9 are enough for a hit of 10 rows. Without row 8 there is none, since rows 0 and 1 are not there either.
    """
    blocks = GroupedKVBlocks(100, BLOCK_SIZE, (KVGroup(1), KVGroup(1, 9)), True, 64)
    hashes = tuple(("a", i) for i in range(10))
    first = _prompt(0, 41, hashes)
    blocks.allocate(first, 41)
    first.num_computed_tokens = 41
    blocks.publish(first)
    blocks.free(first)
    assert len(blocks.cached_prefix(_prompt(1, 41, hashes))) == 10
    for row in range(8):
        blocks._forget(blocks._block_of[1, hashes[row]])
    assert len(blocks.cached_prefix(_prompt(1, 41, hashes))) == 10
    again = _prompt(2, 41, hashes)
    assert blocks.can_allocate(again, 41, blocks.cached_prefix(again))
    blocks.allocate(again, 41, blocks.cached_prefix(again))
    assert (len(blocks_of(blocks, again)), blocks.num_used) == (11 + 3, 11 + 3)
    blocks.free(again)
    blocks._forget(blocks._block_of[1, hashes[8]])
    assert blocks.cached_prefix(_prompt(3, 41, hashes)) == []


def _prompt(number: int, num_tokens: int, hashes: tuple[tuple[str, int], ...]) -> Request:
    return Request(number, 0, num_tokens, 10, hashes)


SMALL = Case(SchedulerConfig(max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE), 100, False, True, ())


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 9])
def test_a_leap_takes_no_more_blocks_than_are_free(num_groups: int, num_rows: int) -> None:
    """Two requests of a full row of 4 tokens, and blocks for `num_rows` more rows in all groups, of which the next plan
    takes two. Its predicted repeats preempt no request; every two further rows allow 4 repeats."""
    groups = tuple(KVGroup(1) for _ in range(num_groups))
    blocks = GroupedKVBlocks((2 + num_rows) * num_groups, 4, groups, enable_prefix_caching=False, max_model_len=64)
    engine = Scheduler(SchedulerConfig(max_num_batched_tokens=16, max_model_len=64, block_size=4), blocks)
    for number in range(2):
        engine.add(Request(number, 0, 4, 4 * (1 + num_rows)))
    engine.apply(engine.plan(0), 1)
    plan = engine.plan(1)  # allocates a row per request, if there is one
    repeats = engine.max_repeats(plan)
    for now in range(2, 2 + repeats):
        engine.apply(plan, now)
        plan = engine.plan(now)
        assert [request.request_id for request in plan.decodes] == [0, 1]
        assert not plan.preempted
    assert repeats >= 4 * ((num_rows - 2) // 2)
