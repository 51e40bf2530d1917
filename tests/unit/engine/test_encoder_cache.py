"""Images in the scheduler: what a step encodes, where chunks end, and what stays cached."""

from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import EncoderInput, EncoderRules, KVBlockManager, Request, Scheduler, SchedulerConfig, StepPlan
from perfmodel.engine.encoder_cache import EncoderCache


def scheduler_of(budget: int, cache_size: int, is_whole: bool = False, **config: int) -> Scheduler:
    rules = EncoderRules(budget, cache_size, is_whole, is_ahead=False)
    return Scheduler(SchedulerConfig(max_model_len=4096, encoder=rules, **config), KVBlockManager(1000, 16))


def request_of(number: int, prompt: int, *images: tuple[int, int, object]) -> Request:
    request = Request(number, number, prompt, 3)
    request.encoder_inputs = tuple(EncoderInput(*image) for image in images)
    return request


def steps_of(scheduler: Scheduler, most: int = 200) -> list[StepPlan]:
    plans = []
    while scheduler.has_requests and len(plans) < most:
        plans.append(scheduler.plan(len(plans)))
        scheduler.apply(plans[-1], len(plans))
    assert not scheduler.has_requests, "requests wait for ever"
    return plans


def chunks_of(plan: StepPlan) -> list[tuple[int, int]]:
    return [(grant.request.request_id, grant.num_new_tokens) for grant in plan.chunks]


def encoded(plan: StepPlan) -> list[tuple[int, int]]:
    return [(request.request_id, item.offset) for request, item in plan.encoded]


def test_a_chunk_ends_before_an_image_that_the_budget_does_not_hold() -> None:
    """A step encodes 100 tokens: the first image, not the second; the prompt waits for it behind 110 of its tokens."""
    scheduler = scheduler_of(100, 1000)
    scheduler.add(request_of(0, 300, (10, 100, "a"), (110, 100, "b")))
    first, second = steps_of(scheduler)[:2]
    assert (chunks_of(first), encoded(first)) == ([(0, 110)], [(0, 10)])
    assert (chunks_of(second), encoded(second)) == ([(0, 190)], [(0, 110)])


def test_an_image_is_encoded_with_the_first_of_its_tokens() -> None:
    """A budget of 64 tokens cuts the prompt within the image, which is encoded once, in the step that has token 60."""
    scheduler = scheduler_of(100, 100, max_num_batched_tokens=64)
    scheduler.add(request_of(0, 200, (60, 100, "a")))
    plans = steps_of(scheduler)
    assert [encoded(plan) for plan in plans[:4]] == [[(0, 60)], [], [], []]
    assert [count for plan in plans[:4] for _, count in chunks_of(plan)] == [64, 64, 64, 8]


def test_whole_images_are_not_cut() -> None:
    scheduler = scheduler_of(64, 64, is_whole=True, max_num_batched_tokens=64)
    scheduler.add(request_of(0, 150, (20, 60, "a")))
    assert [count for plan in steps_of(scheduler) for _, count in chunks_of(plan)] == [20, 64, 64, 2]


def test_a_request_waits_while_the_cache_is_full() -> None:
    """The first request's image fills the cache until its prompt is past it; the second is encoded a step later."""
    scheduler = scheduler_of(100, 100)
    scheduler.add(request_of(0, 120, (0, 100, "a")))
    scheduler.add(request_of(1, 120, (0, 100, "b")))
    plans = steps_of(scheduler)
    assert [encoded(plan) for plan in plans[:2]] == [[(0, 0)], [(1, 0)]]


def test_equal_images_are_encoded_once() -> None:
    scheduler = scheduler_of(1000, 1000)
    scheduler.add(request_of(0, 120, (0, 100, "a")))
    scheduler.add(request_of(1, 130, (0, 100, "a")))
    assert [pair for plan in steps_of(scheduler) for pair in encoded(plan)] == [(0, 0)]


def test_an_engine_that_starts_anew_encodes_again() -> None:
    scheduler = scheduler_of(budget=10, cache_size=20)
    for number in range(2):
        scheduler.add(request_of(number, 12, (1, 8, "same")))
        assert sum(len(plan.encoded) for plan in steps_of(scheduler)) == 1
        scheduler.forget_all()


def test_an_image_at_the_end_of_a_prompt_stays_while_a_plan_is_in_flight() -> None:
    """Planned ahead, the prompt's last token counts once its successor has come, as vLLM counts placeholders; planned
    step by step, once it has run."""
    for is_ahead, held in ((True, [10, 0]), (False, [0, 0])):
        rules = EncoderRules(10, 10, is_ahead=is_ahead)
        scheduler = Scheduler(SchedulerConfig(encoder=rules), KVBlockManager(100, 16))
        scheduler.add(request_of(0, 20, (10, 10, "a")))
        cache, plans = scheduler._running.encoder, [scheduler.plan(0), scheduler.plan(1)]
        assert cache is not None
        for number, plan in enumerate(plans):
            scheduler.apply(plan, number)
            assert 10 - cache.num_reclaimable == held[number]


def test_what_is_taken_back_may_be_encoded_for_another() -> None:
    """80 of 100 tokens are given to a request that is preempted in the same plan; 80 are free for the next one again,
    and its own image, as in vLLM, counts as cached."""
    cache, plan = EncoderCache(EncoderRules(100, 160)), StepPlan(0)
    first, second = (request_of(number, 90, (5, 80, number)) for number in range(2))
    cache.encode(first, cache.fit(first, 0, 90, plan)[1], plan)
    assert cache.fit(second, 0, 90, plan) == (5, ())
    cache.take_back(first, plan)
    cache.free(first)
    assert plan.encoded == ()
    assert cache.fit(second, 0, 90, plan) == (90, (0,))
    assert cache.fit(first, 0, 90, StepPlan(1)) == (90, ())


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=4), min_size=1, max_size=8),
    st.integers(40, 120),
    st.sampled_from([16, 64, 512]),
)
def test_every_image_is_encoded_once_and_within_the_budget(
    prompts: list[list[tuple[int, int]]], budget: int, max_num_batched_tokens: int
) -> None:
    """Conservation: unlike images of requests that nobody preempts are each encoded in one step, before or with their
    first token, no step encodes more than the budget, and all is given back."""
    config = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 8}
    scheduler = scheduler_of(budget, budget, **config)
    sent, expected = [], 0
    for number, gaps in enumerate(prompts):
        images, at = [], 0
        for place, (gap, length) in enumerate(gaps):
            images.append((at + gap, length, (number, place)))
            at += gap + length
        sent.append(request_of(number, at + 5, *images))
        expected += len(images)
        scheduler.add(sent[-1])
    plans = steps_of(scheduler, 2000)
    seen = [(request, item) for plan in plans for request, item in plan.encoded]
    assert len(seen) == len(set(seen)) == expected
    assert all(sum(item.num_tokens for _, item in plan.encoded) <= budget for plan in plans)
    computed: dict[Request, int] = {}
    have: set[tuple[Request, EncoderInput]] = set()
    for plan in plans:
        have |= set(plan.encoded)
        for grant in plan.chunks:
            computed[grant.request] = grant.num_computed_tokens + grant.num_new_tokens
        needed = {(r, item) for r in computed for item in r.encoder_inputs if item.offset < computed[r]}
        assert needed <= have
    cache = scheduler._running.encoder
    assert cache is not None
    assert cache.num_reclaimable == budget
