"""Pipeline stages on the simulated clock: GPipe's makespan, the round of circulating plans, a sequence on its own."""

from itertools import pairwise

import pytest
from engine_integrity import check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost import StageTicks, step_costs
from perfmodel.cost.steps.stages import StageTimes, round_time
from perfmodel.engine import Outcome, Request, SchedulerConfig, StepPlan, StepRecord
from perfmodel.ops import decode_shape
from perfmodel.planning.points import device_shares
from perfmodel.sim import simulate
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.pipeline import Pipeline
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import OpenLoopClient
from perfmodel.specs import load_scenario
from workloads import Case, duration_of, pipelined_cases, serve_in_stages, stages_of

CHUNK = 100


class ScriptedStages:
    """Every plan takes the same in a stage."""

    def __init__(self, *stages: int, serial: int = 0, hidden: int = 0) -> None:
        self.times = StageTicks(serial, hidden, stages)
        self.num_stages = len(stages)

    def pass_through(self, plan: StepPlan) -> StageTicks:
        return self.times

    def execute(self, plan: StepPlan) -> Outcome:
        return Outcome(sum(self.times.stages))


def serve(
    backend: ScriptedStages, *requests: Request, budget: int = CHUNK
) -> tuple[Pipeline, list[StepRecord], list[Request]]:
    config = SchedulerConfig(
        max_num_seqs=min(budget, 64), max_num_batched_tokens=budget, pipeline_parallel_size=backend.num_stages
    )
    case = Case(config, 10_000, False, True, ())
    env, records, finished = TickEnvironment(), [], []
    clock = Pipeline(env, backend)
    replica = EngineRank(
        clock, 0, case.loop(), lambda _, request: finished.append(request), lambda _, record: records.append(record)
    )
    OpenLoopClient(env, iter(requests), lambda request: replica)
    env.run()
    return clock, records, finished


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 7, 32])
def test_chunks_of_one_prompt_take_as_long_as_microbatches_of_gpipe(p: int, m: int) -> None:
    """m chunks over p stages of t each: (m + p - 1) t, of which (p - 1) / (m + p - 1) are bubbles (Huang et al.)."""
    t = 1000
    clock, _, (request,) = serve(ScriptedStages(*[t] * p), Request(0, 0, m * CHUNK, 1))
    assert request.finished_at == clock.ticks_under_way == (m + p - 1) * t
    busy = m * p * t
    assert 1 - busy / (p * clock.ticks_under_way) == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("stages", [(5, 5), (3, 9, 4), (1, 2, 3, 4)])
def test_a_sequence_that_decodes_alone_waits_for_all_stages(stages: tuple[int, ...]) -> None:
    _, _, (request,) = serve(ScriptedStages(*stages, serial=2, hidden=1), Request(0, 0, 10, 51))
    assert (request.finished_at or 0) - (request.first_token_at or 0) == 50 * (sum(stages) + 2)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(0, 20), st.integers(0, 80), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_plans_that_go_round_take_the_round_in_closed_form(
    stages: list[int], serial: int, hidden: int, num_plans: int
) -> None:
    """Each prompt fills a plan of its own, so that as many plans decode as there are requests, up to the stages."""
    num_plans, outputs = min(num_plans, len(stages)), 201
    requests = [Request(i, 0, CHUNK, outputs) for i in range(num_plans)]
    _, _, finished = serve(ScriptedStages(*stages, serial=serial, hidden=hidden), *requests)
    each = {((r.finished_at or 0) - (r.first_token_at or 0)) / (outputs - 1) for r in finished}
    expected = round_time({StageTimes(serial, hidden, tuple(stages)): num_plans})
    assert len(finished) == num_plans
    for tpot in each:
        assert tpot == pytest.approx(expected, rel=0.01)


def test_requests_that_come_while_a_plan_is_under_way_join_it_for_good() -> None:
    """vLLM's engine waits for the oldest plan although the queue has room: the second request's prompt runs beside the
    first one's next token, both decode together from then on, and three of four stages are idle at any time."""
    stages, outputs = (10, 10, 10, 10), 40
    _, records, finished = serve(ScriptedStages(*stages), Request(0, 0, 8, outputs), Request(1, 15, 8, outputs))
    assert [request.first_scheduled_at for request in sorted(finished, key=lambda r: r.request_id)] == [0, 40]
    assert [record.num_decodes for record in records[:4]] == [0, 1, 2, 2]
    assert all(one.end == two.start for one, two in pairwise(records))


def on_the_clock(case: Case, is_pipeline: bool) -> list[tuple[int, ...]]:
    class Backend:
        num_stages = case.config.pipeline_parallel_size

        def pass_through(self, plan: StepPlan) -> StageTicks:
            return StageTicks(0, 0, tuple(stages_of(plan, self.num_stages)))

        def execute(self, plan: StepPlan) -> Outcome:
            return Outcome(1 + duration_of(plan))

    env, rows = TickEnvironment(), []
    clock = Pipeline(env, Backend()) if is_pipeline else Lockstep(env, Backend())

    def on_finished(_: EngineRank, request: Request) -> None:
        rows.append((request.request_id, request.first_token_at or 0, request.finished_at or 0))

    replica = EngineRank(clock, 0, case.loop(), on_finished, lambda replica, _: check_integrity(replica.loop.scheduler))
    OpenLoopClient(env, iter(case.requests()), lambda request: replica)
    env.run()
    return sorted(rows)


@given(pipelined_cases())
@settings(max_examples=150, deadline=None)
def test_the_simulated_clock_serves_as_the_plainest_driver_of_stages_does(case: Case) -> None:
    served = serve_in_stages(case)
    ends = sorted((r.request_id, r.first_token_at or 0, r.finished_at or 0) for r in served.requests)
    assert on_the_clock(case, is_pipeline=True) == ends
    if case.config.pipeline_parallel_size == 1 and not case.is_async:
        assert on_the_clock(case, is_pipeline=False) == ends


# ---------------------------------------------------------------------------------------------- with the cost model

BASE = "llama-3.1-8b-h100-2048-256"


def run(pp: int, *overrides: str):
    return simulate(load_scenario(BASE, [f"engine.pipeline_parallel_size={pp}", *overrides]))


@pytest.mark.parametrize("pp", [2, 4])
def test_a_lone_request_has_the_tpot_of_its_stages_and_hops_and_bubbles_in_all_but_one(pp: int) -> None:
    result = run(pp, "traffic.num_requests=1")
    estimate = step_costs(result.scenario).estimate(decode_shape(1, 2048 + 128)).pipeline
    assert estimate is not None
    assert result.summary["mean_tpot_ms"] == pytest.approx(1e3 * estimate.latency_s, rel=2e-3)
    assert result.summary["pipeline_bubble_share"] == pytest.approx(estimate.bubble_share, rel=0.01)


@pytest.mark.parametrize("pp", [2, 4])
def test_many_balanced_requests_decode_at_the_rate_of_the_closed_form(pp: int) -> None:
    """Prompts that fill a plan each; then as many plans under way as there are stages, of equally many sequences."""
    batch, outputs = 16 * pp, 1000
    result = run(
        pp,
        f"traffic.num_requests={batch}",
        f"traffic.arrivals={{process: closed_loop, concurrency: {batch}}}",
        "engine.profile=datasheet",  # without a front end, which would spread their arrivals
        "traffic.input_tokens={distribution: fixed, value: 128}",
        f"traffic.output_tokens={{distribution: fixed, value: {outputs}}}",
        "engine.max_num_seqs=2048",
        "engine.enable_prefix_caching=false",
    )
    assert result.summary["completed"] == batch
    estimate = step_costs(result.scenario).estimate(decode_shape(batch, 128 + outputs // 2))
    assert estimate.pipeline is not None
    assert estimate.pipeline.num_plans == pp
    assert result.summary["mean_tpot_ms"] == pytest.approx(1e3 * estimate.duration_s, rel=0.02)


def test_short_prompts_at_once_end_up_in_one_plan_of_vllm_and_in_even_ones_of_sglang() -> None:
    """64 prompts that fit one plan's budget together: three of four stages idle, or a quarter of them on each."""
    burst = [
        "traffic.num_requests=64",
        "traffic.arrivals={process: closed_loop, concurrency: 64}",
        "traffic.input_tokens={distribution: fixed, value: 16}",
        "traffic.output_tokens={distribution: fixed, value: 400}",
        "engine.max_num_seqs=64",
        "hardware=a100-sxm-80gb",
    ]
    one, even = (run(4, *burst, f"engine.profile={profile}") for profile in ("datasheet", "sglang"))
    assert one.steps is not None
    assert even.steps is not None
    assert set(one.steps.num_decodes[one.steps.num_chunks == 0]) == {64}
    assert max(even.steps.num_decodes) == 16
    assert one.summary["pipeline_bubble_share"] > 0.7
    assert even.summary["pipeline_bubble_share"] < 0.35


def test_shares_and_energy_add_up_with_stages() -> None:
    """Bubbles and work make up the time in which plans were under way; idle devices draw what idle ones draw."""
    one, four = run(1, "traffic.num_requests=60"), run(4, "traffic.num_requests=60")
    assert "pipeline_bubble_share" not in one.summary
    for result in (one, four):
        assert sum(result.summary["bound_share"].values()) == pytest.approx(1.0)
        assert result.summary["completed"] == 60
    assert four.summary["gpu_hours"] == pytest.approx(4 * four.summary["duration"] / 3600)
    # The same work on four devices: as much energy above idling, and idling for four.
    hardware = four.scenario.hardware
    idle = hardware.declared.idle_w or 0.15 * (hardware.declared.tdp_w or 0)
    active = [r.summary["energy_j"] - n * idle * r.summary["duration"] for r, n in ((one, 1), (four, 4))]
    assert active[0] == pytest.approx(active[1], rel=0.05)
    assert 0.5 < four.summary["pipeline_bubble_share"] < 0.8
    for result in (one, four):
        assert sum(device_shares(result.summary).values()) == pytest.approx(1.0)


def test_ranks_of_a_mixture_of_experts_pass_the_stages_together() -> None:
    scenario = [
        "model=qwen3-30b-a3b",
        "engine.data_parallel_size=2",
        "engine.enable_expert_parallel=true",
        "traffic.num_requests=24",
    ]
    result = run(2, *scenario)
    steps = result.steps
    assert steps is not None
    assert result.summary["completed"] == 24
    starts = [set(steps.start_s[steps.replica == rank]) for rank in (0, 1)]
    assert len(starts[0] & starts[1]) > 0.2 * min(map(len, starts))


def test_prompts_in_chunks_fill_the_pipeline_as_sarathi_found() -> None:
    """GPT-3 on 8 x 8 A100s, prompts ten times as long as answers: 1.91 times the throughput of whole prompts, bubbles
    6.29 times as short (Agrawal et al. 2023, a simulation, too). Lengths are assumed: up to what the card allows."""
    setup = [
        "model=opt-175b",
        "hardware=a100-sxm-80gb",
        "engine.tensor_parallel_size=8",
        "engine.max_model_len=2048",
        "engine.max_num_seqs=216",
        "engine.enable_prefix_caching=false",
        "traffic.arrivals={process: burst}",
        "traffic.num_requests=400",
        "traffic.input_tokens={distribution: uniform, low: 930, high: 1850}",
        "traffic.output_tokens={distribution: uniform, low: 93, high: 185}",
    ]
    whole = run(8, *setup, "engine.enable_chunked_prefill=false", "engine.max_num_batched_tokens=4096").summary
    parts = run(8, *setup, "engine.max_num_batched_tokens=256").summary
    assert parts["output_throughput"] / whole["output_throughput"] == pytest.approx(1.91, rel=0.25)
    bubbles = [summary["pipeline_bubble_share"] * summary["duration"] for summary in (whole, parts)]
    assert bubbles[0] > 6.29 * bubbles[1]


def test_nothing_depends_on_whether_steps_may_be_advanced_together() -> None:
    scenario = load_scenario(BASE, ["engine.pipeline_parallel_size=3", "traffic.num_requests=40"])
    rows = [simulate(scenario, can_leap=can_leap).requests for can_leap in (True, False)]
    assert rows[0] is not None
    assert rows[1] is not None
    for name in ("request_id", "first_token_s", "finished_s"):
        assert (getattr(rows[0], name) == getattr(rows[1], name)).all()
