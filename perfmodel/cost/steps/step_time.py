"""The time of one step as a function, for schedulers and simulators of others that ask for it at every step.

An 80 % interval combines the four errors that a run keeps (`perfmodel.cost.calibrations.draws`): each alone moves the
logarithm of a step's time up or down by what it does at 1.2816 standard deviations, and independent ones add up in
quadrature. Steps of about one size, within a factor of the square root of two, share these factors.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp, hypot, log
from typing import Any, NamedTuple

from perfmodel.cost.calibrations.draws import NUM_SCORES, Z_P90, Uncertainty
from perfmodel.cost.steps.cost_model import GraphCostModel
from perfmodel.cost.steps.step_costs import StepCosts, step_costs
from perfmodel.cost.steps.tables import PS_PER_S
from perfmodel.errors import SpecError
from perfmodel.ops.work import BatchShape
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_scenario

_MAX_CLASSES = 4096

Batch = BatchShape | Sequence[tuple[int, int]]


class StepTime(NamedTuple):
    """seconds: of the step, host included; interval: the 80 % interval of `seconds`; breakdown: seconds by what they
    are spent on: compute, memory, communication, overhead (launches), and idle, where the device waits for the host or
    for another stage"""

    seconds: float
    interval: tuple[float, float]
    breakdown: dict[str, float]


class StepTimer:
    """Times steps of `scenario`'s model on its hardware under its engine, set up once. costs: of these steps; default:
    decodes of a batch have equal contexts. Raises SpecError, or UnsupportedError for what the engine does not start
    with."""

    def __init__(self, scenario: Scenario, costs: StepCosts | None = None) -> None:
        costs = costs or step_costs(scenario)
        self._cost_model, self._spans = costs.cost_model(), scenario.model.attention_spans
        uncertainty = Uncertainty.of(costs.calibration, costs.profile)
        one_each = [(place, score) for place in range(NUM_SCORES) for score in (Z_P90, -Z_P90)]
        scores = [[score * (index == place) for index in range(NUM_SCORES)] for place, score in one_each]
        self._centre = costs.cost_model(uncertainty.draw((0.0,) * NUM_SCORES))
        self._drawn = [costs.cost_model(uncertainty.draw(tuple(own))) for own in scores]
        self._factors: dict[tuple[int, ...], tuple[float, float]] = {}

    def __call__(self, batch: Batch) -> StepTime:
        """The time of a step of `batch`: a `BatchShape`, or (new tokens, tokens computed before) of each sequence. A
        sequence with one new token decodes; all of them get a token. Raises SpecError for no tokens."""
        shape = batch if isinstance(batch, BatchShape) else self.shape_of(batch)
        seconds = self._cost_model.duration_ps(shape) / PS_PER_S
        low, high = self._interval(shape)
        return StepTime(seconds, (low * seconds, high * seconds), self._breakdown(shape, seconds))

    def shape_of(self, sequences: Sequence[tuple[int, int]]) -> BatchShape:
        """A step in which each of `sequences` has (new tokens, tokens computed before). Raises SpecError for none."""
        contexts = [computed + 1 for new, computed in sequences if new == 1]
        prefills = tuple([(new, computed) for new, computed in sequences if new > 1])
        num_tokens = len(contexts) + sum([new for new, _ in prefills])
        if not num_tokens:
            raise SpecError("batch: has no tokens; expected (new tokens, tokens computed before) of each sequence.")
        windowed = tuple([sum([min(context, span) for context in contexts]) for span in self._spans])
        return BatchShape(num_tokens, len(sequences), prefills, len(contexts), sum(contexts), windowed)

    def _interval(self, shape: BatchShape) -> tuple[float, float]:
        new = sum([new for new, _ in shape.prefills])
        sizes = (shape.num_decodes, shape.decode_context, new, sum([done for _, done in shape.prefills]))
        key = tuple([(size * size).bit_length() for size in sizes])  # two classes an octave
        known = self._factors.get(key)
        if known is None:
            if len(self._factors) >= _MAX_CLASSES:
                self._factors.clear()
            plain, centre = self._cost_model.duration_ps(shape), self._centre.duration_ps(shape)
            moved = [log(model.duration_ps(shape) / centre) for model in self._drawn]
            up, down = hypot(*(max(step, 0.0) for step in moved)), hypot(*(min(step, 0.0) for step in moved))
            known = self._factors[key] = (centre / plain * exp(-down), centre / plain * exp(up))
        return known

    def _breakdown(self, shape: BatchShape, seconds: float) -> dict[str, float]:
        cost_model = self._cost_model
        if isinstance(cost_model, GraphCostModel):
            by_bound = cost_model.bound_seconds(shape)
        else:  # of the mean stage, drafts included
            cost_model = cost_model.fresh()
            cost_model.duration_ps(shape)
            by_bound = cost_model.usage().bound_s
        by_bound["idle"] = max(0.0, seconds - sum(by_bound.values()))
        return by_bound


def step_time(batch: Batch, model: str, hardware: str, engine: str | Mapping[str, Any] = "vllm") -> StepTime:
    """Seconds of one step, their 80 % interval, and what they are spent on.

    batch:    (new tokens, tokens computed before) of each sequence, or a `BatchShape`
    model, hardware: names, or paths to files
    engine:   a profile's name, or a scenario's `engine` block: {"profile": "sglang", "tensor_parallel_size": 2}

    The first call for a model, a device and an engine sets them up; others take some 20 us. Raises SpecError for an
    unknown name or value, UnsupportedError for what the engine does not start with.
    """
    given = {"profile": engine} if isinstance(engine, str) else dict(engine)
    return _timer(json.dumps({"name": "step", "model": model, "hardware": hardware, "engine": given}))(batch)


@lru_cache(maxsize=64)
def _timer(scenario: str) -> StepTimer:
    """The timer of a scenario's text without traffic, which no step depends on."""
    return StepTimer(load_scenario(json.dumps({**json.loads(scenario), "traffic": "chat"})))
