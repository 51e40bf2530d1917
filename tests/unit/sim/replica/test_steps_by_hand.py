"""A plan's batch shape, the prompt share of its step, its end in a pipeline, and front-end delays, by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import ServerFit, StageTicks, step_costs
from perfmodel.engine import Grant, Request, StepPlan
from perfmodel.ops.work import BatchShape
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.fleet.cluster import backend_of
from perfmodel.sim.replica.backend import PromptTime, SimulatedBackend, shape_of
from perfmodel.sim.replica.pipeline import FlowLine
from perfmodel.sim.replica.replica import FrontEnd
from perfmodel.specs import load_scenario


def plan_of(depths: tuple[int, ...] = (), num_decodes: int = 3) -> StepPlan:
    """Decodes with 700 tokens in KV, two chunks of which one ends its prompt, and drafts of the given depths."""
    plan, prompts = StepPlan(0), [Request(number, 0, 100, 5) for number in (10, 11)]
    plan.decodes = [Request(number, 0, 100, 5) for number in range(num_decodes)]
    plan.chunks = [Grant(prompts[0], 0, 64), Grant(prompts[1], 32, 68)]
    plan.num_chunk_tokens, plan.samples = 132, [prompts[1]]
    plan.decode_context, plan.decode_windowed, plan.group_tokens = 700, (300,), 999
    plan.draft_depths = list(depths)
    plan.num_draft_tokens, plan.num_padding_tokens = sum(depths), 5
    return plan


def test_a_plan_computes_its_tokens_and_logits_of_sampling_sequences() -> None:
    shape = shape_of(plan_of())
    assert (shape.num_tokens, shape.num_samples, shape.num_decodes) == (3 + 64 + 68, 3 + 1, 3)
    assert shape.prefills == ((64, 0), (68, 32))
    assert (shape.decode_context, shape.decode_windowed, shape.group_tokens) == (700, (300,), 999)
    assert (shape.drafting, shape.num_draft_tokens) == ((), 5)
    assert shape_of(plan_of(), samples_parts=True) == shape._replace(num_samples=3 + 2)


@pytest.mark.parametrize(("profile", "num_prompts"), [("vllm", 2), ("sglang", 2), ("trtllm", 2), ("llamacpp", 1)])
def test_engines_compute_logits_of_parts_of_prompts_or_of_their_ends(profile: str, num_prompts: int) -> None:
    cost_model, scenario = Recorder(), load_scenario("llama-3.1-8b-a100", [f"engine.profile={profile}"])
    backend_of(scenario, cost_model).execute(plan_of())  # type: ignore[arg-type]
    assert cost_model.shapes[-1].num_samples == 3 + num_prompts


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_draft_depth_counts_the_sequences_that_draft_as_deep(depths: list[int]) -> None:
    shape = shape_of(plan_of(tuple(depths), len(depths)))
    assert shape.drafting == tuple(sum(depth > k for depth in depths) for k in range(max(depths)))
    assert sum(shape.drafting) == sum(depths)
    assert shape.num_draft_tokens == sum(depths) + 5
    assert shape_of(plan_of(tuple(depths), len(depths)), ahead=4).drafting == (len(depths),) * 4


class PartialDrafter:
    """A drafter that has nothing for the second sequence."""

    def offered(self, plan: StepPlan) -> list[int]:
        return [depth * (number != 1) for number, depth in enumerate(plan.draft_depths)]

    def judge(self, plan: StepPlan) -> list[int]:
        return [0] * len(plan.draft_depths)


class Recorder:
    """A cost model that records the shapes it is called with."""

    has_runs = False

    def __init__(self) -> None:
        self.shapes: list[BatchShape] = []

    def duration_ps(self, shape: BatchShape) -> int:
        self.shapes.append(shape)
        return 7


def test_a_step_verifies_only_the_offered_drafts() -> None:
    cost_model = Recorder()
    SimulatedBackend(cost_model, PartialDrafter()).execute(plan_of((2, 3, 1)))  # type: ignore[arg-type]
    (shape,) = cost_model.shapes
    assert (shape.num_draft_tokens, shape.drafting) == (2 + 1 + 5, (2, 1))


def test_prompts_are_charged_their_steps_and_their_proportion_of_mixed_steps() -> None:
    """Steps of 10 (prompt), 20 (decode) and 40 (mixed). Prompts alone take three times as long as decodes alone."""
    time = PromptTime(lambda shape: (300, 100))
    assert time.share is None
    time.add(BatchShape(64, 1, ((64, 0),)), 10)
    time.add(BatchShape(3, 3, (), 3, 700), 20)
    assert time.share == pytest.approx(10 / 30)
    time.add(BatchShape(67, 4, ((64, 0),), 3, 700), 40)
    assert time.share == pytest.approx((10 + 30) / 70)
    time.add_decoding(30)
    assert time.share == pytest.approx(40 / 100)
    assert PromptTime(None).share is None


plans = st.lists(
    st.tuples(
        st.integers(0, 50), st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(0, 30), min_size=3, max_size=3)
    ),
    min_size=1,
    max_size=12,
)


@given(plans)
def test_plans_pass_the_host_and_then_the_stages_in_order(rows: list[tuple[int, int, int, list[int]]]) -> None:
    """A stage starts a plan once it arrives and the previous plan has left; the host schedules one at a time."""
    line, now, host, ends = FlowLine(3), 0, 0, [0, 0, 0]
    for gap, serial, hidden, stages in rows:
        now += gap
        at = max(now, host) + serial
        host = at + hidden
        for stage, duration in enumerate(stages):
            at = ends[stage] = max(at, ends[stage]) + duration
        assert line.end_of(StageTicks(serial, hidden, tuple(stages)), now) == max(at, host)


def test_a_balanced_pipeline_finishes_a_plan_per_stage_time() -> None:
    """Stages of 10 after a host of 4: the first plan takes 34, later ones follow 10 apart or at the host's pace."""
    for hidden, gap in ((0, 10), (25, 25 + 4)):
        line = FlowLine(3)
        ends = [line.end_of(StageTicks(4, hidden, (10, 10, 10)), 0) for _ in range(20)]
        assert ends[0] == 34
        assert {after - before for before, after in pairwise(ends[2:])} == {gap}


def test_tokenization_is_serial_and_output_processing_scales_with_the_batch() -> None:
    """10 us a token and 1 ms a request on the way in; 2 ms and 0.1 ms a sequence on the way out."""
    front = FrontEnd(ServerFit(in_s=1e-3, in_per_prompt_token_s=1e-5, out_s=2e-3, out_per_sequence_s=1e-4))
    ms = TICKS_PER_S // 1000
    first, second, later = (Request(number, 0, tokens, 5) for number, tokens in enumerate((1000, 500, 100)))
    assert front.delay(first, 0) == (10 + 1) * ms
    assert front.delay(second, 4 * ms) == (10 - 4 + 5 + 1) * ms
    assert front.delay(later, 100 * ms) == (1 + 1) * ms
    first.first_token_at, first.finished_at = 50 * ms, 90 * ms
    first.first_token_batch, first.last_token_batch = 10, 30
    front.deliver(first)
    assert (first.first_token_at, first.finished_at) == ((50 + 2 + 1) * ms, (90 + 2 + 3) * ms)


def test_a_mixed_step_is_split_by_the_time_of_its_parts_over_all_stages() -> None:
    """The last stage has the head, which decodes use more, so the prompt share over all stages differs from that of
    one. All sizes have four significant bits, so none is rounded."""
    scenario = load_scenario("llama-3.1-8b-a100", ["engine.pipeline_parallel_size=3"])
    cost_model = step_costs(scenario).cost_model()
    backend = SimulatedBackend(cost_model, is_split=True)
    plan = plan_of()
    plan.chunks[1] = Grant(plan.chunks[1].request, 32, 64)
    plan.num_chunk_tokens, plan.group_tokens = 128, 0
    backend.pass_through(plan)
    prompts, decodes = (sum(cost_model.pass_through(part).stages) for part in shape_of(plan).apart)
    assert backend.prompt_time.share == pytest.approx(prompts / (prompts + decodes), rel=1e-9)
