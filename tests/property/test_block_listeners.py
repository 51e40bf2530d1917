"""Whoever follows the events of the prefix cache knows at every moment what it holds."""

from hypothesis import given, settings

from perfmodel.engine import KVBlockManager, Request, ServeLoop, StepPlan
from workloads import Case, cases, grouped_cases, serve_stepwise, speculating_cases


class Mirror:
    """What the events add up to. With groups, contents carry the number of theirs."""

    def __init__(self, blocks: KVBlockManager, has_groups: bool) -> None:
        self.blocks, self.has_groups = blocks, has_groups
        self.held = blocks.cached
        blocks.listener = self

    def on_stored(self, contents, parent, group):
        assert parent is None or self.has_groups or parent in self.held, "nothing stands behind what is not there"
        new = {self.named(content, group) for content in contents}
        assert len(new) == len(contents) > 0
        assert new.isdisjoint(self.held)
        self.held |= new

    def on_removed(self, content, group):
        self.held.remove(self.named(content, group))

    def on_cleared(self):
        self.held.clear()

    def named(self, content, group):
        assert self.has_groups or group == 0
        return (group, content) if self.has_groups else content


def followed(case: Case) -> None:
    mirrors: list[Mirror] = []

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        if not mirrors:
            mirrors.append(Mirror(loop.scheduler.blocks, bool(case.groups)))
        loop.scheduler.blocks.catch_up()
        assert mirrors[0].held == loop.scheduler.blocks.cached

    serve_stepwise(case, after_step)
    if mirrors:
        mirrors[0].blocks.forget_all()
        assert not mirrors[0].held


@given(cases())
@settings(max_examples=60, deadline=None)
def test_events_add_up_to_what_is_cached(case: Case) -> None:
    followed(case)


@given(grouped_cases())
@settings(max_examples=40, deadline=None)
def test_events_of_groups_add_up_to_what_is_cached(case: Case) -> None:
    followed(case)


@given(speculating_cases())
@settings(max_examples=20, deadline=None)
def test_events_under_speculation_add_up_to_what_is_cached(case: Case) -> None:
    followed(case)


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
