"""Images from traffic to the step that encodes them."""

from pathlib import Path
from typing import Any

import pytest

from perfmodel.cost import step_costs
from perfmodel.cost.calibrations.host_work import host_images
from perfmodel.errors import PerfmodelError
from perfmodel.models.vision import ImageGrid
from perfmodel.ops.work import BatchShape
from perfmodel.sim import simulate
from perfmodel.sim.replica.serving import scheduler_config
from perfmodel.sim.traffic.workload import ImagePlan, Workload
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario

TEXT = """
name: images
model: qwen3-vl-2b
hardware: h100-sxm-80gb
engine: {max_model_len: 8192}
traffic:
  arrivals: {process: closed_loop, concurrency: 2}
  num_requests: 6
  input_tokens: {distribution: fixed, value: 40}
  output_tokens: {distribution: fixed, value: 8}
"""


@pytest.fixture
def text(tmp_path: Path) -> Scenario:
    file = tmp_path / "images.yaml"
    file.write_text(TEXT, encoding="utf-8")
    return load_scenario(file)


def with_images(scenario: Scenario, sizes: Any = "1024x1024", **changes: Any) -> Scenario:
    return scenario.with_({"traffic.images": {"sizes": sizes}, **changes})


def test_prompts_have_the_tokens_of_their_images(text: Scenario) -> None:
    """40 tokens of text, and for each image of 512 x 512 pixels 16 x 16 tokens between two marks."""
    scenario = with_images(text, "512x512", **{"traffic.images.per_request": 2})
    for request in Workload(scenario).requests():
        assert request.num_prompt_tokens == 40 + 2 * (256 + 2)
        assert [(item.offset, item.num_tokens) for item in request.encoder_inputs] == [(1, 256), (259, 256)]
    assert simulate(scenario).summary["total_input_tokens"] == 6 * (40 + 2 * 258)


def test_images_come_behind_a_shared_prefix_and_are_nobody_elses(text: Scenario) -> None:
    scenario = with_images(text, **{"traffic.prefix": {"num_groups": 1, "shared_tokens": 32}})
    requests = list(Workload(scenario).requests())
    assert {request.encoder_inputs[0].offset for request in requests} == {33}
    assert {request.block_hashes for request in requests} == {requests[0].block_hashes}
    assert len({item.content for request in requests for item in request.encoder_inputs}) == len(requests)


def test_all_answers_of_a_prompt_have_its_images(text: Scenario) -> None:
    """Each of two prompts of 40 tokens and an image of 1,026 is encoded once and found again, in whole blocks of 16."""
    samples = {"traffic.samples_per_prompt": 3, "traffic.arrivals": {"process": "burst"}}
    scenario = with_images(text, ["1024x1024", "512x512"], **samples)
    requests = list(Workload(scenario).requests())
    for answers in (requests[:3], requests[3:]):
        assert len({(request.encoder_inputs, request.block_hashes) for request in answers}) == 1
        assert len(answers[0].block_hashes) == answers[0].num_prompt_tokens // 16
    assert not {*requests[0].block_hashes} & {*requests[3].block_hashes}
    cached = simulate(scenario).columns()["num_cached_tokens"]
    assert sorted(cached) == sorted(
        found for request in requests[::3] for found in (0, *[request.num_prompt_tokens // 16 * 16] * 2)
    )


def test_sizes_are_drawn_by_their_shares(text: Scenario) -> None:
    sizes = [{"width": 256, "height": 256, "share": 3}, {"width": 512, "height": 512, "share": 1}]
    scenario = with_images(text, sizes, **{"traffic.num_requests": 4000})
    grids = [request.encoder_inputs[0].grid for request in Workload(scenario).requests()]
    small = sum(grid == ImageGrid(1, 16, 16) for grid in grids)
    assert small / 4000 == pytest.approx(0.75, abs=0.03)  # four standard deviations
    assert grids == [request.encoder_inputs[0].grid for request in Workload(scenario).requests()]
    assert ImagePlan(scenario).mean_tokens == 2 + (3 * 64 + 256) / 4


def test_a_first_token_waits_for_the_encoder(text: Scenario) -> None:
    """Beside as many tokens of text, an image costs what its encoder takes, in the step of the prompt alone: on the
    device some 4,096 patches x 2 x 404 million weights = 3.3 TFLOP and 24 layers of 4 x 4,096^2 x 1,024 = 1.6 TFLOP at
    less than the peak of 989 TFLOP/s; on the host 39 us for each of its calls, which are launched one by one. Before,
    an API server decodes and processes the image."""
    images, words = with_images(text), text.with_({"traffic.input_tokens.value": 40 + 1026})
    costs = step_costs(images)
    read = BatchShape(1066, 1, ((1066, 0),))
    seen, alone = (costs.estimate(shape) for shape in (read._replace(images=(ImageGrid(1, 64, 64),)), read))
    num_calls = sum(row.count for row in seen.rows if row.name.startswith("encoder_"))
    assert seen.hidden_host_s - alone.hidden_host_s == pytest.approx(num_calls * 39e-6)
    assert 4.9 / 989 < seen.device_s - alone.device_s < 4 * 4.9 / 989
    one = {"traffic.arrivals.concurrency": 1, "traffic.num_requests": 1}
    first, other = (simulate(scenario.with_(one)).summary for scenario in (images, words))
    work = host_images(images)
    assert work is not None
    processed_s = work.request_s + work.new_request_s + work.sizes[0].decode_s + work.sizes[0].process_s
    added_ms = 1e3 * (seen.duration_s - alone.duration_s + processed_s)
    assert first["mean_ttft_ms"] - other["mean_ttft_ms"] == pytest.approx(added_ms, rel=1e-6)
    assert first["mean_tpot_ms"] == pytest.approx(other["mean_tpot_ms"], rel=1e-9)


def test_the_budget_is_a_steps_tokens_or_the_largest_image(text: Scenario) -> None:
    for tokens, budget in ((2048, 16384), (32768, 32768)):
        rules = scheduler_config(with_images(text, **{"engine.max_num_batched_tokens": tokens})).encoder
        assert rules is not None
        assert (rules.budget, rules.cache_size, rules.is_ahead) == (budget, budget, text.engine.plans_ahead)
    assert scheduler_config(text).encoder is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "qwen3-8b"}, "got traffic.images for qwen3-8b, whose encoder is not known"),
        ({"engine.profile": "sglang"}, "got traffic.images beside engine.profile=sglang"),
        ({"engine.version": "0.6.1"}, "got traffic.images beside engine.profile=vllm"),
        ({"engine.kv_cache": "off"}, "got traffic.images beside engine.kv_cache=off"),
        ({"engine.batching": "static"}, "got traffic.images beside engine.batching=static"),
        ({"engine.speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "engine.speculative_config"),
        ({"prompt_compression": {"ratio": 0.5}}, "beside prompt_compression"),
        ({"engine.disable_chunked_mm_input": True, "engine.max_num_batched_tokens": 8192}, "below the 16384 tokens"),
        ({"model": "gemma-3-27b", "traffic.images": {"sizes": "640x480x8"}}, "takes images alone"),
        ({"traffic.images": {"sizes": "640by480"}}, "expected WIDTHxHEIGHT in pixels"),
        ({"traffic.conversations": {"turns": {"distribution": "fixed", "value": 2}}}, "images beside conversations"),
    ],
)
def test_what_images_do_not_go_with_is_refused(text: Scenario, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PerfmodelError, match=sentence):
        with_images(text, **changes)


def test_a_video_above_the_encoders_budget_raises_it(text: Scenario) -> None:
    """A server's encoder has a budget for its largest input: 64 frames of 1,280 x 720 are 32 x 20 x 36 tokens."""
    scenario = with_images(text, "1280x720x64", model="qwen2.5-vl-7b", **{"engine.max_model_len": 32768})
    rules = scheduler_config(scenario).encoder
    assert rules is not None
    assert rules.budget == ImagePlan(scenario).longest == 32 * 20 * 36
