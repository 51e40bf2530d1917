"""Masks of plans, and requests that wait for a grammar, by hand."""

from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, StepPlan
from perfmodel.engine.grammars import GrammarMasks
from perfmodel.engine.plan import Grant


def request(number: int, grammar: int | None, prompt: int = 8, output: int = 4) -> Request:
    own = Request(number, number, prompt, output)
    own.grammar = grammar
    return own


def scheduler(**settings: object) -> Scheduler:
    config = SchedulerConfig(has_shapes=True, **settings)  # type: ignore[arg-type]
    return Scheduler(config, KVBlockManager(100, config.block_size, False))


def test_a_mask_for_each_token_that_may_be_sampled() -> None:
    """Decodes with a shape drafting 0, 2 and 3 tokens: 1 + 3 + 4; one that drafts 5 without: none; two prompts that
    end, one of them with a shape: 1; a chunk that ends none: none."""
    plan = StepPlan(0)
    plan.decodes = [request(0, 1), request(1, 1), request(2, 4), request(3, None)]
    plan.draft_depths = [0, 2, 3, 5]
    plan.samples = [request(4, 1), request(5, None)]
    plan.chunks = [Grant(request(6, 1, prompt=64), 0, 32)]
    GrammarMasks().count(plan)
    assert plan.num_masks == 1 + 3 + 4 + 1


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 30))
def test_counts_are_those_of_the_tokens_that_come(shapes: list[bool], budget: int) -> None:
    """Over a whole run each request needs as many masks as its answer has tokens, whatever chunks its prompt has."""
    own = scheduler(max_num_batched_tokens=budget, max_num_seqs=4)
    requests = [request(number, 0 if shape else None) for number, shape in enumerate(shapes)]
    for one in requests:
        own.add(one)
    total = 0
    for now in range(1000):
        plan = own.plan(now)
        if not plan:
            break
        total += plan.num_masks
        own.apply(plan, now + 1)
    assert not own.has_requests
    assert total == 4 * sum(shapes)


def test_those_behind_a_grammar_go_on_and_are_passed_once_it_is_there() -> None:
    """One place: 0 runs; 1 without a shape and 2 with one wait. Once 2 has its grammar it goes before 1, which came
    before it."""
    own = scheduler(max_num_seqs=1)
    first, plain, shaped = request(0, None, output=2), request(1, None, output=2), request(2, 0, output=2)
    shaped.awaits_grammar = True
    own.add(first)
    own.apply(own.plan(0), 1)
    own.add(plain)
    own.add(shaped)
    own.apply(own.plan(1), 2)  # the last token of 0
    plan = own.plan(2)
    assert [grant.request for grant in plan.chunks] == [plain]  # 2 is passed
    own.apply(plan, 3)
    last = request(3, None)
    own.add(last)
    shaped.awaits_grammar = False
    own.retry_waiting()
    own.apply(own.plan(3), 4)
    assert [grant.request for grant in own.plan(4).chunks] == [shaped]
    assert list(own.waiting) == [last]


def test_a_lone_request_is_admitted_when_its_grammar_is_there() -> None:
    own = scheduler()
    lone = request(0, 0)
    lone.awaits_grammar = True
    own.add(lone)
    assert not own.plan(0)
    lone.awaits_grammar = False
    own.retry_waiting()
    assert own.plan(1).samples == [lone]


def test_a_request_may_be_aborted_while_its_grammar_is_compiled() -> None:
    own = scheduler()
    lone = request(0, 0)
    lone.awaits_grammar = True
    own.add(lone)
    assert own.abort(lone)
    assert not own.has_requests


def test_a_request_with_a_shape_goes_before_those_that_came_before_it_without() -> None:
    own = scheduler(max_num_seqs=1)
    plain, shaped = request(0, None), request(1, 0)
    own.add(plain)
    own.add(shaped)  # its grammar is there
    assert [grant.request for grant in own.plan(0).chunks] == [shaped]
