"""Whoever follows the events of the prefix cache knows at every moment what it holds, and how many copies of it."""

from collections import Counter
from dataclasses import replace

from engine_integrity import check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.engine import KVBlockManager, Request, SchedulerConfig, ServeLoop, StepPlan
from workloads import (
    BLOCK_SIZE,
    Case,
    cached_in,
    cases,
    grouped_cases,
    pipelined_cases,
    serve_in_stages,
    serve_stepwise,
    speculating_cases,
)


class Mirror:
    """What the events add up to. With groups, contents carry the number of theirs."""

    def __init__(self, blocks: KVBlockManager, has_groups: bool) -> None:
        self.blocks, self.has_groups = blocks, has_groups
        self.copies = Counter(cached_in(blocks))
        blocks.listener = self

    @property
    def held(self) -> set[object]:
        return set(self.copies)

    def on_stored(self, contents, parent, group):
        assert parent is None or self.has_groups or parent in self.held, "nothing stands behind what is not there"
        new = {self.named(content, group) for content in contents}
        assert len(new) == len(contents) > 0
        self.copies.update(new)

    def on_removed(self, content, group):
        name = self.named(content, group)
        assert self.copies[name] > 0, "what is not there was removed"
        self.copies[name] -= 1
        self.copies += Counter()  # without what has no copy left

    def on_cleared(self):
        self.copies.clear()

    def named(self, content, group):
        assert self.has_groups or group == 0
        return (group, content) if self.has_groups else content


def followed(case: Case, has_answers: bool = False) -> set[object]:
    """What is cached once `case` is served, with a mirror at its blocks.

    has_answers: blocks of answers are told of as they fill
    """
    mirrors: list[Mirror] = []

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        if not mirrors:
            mirrors.append(Mirror(loop.scheduler.blocks, bool(case.groups)))
        if has_answers:
            loop.scheduler.publish_answers()
            check_integrity(loop.scheduler)
        loop.scheduler.blocks.catch_up()
        assert mirrors[0].held == cached_in(loop.scheduler.blocks)

    serve = serve_in_stages if case.config.pipeline_parallel_size > 1 else serve_stepwise
    serve(case, after_step)
    held = set(mirrors[0].held) if mirrors else set()
    if mirrors:
        mirrors[0].blocks.forget_all()
        assert not mirrors[0].held
    return held


@given(cases())
@settings(max_examples=20, deadline=None)
def test_events_add_up_to_what_is_cached(case: Case) -> None:
    followed(case)


@given(grouped_cases())
@settings(max_examples=15, deadline=None)
def test_events_of_groups_add_up_to_what_is_cached(case: Case) -> None:
    followed(case)


@given(speculating_cases())
@settings(max_examples=20, deadline=None)
def test_events_under_speculation_add_up_to_what_is_cached(case: Case) -> None:
    followed(case)


@given(st.one_of(cases(), grouped_cases(), speculating_cases(), pipelined_cases()))
@settings(max_examples=40, deadline=None)
def test_events_of_growing_answers_add_up_to_what_is_cached(case: Case) -> None:
    followed(replace(case, has_turns=True), has_answers=True)


@given(st.one_of(cases(), speculating_cases(), pipelined_cases()))
@settings(max_examples=20, deadline=None)
def test_in_the_end_as_much_is_cached_as_if_answers_had_been_told_of_then(case: Case) -> None:
    """Where blocks suffice for all there ever was: nothing is lost between."""
    ample = replace(case, has_turns=True, num_blocks=10_000, config=replace(case.config, batching="continuous"))
    assert followed(ample, has_answers=True) == followed(ample)


def test_blocks_of_an_answer_are_cached_as_it_fills_them() -> None:
    """4 tokens a block. Two requests with prompts of 6 decode side by side: their second block is full with the second
    token of the answer in the KV, the third four steps later; what has no next prompt is not told of."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=160, block_size=BLOCK_SIZE)
    rows = ((0, 6, 12, (), 0), (0, 6, 12, (), 0))
    told: list[int] = []

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        loop.scheduler.publish_answers()
        told.append(len(cached_in(loop.scheduler.blocks)))

    serve_stepwise(Case(config, 100, True, False, rows, has_turns=True), after_step)
    assert told == [2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 8, 8]
    told.clear()
    serve_stepwise(Case(config, 100, True, False, rows), after_step)
    assert not any(told)


def test_a_chain_is_told_in_order_with_what_stands_before_it() -> None:
    """4 tokens a block. A prompt of two blocks, then one that begins with them and has one more."""
    told: list[tuple[object, ...]] = []

    class Listener:
        def on_stored(self, contents, parent, group):
            told.append(("stored", tuple(contents), parent))

        def on_removed(self, content, group):
            told.append(("removed", content))

        def on_cleared(self):
            told.append(("cleared",))

    blocks = KVBlockManager(3, 4)
    blocks.listener = Listener()
    for number, hashes in enumerate([("a", "b"), ("a", "b", "c"), ("d",)]):
        request = Request(number, 0, 4 * len(hashes), 1, hashes)
        blocks.allocate(request, request.num_prompt_tokens, blocks.cached_prefix(request))
        request.num_computed_tokens = request.num_prompt_tokens
        blocks.publish(request)
        blocks.free(request)
    blocks.forget_all()
    assert told == [
        ("stored", ("a", "b"), None),
        ("stored", ("c",), "b"),
        ("removed", "c"),  # the end of a chain goes first
        ("stored", ("d",), None),
        ("cleared",),
    ]
