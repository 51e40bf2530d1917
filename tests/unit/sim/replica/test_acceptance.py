"""Drawn acceptance of drafts: shares follow the acceptance rates, and draws belong to tokens, not to steps."""

import pytest

from perfmodel.engine import Request, StepPlan
from perfmodel.sim.replica.acceptance import SimulatedAcceptance
from perfmodel.specs.engine.speculation import SpeculativeConfig

COUNT = 4000


def acceptance(seed: int = 1, pipelined: bool = False, **fields: object) -> SimulatedAcceptance:
    config = SpeculativeConfig.model_validate({"method": "ngram"} | fields)
    return SimulatedAcceptance(config.model_copy(update={"pipelined": pipelined}), seed)


def plan_of(depth: int, num_requests: int = COUNT, num_outputs: int = 3, max_outputs: int = 100) -> StepPlan:
    """Requests with `num_outputs` output tokens, each with a draft of `depth` tokens."""
    plan = StepPlan(0)
    plan.decodes = [Request(number, 0, 10, max_outputs) for number in range(num_requests)]
    for request in plan.decodes:
        request.num_output_tokens = num_outputs
    plan.draft_depths = [depth] * num_requests
    return plan


@pytest.mark.parametrize("rates", [(0.9, 0.6, 0.3), (0.5, 0.5, 0.5), (1.0, 0.8, 0.0)])
def test_a_draft_is_accepted_up_to_its_first_wrong_token(rates: tuple[float, ...]) -> None:
    """At least k tokens are right with the product of the first k rates."""
    accepted = acceptance(num_speculative_tokens=3, acceptance={"per_position": list(rates)}).judge(plan_of(3))
    assert accepted is not None
    expected = 1.0
    for depth, rate in enumerate(rates, 1):
        expected *= rate
        assert sum(right >= depth for right in accepted) / COUNT == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.55, 0.7, 0.95, 1.0])
def test_a_drafter_offers_drafts_in_its_share_of_steps(share: float) -> None:
    """Other steps draft 0 tokens; an accepted first token was offered."""
    fields = {"num_speculative_tokens": 2, "acceptance": {"rate": 0.2, "offered": share}}
    plan = plan_of(2)
    offered, right = acceptance(**fields).offered(plan), acceptance(**fields).judge(plan)
    assert right is not None
    assert set(offered) <= {0, 2}
    assert sum(map(bool, offered)) / COUNT == pytest.approx(share, abs=0.03)
    assert sum(map(bool, right)) / COUNT == pytest.approx(0.2, abs=0.03)
    assert all(depth for depth, number in zip(offered, right, strict=True) if number)


def test_acceptance_is_drawn_per_token_not_per_step() -> None:
    """A draft of one token less, made a token later, has the same tokens right; another seed has others."""
    fields = {"num_speculative_tokens": 4, "acceptance": {"rate": 0.7}}
    deep = acceptance(**fields).judge(plan_of(4))
    later = acceptance(**fields).judge(plan_of(3, num_outputs=4))
    assert deep is not None
    assert later is not None
    assert all(after == before - 1 for before, after in zip(deep, later, strict=True) if before)
    assert acceptance(2, **fields).judge(plan_of(4)) != deep


def test_no_draft_token_beyond_the_end_of_the_answer_is_accepted() -> None:
    """An answer that lacks n tokens accepts at most n - 1 draft tokens: the model adds one."""
    fields = {"num_speculative_tokens": 4, "acceptance": {"rate": 1.0}}
    for lacking, right in ((1, 0), (2, 1), (4, 3), (5, 4), (9, 4)):
        plan = plan_of(4, 3, num_outputs=10, max_outputs=10 + lacking)
        assert acceptance(**fields).judge(plan) == [right] * 3


def test_a_pipelined_drafter_may_also_predict_the_token_after_its_draft() -> None:
    fields = {"num_speculative_tokens": 2, "acceptance": {"rate": 0.6}}
    accepted = acceptance(pipelined=True, **fields).judge(plan_of(2))
    assert accepted is not None
    assert sum(right == 3 for right in accepted) / COUNT == pytest.approx(0.6**3, abs=0.03)
    assert max(accepted) == 3
