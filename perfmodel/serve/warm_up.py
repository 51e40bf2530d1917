"""`warm_up`: what the first steps of a process take longer, taken before anyone waits for them."""

__all__ = ["warm_up"]

import gc
from contextlib import suppress

from perfmodel.errors import PerfmodelError
from perfmodel.sim import simulate
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Arrivals, Lengths, Traffic

_NUM_REQUESTS = 24
_NUM_TOKENS = 24
_LONGEST_PROMPT = 1024


def warm_up(scenario: Scenario) -> None:
    """Price the steps of a little traffic: the tables of step costs, which all engines of a process share, begin to
    fill, and what they import is there. Then the garbage collector need not look at any of it again."""
    longest = scenario.engine.max_model_len or scenario.model.max_position_embeddings
    traffic = Traffic(
        arrivals=Arrivals(process="constant", rate=20.0),
        num_requests=_NUM_REQUESTS,
        input_tokens=Lengths(distribution="uniform", low=1, high=max(min(_LONGEST_PROMPT, longest // 2), 1)),
        output_tokens=Lengths(distribution="fixed", value=_NUM_TOKENS),
    )
    with suppress(PerfmodelError):  # what is wrong with the scenario is said to those who send it something
        simulate(scenario.model_copy(update={"traffic": traffic}), keep_steps=False, can_leap=False)
    gc.collect()
    gc.freeze()
