"""The batch that stands for a scenario: Little's law, with the time that prompts take away from decodes."""

import numpy as np
import pytest

from perfmodel import sim
from perfmodel.ops.work import BatchShape
from perfmodel.planning.points import Point, evaluate
from perfmodel.planning.typical_step import estimate_choice, mean_step, typical_step
from perfmodel.specs import load_scenario

DECODE_S, PER_TOKEN_S = 0.01, 1e-4


def batch_of(rate: float, prompt: int, output: int, *more: str) -> int:
    """Under steps of 10 ms, whatever their batch, and prompts of 0.1 ms a token."""
    lengths = [
        f"traffic.{side}_tokens={{distribution: fixed, value: {tokens}}}"
        for side, tokens in (("input", prompt), ("output", output))
    ]
    scenario = load_scenario("llama-3.1-8b-a100", [*lengths, f"traffic.arrivals.rate={rate}", *more])

    def step_s(shape: BatchShape) -> float:
        return shape.num_tokens * PER_TOKEN_S if shape.prefills else DECODE_S

    return typical_step(scenario, step_s).shape.num_decodes


@pytest.mark.parametrize(
    ("rate", "prompt", "output"), [(5.0, 1000, 400), (2.0, 2000, 1000), (8.0, 100, 300), (0.5, 1, 2000)]
)
def test_the_batch_is_that_of_the_closed_form(rate, prompt, output):
    """1 / TPOT = rate + (1 - p) / step, p = rate x prompt's time: 5 req/s of 0.1 s leave half of the time."""
    share = rate * prompt * PER_TOKEN_S
    tpot_s = 1 / (rate + (1 - share) / DECODE_S)
    assert batch_of(rate, prompt, output) == pytest.approx(rate * output * tpot_s, abs=1)


def test_replicas_share_an_open_rate_and_a_closed_loop():
    """Two replicas have the batch of half the rate; a concurrency of 40 is divided among them."""
    for cluster in ("cluster.replicas=2", "cluster={pools: [{replicas: 1}, {replicas: 1}]}"):
        assert batch_of(10.0, 1000, 400, cluster) == batch_of(5.0, 1000, 400)
    loop = "traffic.arrivals={process: closed_loop, concurrency: 40}"
    assert [batch_of(1.0, 1000, 400, f"cluster.replicas={n}", loop) for n in (1, 2, 4)] == [40, 20, 10]


def test_answers_of_a_prompt_share_its_time():
    """Of 8 answers a second two share a prompt: 4 of 0.1 s a second take as much as those of 4 requests/s do."""
    tpot_s = 1 / (8 + (1 - 0.4) / DECODE_S)
    assert batch_of(8.0, 1000, 400, "traffic.samples_per_prompt=2") == pytest.approx(8 * 400 * tpot_s, abs=1)
    alone = "engine.enable_prefix_caching=false"
    assert batch_of(8.0, 1000, 400, "traffic.samples_per_prompt=2", alone) == batch_of(8.0, 1000, 400)


def test_a_vector_s_prompt_counts_with_its_images():
    """960 x 672 pixels are 30 x 21 tokens of 32 x 32 pixels, between two marks (Qwen3-VL)."""
    sets = ["model=qwen3-vl-4b", "engine.runner=pooling", "traffic.input_tokens={distribution: fixed, value: 100}"]
    plain, with_images = (
        typical_step(load_scenario("llama-3.1-8b-a100", [*sets, *more]), lambda _: DECODE_S).shape.prefills[0][0]
        for more in ((), ("traffic.images={sizes: 960x672}",))
    )
    assert with_images - plain == pytest.approx(30 * 21 + 2)


def test_stages_of_a_rate_are_averaged_over_time():
    """Ten minutes of 2 requests/s and one of 13 are 3 requests/s on average."""
    stages = "traffic.arrivals={stages: [{rate: 2, duration_s: 600}, {rate: 13, duration_s: 60}]}"
    assert batch_of(1.0, 1000, 400, stages) == batch_of(3.0, 1000, 400)


def test_the_mean_context_is_the_prompt_and_half_of_the_output():
    scenario = load_scenario("llama-3.1-8b-a100", ["traffic.input_tokens={distribution: fixed, value: 1000}",
                             "traffic.output_tokens={distribution: uniform, low: 300, high: 500}"])  # fmt: skip
    shape = typical_step(scenario, lambda _: DECODE_S).shape
    assert shape.decode_context == 1200 * shape.num_decodes


def test_prompts_that_take_all_of_the_time_fill_the_engine():
    assert batch_of(11.0, 1000, 10, "engine.max_num_seqs=64") == 64


@pytest.mark.release
@pytest.mark.parametrize("name", ["llama-3.1-8b-a100", "mixtral-8x7b-a100-tp2", "qwen3-30b-a3b-h100"])
def test_the_mean_batch_is_equal_in_every_command(name):
    """The time average of decoding sequences while any decodes, recounted from the steps of a run.

    `simulate` prints it, `whatif` varies it, the mean step of a report has it. `explain` estimates it in closed form,
    within a fifth: without the prompts' share it was 35 to 45 % too small; bursts make a run's larger.
    """
    overrides = ["traffic.num_requests=400"]
    scenario = load_scenario(name, overrides)
    run = sim.simulate(scenario, keep_steps=True)
    steps = run.steps
    seconds = (steps.end_s - steps.start_s) * (steps.num_decodes > 0)
    recounted = float(np.average(steps.num_decodes, weights=seconds))
    assert run.summary["mean_batch"] == pytest.approx(recounted, rel=1e-9)
    assert evaluate(Point(name, ("mean_batch",), tuple(overrides))).values["mean_batch"] == run.summary["mean_batch"]
    assert mean_step(run).shape.num_decodes == round(recounted)
    assert 0.8 * recounted <= estimate_choice(scenario).shape.num_decodes <= 1.05 * recounted


def test_the_mean_batch_leaves_out_prompts_and_idle_time():
    """By hand: one request at a time decodes alone, however long prompts and pauses take."""
    alone = ["traffic.arrivals={process: closed_loop, concurrency: 1, think_time_s: 10}", "traffic.num_requests=5"]
    assert sim.simulate(load_scenario("llama-3.1-8b-a100", alone)).summary["mean_batch"] == 1.0
