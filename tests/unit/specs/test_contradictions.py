"""Scenarios that say nothing, or two things at once, are refused with the sentence that names it."""

import pytest

from perfmodel.errors import DoesNotFitError, SpecError
from perfmodel.planning.typical_step import estimate_choice
from perfmodel.specs import load_scenario

SCENARIO = "llama-3.1-8b-a100"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("cluster.pools=[]", r"cluster\.pools: got an empty list; expected at least one pool"),
        ("plan={space: {hardware: []}}", r"plan\.space\.hardware: got an empty list; expected names of devices"),
        ("slo={tpot_ms: 50, min_tokens_per_s: 100}", "tpot_ms 50, which is 20 tokens/s"),
        (
            "traffic.classes=[{name: chat, share: 0.5}, {name: chat, share: 0.5}]",
            "got 'chat' as the name of more than one class",
        ),
    ],
)
def test_it_is_refused(change, sentence):
    with pytest.raises(SpecError, match=sentence):
        load_scenario(SCENARIO, [change])


@pytest.mark.parametrize(
    "step", [{"batch": 1_000_000_000}, {"batch": 4, "context": 10_000_000}, {"prefill": 10_000_000}]
)
def test_a_step_that_no_run_has_is_refused_with_the_largest_that_fits(step):
    with pytest.raises(DoesNotFitError, match=r"holds [\d,]+ tokens, at most [\d,]+"):
        estimate_choice(load_scenario(SCENARIO), **step)
    assert estimate_choice(load_scenario(SCENARIO), batch=64, context=1024).estimate.duration_s > 0
