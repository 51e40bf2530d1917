"""Predicts power of servers and energy of their tokens from a step at the measured mean batch.

A row's batch decodes, in the middle of its answers, and as many prompts begin as answers end: `itl` is a step that only
decodes, `tokens_per_s` the batch over the mean step, `power` what that draws on all devices, `energy_per_token` their
ratio.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from perfmodel.cost import energy_j, step_costs
from perfmodel.cost.power import PowerFit
from perfmodel.cost.steps.tables import PS_PER_S, Usage
from perfmodel.evidence.observation import Observation, Prediction, Progress, predictions_of
from perfmodel.planning.typical_step import mean_length, typical_step


class MeanStep(NamedTuple):
    """A row's steps on one device: seconds of one that only decodes and of the mean one, and the mean one's totals."""

    decode_s: float
    mean_s: float
    usage: Usage


def steps_of(row: Observation) -> MeanStep:
    """The steps of a full batch, whose sequences end one by one and are followed by new prompts. Raises SpecError for a
    deployment that cannot be priced."""
    costs, traffic = step_costs(row.scenario), row.scenario.traffic
    decodes = typical_step(row.scenario, lambda shape: costs.estimate(shape).duration_s).shape
    prompt, answer = (round(mean_length(item)) if item else 1 for item in (traffic.input_tokens, traffic.output_tokens))
    begun = decodes.num_decodes / answer  # prompts per step
    count = max(1, round(begun))
    mixed = decodes._replace(
        num_tokens=decodes.num_tokens + count * prompt,
        num_samples=decodes.num_samples + count,
        prefills=((prompt, 0),) * count,
    )
    share, usage, seconds = min(1.0, begun / count), Usage(), []
    for shape, times in ((decodes, 1.0 - share), (mixed, share)):
        model = costs.cost_model()
        seconds.append(model.duration_ps(shape) / PS_PER_S)
        usage.add(model.usage(), times)
    return MeanStep(seconds[0], seconds[0] + share * (seconds[1] - seconds[0]), usage)


def predict_energy(row: Observation, fit: PowerFit | None = None) -> Prediction:
    """The metrics of a row. fit: of power, default: the committed one"""
    steps, devices = steps_of(row), float(row.labels["devices"])
    joules = devices * energy_j(row.scenario.hardware, steps.usage, steps.mean_s, fit)
    tokens = row.scenario.traffic.arrivals.concurrency or 1
    metrics = {
        "itl": 1e3 * steps.decode_s,
        "tokens_per_s": tokens / steps.mean_s,
        "power": joules / steps.mean_s,
        "energy_per_token": joules / tokens,
    }
    return Prediction(row, metrics, scenario=row.scenario)


def predict_all(rows: Sequence[Observation], fit: PowerFit | None, progress: Progress | None) -> list[Prediction]:
    """`predict_energy` of all rows, on all cores."""
    return predictions_of(rows, partial(predict_energy, fit=fit), lambda row: row.name, lambda row: row.name, progress)
