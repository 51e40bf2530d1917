"""`step_time`: the simulator's own step, its interval, and what it is spent on."""

import time

import numpy as np
import pytest

import perfmodel as pm
from perfmodel.cost import step_costs
from perfmodel.cost.calibrations.draws import NUM_SCORES, Uncertainty
from perfmodel.cost.steps.step_time import StepTimer
from perfmodel.errors import SpecError
from perfmodel.ops.work import BatchShape

MODEL, DEVICE = "llama-3.1-8b", "h100-sxm-80gb"
BATCHES = [
    [(1, 1023)] * 32,
    [(2048, 0)],
    [(1, 700), (1, 4000), (512, 1024), (300, 0)],
]


def timer(**engine):
    changes = [f"engine.{key}={value}" for key, value in engine.items()]
    return StepTimer(pm.load_scenario("llama-3.1-8b-a100", [f"hardware={DEVICE}", *changes]))


@pytest.mark.parametrize("batch", BATCHES, ids=len)
def test_a_step_takes_as_long_as_explained(batch):
    """Attention of decodes lies on a line between contexts an eighth of an octave apart: within 0.1 %."""
    costs = step_costs(pm.load_scenario("llama-3.1-8b-a100", [f"hardware={DEVICE}"]))
    own = timer()
    shape = own.shape_of(batch)
    assert own(batch).seconds == pytest.approx(costs.estimate(shape).duration_s, rel=1e-3)
    assert own(batch) == own(shape)
    explained = costs.estimate(shape)
    for bound in ("compute", "memory"):
        share = own(batch).breakdown[bound] / own(batch).seconds
        assert share == pytest.approx(explained.bound_share.get(bound, 0.0), abs=2e-3)


@pytest.mark.parametrize("engine", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=len)
def test_the_parts_are_the_whole_and_the_interval_is_around_it(batch, engine):
    seconds, (low, high), breakdown = pm.step_time(batch, MODEL, DEVICE, engine)
    assert sum(breakdown.values()) == pytest.approx(seconds)
    assert all(part >= 0 for part in breakdown.values())
    assert low < seconds < high
    assert breakdown["communication"] > 0 or "tensor_parallel_size" not in engine
    assert breakdown["communication"] == 0 or engine


def test_sequences_become_the_shape_by_hand():
    """One decode has 701 tokens with its new one, the other 4,001; each sequence gets a token."""
    shape = timer().shape_of(BATCHES[2])
    assert shape == BatchShape(2 + 512 + 300, 4, ((512, 1024), (300, 0)), 2, 701 + 4001)


def test_windows_see_no_more_than_they_hold():
    own = StepTimer(pm.load_scenario("llama-3.1-8b-a100", ["model=gemma-3-27b", f"hardware={DEVICE}"]))
    (span,) = pm.load_model("gemma-3-27b").attention_spans
    assert own.shape_of([(1, 99), (1, 10 * span)]).decode_windowed == (100 + span,)


@pytest.mark.parametrize("batch", BATCHES, ids=len)
def test_the_interval_is_that_of_many_draws(batch):
    """Of 600 runs with errors of their own, on the natural logarithm; quadrature leaves out how they meet."""
    costs = step_costs(pm.load_scenario("llama-3.1-8b-a100", [f"hardware={DEVICE}"]))
    uncertainty = Uncertainty.of(costs.calibration, costs.profile)
    scores = np.random.default_rng(3).standard_normal((600, NUM_SCORES))
    shape = timer().shape_of(batch)
    drawn = [costs.cost_model(uncertainty.draw(tuple(row))).duration_ps(shape) * 1e-12 for row in scores]
    low, high = timer()(batch).interval
    expected = np.quantile(drawn, [0.1, 0.9])
    width = np.log(expected[1] / expected[0])
    assert np.log([low, high]) == pytest.approx(np.log(expected), abs=0.15 * width)


def test_a_call_takes_a_small_part_of_what_explaining_takes():
    costs = step_costs(pm.load_scenario("llama-3.1-8b-a100", [f"hardware={DEVICE}"]))
    own, batches = timer(), [[(1, 500 + number + row) for row in range(32)] for number in range(200)]

    def spent(call, times):
        start = time.process_time()
        for number in range(times):
            call(batches[number])
        return (time.process_time() - start) / times

    own(batches[0])
    assert spent(own, 200) < 0.1 * spent(lambda batch: costs.estimate(own.shape_of(batch)), 20)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([], MODEL, DEVICE), "batch: has no tokens"),
        (([(0, 5)], MODEL, DEVICE), "batch: has no tokens"),
        (([(1, 5)], "llama-9", DEVICE), "llama-9"),
        (([(1, 5)], MODEL, "h1000"), "h1000"),
        (([(1, 5)], MODEL, DEVICE, {"tensor_parallel": 2}), "tensor_parallel"),
        (([(1, 5)], MODEL, DEVICE, "vlm"), "vlm"),
    ],
    ids=str,
)
def test_what_cannot_be_timed_is_refused_with_a_sentence(arguments, sentence):
    with pytest.raises(SpecError, match=sentence):
        pm.step_time(*arguments)
