"""What a split into prefill and decode replicas serves when the mix of prompts and answers changes, in closed form.

A mix scales all prompts and all answers of the traffic: by one half and by two, or, of a trace of single requests, to
the means of each quarter of its time. For each, the highest rate within the SLO of the chosen split, and of the best
split of no more devices into replicas of the same two kinds; the screen's formulas (`service`)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from perfmodel.planning.finalist import Deployment
from perfmodel.planning.screen import Screen
from perfmodel.planning.service import Demand, demand_of
from perfmodel.planning.space import Candidate
from perfmodel.sim.traffic.traces import read_trace
from perfmodel.specs.scenario import Scenario

_QUARTERS = 4
_SCALED = (
    ("prompts half as long", 0.5, 1.0),
    ("prompts twice as long", 2.0, 1.0),
    ("answers half as long", 1.0, 0.5),
    ("answers twice as long", 1.0, 2.0),
)


class MixAnswer(NamedTuple):
    """name: of the mix; prompt_tokens, output_tokens: means; max_rate: of the chosen split, requests/s; binds: what
    limits it; best: prefill and decode replicas of the best split, best_rate: of it"""

    name: str
    prompt_tokens: float
    output_tokens: float
    max_rate: float
    binds: str
    best: tuple[int, int]
    best_rate: float


def mix_answers(scenario: Scenario, chosen: Deployment, attainment: float) -> list[MixAnswer]:
    """An answer for the mix as planned and for each other one; empty for replicas that do both, and with encoders."""
    candidate = chosen.screened.candidate
    if candidate.ratio is None or candidate.encoders is not None:
        return []
    prefills, decodes = (count * chosen.replicas for count in candidate.ratio)
    splits = [replace(candidate, ratio=ratio) for ratio in _ratios(candidate, prefills, decodes)]
    demand, answers = demand_of(scenario), []
    for name, of_prompts, of_outputs in (("as planned", 1.0, 1.0), *_mixes(scenario, demand)):
        mixed = scaled(demand, of_prompts, of_outputs)
        screened = Screen(splits, scenario, attainment, mixed).all()
        best = max(screened, key=lambda split: split.rate)
        own = screened[0] if screened[0].rate >= best.rate else best
        assert own.candidate.ratio is not None
        lengths = mixed.mean_prompt, mixed.mean_outputs
        answers.append(MixAnswer(name, *lengths, screened[0].rate, screened[0].binds, own.candidate.ratio, own.rate))
    return answers


def scaled(demand: Demand, of_prompts: float, of_outputs: float) -> Demand:
    """`demand` with all prompts and all answers so many times as long, cached parts of prompts, too."""
    prompt, cached, outputs = demand.typical
    prompts, answers = np.maximum(demand.prompt * of_prompts, 1.0), np.maximum(demand.outputs * of_outputs, 1.0)
    typical = np.maximum(prompt * of_prompts, 1.0), cached * of_prompts, np.maximum(outputs * of_outputs, 1.0)
    half = float((demand.outputs**2).sum() / demand.outputs.sum()) / 2  # of the context, what is generated
    context = (demand.context - half) * of_prompts + half * of_outputs
    return replace(demand, prompt=prompts, outputs=answers, typical=typical, context=context)


def _ratios(candidate: Candidate, prefills: int, decodes: int) -> Iterator[tuple[int, int]]:
    """The chosen split, then all others of no more devices that leave no room for another decode replica."""
    yield prefills, decodes
    of_prefill, of_decode = (layout.scenario.engine.num_devices for layout, _ in candidate.counts)
    devices = prefills * of_prefill + decodes * of_decode
    for count in range(1, (devices - of_decode) // of_prefill + 1):
        yield count, (devices - count * of_prefill) // of_decode


def _mixes(scenario: Scenario, demand: Demand) -> Sequence[tuple[str, float, float]]:
    """(name, factor on prompts, factor on answers)"""
    traffic = scenario.traffic
    if traffic.trace is None or traffic.trace.has_conversations or traffic.arrivals.process != "trace":
        return _SCALED
    rows = list(read_trace(traffic.trace.path, traffic.trace.format))
    ends = np.array([(row.arrival_s, row.num_prompt_tokens, row.num_output_tokens) for row in rows], np.float64)
    place = np.minimum(ends[:, 0] / max(ends[-1, 0], 1e-9) * _QUARTERS, _QUARTERS - 1).astype(np.intp)
    means = ends[:, 1:].mean(axis=0)
    mixes = []
    for quarter in range(_QUARTERS):
        if (place == quarter).any():
            prompts, answers = ends[place == quarter, 1:].mean(axis=0) / means
            mixes.append((f"quarter {quarter + 1} of the trace", float(prompts), float(answers)))
    return mixes
