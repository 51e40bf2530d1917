"""`Demand`: what a scenario's requests ask of an engine, as moments and as a few typical requests."""

__all__ = ["NUM_TYPICAL", "Demand", "demand_of"]

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import WorkloadError
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs.scenario import Scenario

Floats = NDArray[np.float64]

_LOOKED_AT = 4000
NUM_TYPICAL = 100


@dataclass(frozen=True)
class Demand:
    """Requests as the engine sees them, prefixes that it has cached left out.

    prompt, outputs: tokens to compute and to generate, of all requests looked at
    typical:         (tokens to compute, tokens cached, tokens to generate) of requests that stand for all: one from
                     each of NUM_TYPICAL equal parts by prompt length
    context:         mean KV length of a sequence while it decodes
    asks_for_tokens: whether limits of the SLO are on single tokens; reading_speed: tokens a second of those who read
                     the answers, if it has any
    """

    prompt: Floats
    outputs: Floats
    typical: tuple[Floats, Floats, Floats]
    context: float
    asks_for_tokens: bool = False
    reading_speed: float | None = None

    @property
    def mean_prompt(self) -> float:
        return float(self.prompt.mean())

    @property
    def mean_outputs(self) -> float:
        return float(self.outputs.mean())


def demand_of(scenario: Scenario) -> Demand:
    """The demand of the scenario's traffic; of shared prefixes all that the second half of its requests finds cached by
    the first (as in a cache that forgets nothing)."""
    longest = scenario.engine.max_model_len or scenario.model.max_position_embeddings
    traffic = scenario.traffic.model_copy(update={"num_requests": None})
    drafts = list(islice(Workload(scenario.model_copy(update={"traffic": traffic})).drafts(), _LOOKED_AT))
    drafts = [draft for draft in drafts if draft.num_prompt_tokens < longest]
    if not drafts:
        raise WorkloadError(f"{scenario.name}: no request fits max_model_len={longest}; raise it, or shorten prompts.")
    whole = np.array([draft.num_prompt_tokens for draft in drafts], np.float64)
    outputs = np.minimum([draft.num_output_tokens for draft in drafts], longest - whole)
    cached = np.zeros(len(drafts))
    if scenario.engine.enable_prefix_caching and any(draft.block_hashes for draft in drafts):
        cached = _cached([draft.block_hashes for draft in drafts], scenario.engine.block_size)
        half = slice(len(drafts) // 2, None)
        whole, outputs, cached = whole[half], outputs[half], cached[half]
    prompt = np.maximum(whole - cached, 1.0)
    order = np.argsort(prompt, kind="stable")
    places = ((np.arange(NUM_TYPICAL) + 0.5) / NUM_TYPICAL * len(order)).astype(np.intp)
    chosen = order[places]
    context = float(((whole + outputs / 2) * outputs).sum() / outputs.sum())
    typical = prompt[chosen], cached[chosen], outputs[chosen]
    return Demand(prompt, outputs, typical, context, scenario.slo.needs_token_times, scenario.slo.reading_speed)


def _cached(prompts: list[tuple[int, ...]], block_size: int) -> Floats:
    """Tokens of each prompt that those before it have left in the cache."""
    seen: set[int] = set()
    found = []
    for hashes in prompts:
        count = next((index for index, block in enumerate(hashes) if block not in seen), len(hashes))
        found.append(float(count * block_size))
        seen.update(hashes)
    return np.array(found)
