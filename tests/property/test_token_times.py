"""What a `TokenWatch` says of requests is what one finds by writing down each of their tokens, leaps or not."""

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_leaps import run

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop, StepPlan
from perfmodel.engine.token_watch import TokenWatch
from workloads import Case, cases, serve_stepwise, speculating_cases

PACES = st.lists(st.sampled_from([None, 1, 10, 40, 100, 1000]), min_size=1, max_size=3).map(tuple)


def written_down(case: Case) -> dict[int, tuple[int, int]]:
    """(how long the reader waits, longest gap) of each request, from a list of the times of all its tokens."""
    came: dict[int, list[int]] = defaultdict(list)
    clock = {"now": 0}

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        accepted = accepted_of.pop(plan.index, None) or [0] * len(plan.decodes)
        for request, right, depth in zip(plan.decodes, accepted, plan.draft_depths or [0] * len(accepted), strict=True):
            came[request.request_id] += [clock["now"]] * (1 + min(right, depth))
        for request in plan.samples:
            came[request.request_id].append(clock["now"])

    accepted_of: dict[int, list[int] | None] = {}

    class Clocked:  # not a subclass, which a compiled loop cannot have
        def __init__(self, loop: ServeLoop) -> None:
            self._loop = loop

        def __getattr__(self, name: str) -> object:
            return getattr(self._loop, name)

        def finish_step(self, plan, started, now, num_accepted=None):  # type: ignore[no-untyped-def]
            clock["now"], accepted_of[plan.index] = now, num_accepted
            return self._loop.finish_step(plan, started, now, num_accepted)

    class Plain(Case):
        def loop(self) -> ServeLoop:
            return Clocked(super().loop())  # type: ignore[return-value]

    plain = Plain(**{name: getattr(case, name) for name in Case.__dataclass_fields__ if name != "paces"})
    serve_stepwise(plain, after_step)
    return {number: brute_force(times, case.paces[number % len(case.paces)]) for number, times in came.items()}


def brute_force(times: list[int], pace: int | None) -> tuple[int, int]:
    """The reader is let read: it has read token k - 1 at `done`, and takes the next when that is there."""
    waited, done = 0, times[0] + (pace or 0)
    for time in times[1:] if pace is not None else ():
        waited += max(time - done, 0)
        done = max(time, done) + pace
    return waited, max([later - earlier for earlier, later in pairwise(times)], default=0)


def watched(request: Request) -> tuple[int, int]:
    assert request.token_times is not None
    assert request.token_times.num_tokens == request.num_output_tokens
    return request.token_times.reader_wait, request.token_times.longest_gap


@given(st.one_of(cases(), speculating_cases()), PACES)
@settings(max_examples=200, deadline=None)
def test_the_watch_says_what_a_list_of_all_tokens_says(case: Case, paces: tuple[int | None, ...]) -> None:
    case = replace(case, paces=paces)
    assert {r.request_id: watched(r) for r in serve_stepwise(case).requests} == written_down(case)


@given(cases(), PACES)
@settings(max_examples=150, deadline=None)
def test_leaps_over_many_tokens_say_the_same(case: Case, paces: tuple[int | None, ...]) -> None:
    case = replace(case, paces=paces)
    assert {row[0]: row[-2:] for row in run(case, True)[0]} == written_down(case)


@given(cases(), PACES, st.sampled_from([2, 3]), st.booleans())
@settings(max_examples=75, deadline=None)
def test_and_so_they_do_on_several_engines(
    case: Case, paces: tuple[int | None, ...], num_replicas: int, in_lockstep: bool
) -> None:
    case = replace(case, paces=paces)
    stepped, leapt = (run(case, can_leap, num_replicas, None, in_lockstep)[0] for can_leap in (False, True))
    assert leapt == stepped


@pytest.mark.parametrize(("gap", "pace", "waited"), [(10, 10, 0), (9, 10, 0), (11, 10, 49), (30, 10, 980)])
def test_a_reader_of_even_tokens_waits_for_what_each_is_late(gap: int, pace: int, waited: int) -> None:
    """50 tokens, `gap` ticks from one to the next: the reader waits 49 (gap - pace) in all, or not at all."""
    scheduler = Scheduler(SchedulerConfig(), KVBlockManager(100, 16), TokenWatch(lambda _: pace))
    loop = ServeLoop(scheduler)
    request, now = Request(0, 0, 5, 50), 0
    loop.add(request)
    while (plan := loop.start_step(now)) is not None:
        loop.finish_step(plan, now, now + gap)
        now += gap
    assert watched(request) == (waited, gap)


def test_what_was_early_makes_up_for_what_is_late() -> None:
    """Five tokens 1 tick apart and one after 40: at 10 ticks a token it is due 50 after the first, and comes at 44."""
    assert brute_force([0, 1, 2, 3, 4, 44], 10) == (0, 40)
    assert brute_force([0, 1, 2, 3, 4, 54], 10) == (4, 50)


@given(st.lists(st.integers(1, 90), min_size=5, max_size=12), st.integers(2, 4), st.sampled_from([1, 10, 40]))
@settings(max_examples=100, deadline=None)
def test_a_leap_matches_its_single_steps(gaps: list[int], num_steps: int, pace: int) -> None:
    """After `num_steps` steps, the rest one by one or in one leap; both match the brute force."""
    ends = list(accumulate(gaps, initial=0))
    results = set()
    for leaps in (False, True):
        watch, request = TokenWatch(lambda _: pace), Request(0, 0, 5, 50)
        request.num_output_tokens = 1
        watch.take(request, 0)
        request.last_token_at = 0
        watch.join(request, 0)
        for age in range(1, num_steps + 1 if leaps else len(ends)):
            watch.pass_step(age, ends[age - 1], ends[age], {request: 0})
        if leaps:
            watch.begin_leap(ends[num_steps], gaps[num_steps:])
            watch.pass_leap(num_steps + 1, ends[num_steps], {request: 0})
        request.num_output_tokens += len(gaps)
        watch.leave(request, 0, len(gaps))
        results.add(watched(request))
    assert results == {brute_force(ends, pace)}
