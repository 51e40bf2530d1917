"""Images of steps that are computed in parts: plans of a pipeline, two overlapping halves.

Parts without them have the encoder for nothing."""

import json
from typing import Any

import pytest

from perfmodel.cost.steps.overlap import OverlapCostModel, halves, lane_of
from perfmodel.cost.steps.stages import plans_of_round
from perfmodel.cost.steps.step_costs import StepCosts, step_costs
from perfmodel.models.vision import ImageGrid
from perfmodel.ops.work import BatchShape, Depends
from perfmodel.specs import load_scenario

IMAGES = (ImageGrid(1, 60, 80), ImageGrid(1, 40, 40), ImageGrid(1, 20, 20))
STEP = BatchShape(15_000, 3, ((8000, 0), (5000, 0), (2000, 0)), images=IMAGES)


def costs(model: str, **engine: Any) -> StepCosts:
    fields = {"name": "seen", "model": model, "hardware": "h100-sxm-80gb", "traffic": "chat", "engine": engine}
    return step_costs(load_scenario(json.dumps(fields)))


def encoder_s(own: StepCosts, shape: BatchShape) -> float:
    """Seconds of the encoder's rows in `explain`."""
    return sum(row.duration_s for row in own.estimate(shape).rows if "encoder_" in row.name)


@pytest.mark.parametrize("num_stages", [2, 3, 8])
def test_plans_share_out_all_images_among_those_with_prompts(num_stages: int) -> None:
    shape = STEP._replace(num_tokens=15_010, num_samples=13, num_decodes=10, decode_context=1000)
    plans = plans_of_round(shape, num_stages)
    seen = sorted(image for plan, count in plans.items() for image in plan.images * count)
    assert seen == sorted(IMAGES)
    assert all(plan.prefills for plan in plans if plan.images)


def test_the_first_half_has_all_images_and_the_encoder_is_in_no_turn() -> None:
    assert [half.images for half in halves(STEP)] == [IMAGES, ()]
    graph = costs("qwen3-vl-30b-a3b").graph
    assert {lane_of(node.name) for node in graph.by_depends[Depends.IMAGES]} == {"outside"}


WIDE = {"data_parallel_size": 8, "enable_expert_parallel": True, "all2all_backend": "deepep_high_throughput"}


def test_the_encoder_takes_as_long_before_two_halves_as_before_a_whole_step() -> None:
    """In the durations of the simulator, and in the rows of `explain`."""
    plain, split = costs("qwen3-vl-30b-a3b", **WIDE), costs("qwen3-vl-30b-a3b", **WIDE, enable_dbo=True)
    shape = STEP._replace(num_tokens=15_002, num_samples=5, num_decodes=2, decode_context=600)

    def more(own: StepCosts) -> int:
        return own.cost_model().duration_ps(shape) - own.cost_model().duration_ps(shape._replace(images=()))

    assert isinstance(split.cost_model(), OverlapCostModel)
    assert more(split) == pytest.approx(more(plain), rel=0.02)
    assert encoder_s(split, shape) == pytest.approx(encoder_s(plain, shape), rel=0.01) != 0


def test_the_round_of_a_pipeline_encodes_images() -> None:
    own = costs("qwen2.5-vl-7b", pipeline_parallel_size=2)
    model = own.cost_model()
    assert model.duration_ps(STEP) > 1.02 * model.duration_ps(STEP._replace(images=()))
    assert encoder_s(own, STEP) > 0
