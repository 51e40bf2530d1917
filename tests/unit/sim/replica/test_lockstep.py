"""Ranks in lockstep: a step is as long as its slowest rank's, and the experts see everyone's tokens."""

from itertools import pairwise
from typing import Any

import pytest

from perfmodel.cost import GraphCostModel, OperatorTimer, StepTables
from perfmodel.engine import KVBlockManager, Outcome, Request, Scheduler, SchedulerConfig, ServeLoop, StepPlan
from perfmodel.engine import StepRecord as Record
from perfmodel.ops import BatchShape, Depends, build_graph, decode_shape
from perfmodel.sim import simulate
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.replica.lockstep import UNPADDED, Lockstep, PromptBalance, RankPadding
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.specs import EngineSpec, load_hardware, load_model, load_scenario

MOE = load_model("qwen3-30b-a3b")
HARDWARE = load_hardware("h100-sxm-80gb")
DP = 4
GRAPH = build_graph(MOE, EngineSpec(data_parallel_size=DP, enable_expert_parallel=True))
TABLES = StepTables(GRAPH, OperatorTimer(HARDWARE))


class TokenBackend:
    """A tick per token of the rank, and one per token of the group."""

    def execute(self, plan: StepPlan) -> Outcome:
        return Outcome(plan.num_tokens + plan.group_tokens)


def serve(
    loads: list[list[Request]],
    balance: PromptBalance | None = None,
    size: int | None = None,
    padding: RankPadding = UNPADDED,
) -> list[list[Record]]:
    """Each list of requests on a rank of its own; returns the ranks' step records."""
    env, records = TickEnvironment(), [[] for _ in loads]
    lockstep = Lockstep(env, TokenBackend(), balance=balance, size=size, padding=padding)
    for index, requests in enumerate(loads):
        loop = ServeLoop(Scheduler(SchedulerConfig(), KVBlockManager(1000, 16)))
        on_step = lambda replica, record: records[replica.index].append(record)  # noqa: E731
        replica = EngineRank(lockstep, index, loop, lambda _, request: None, on_step)
        for request in requests:
            replica.add(request)
    env.run()
    return records


def test_a_step_is_as_long_as_its_slowest_rank_needs() -> None:
    """100 prompt tokens on one rank, 10 on the other: both take 100 + 110 ticks."""
    long, short = serve([[Request(0, 0, 100, 3)], [Request(1, 0, 10, 3)]])
    assert [record.end - record.start for record in long] == [210, 3, 3]
    assert [(r.start, r.end) for r in short] == [(r.start, r.end) for r in long]


def test_some_ranks_of_a_group_stand_for_all_of_it() -> None:
    """Two ranks of eight: the experts see four times the tokens of these two, or eight times those of the larger."""
    for padding, prompts in ((UNPADDED, 4 * 110), (RankPadding(64, 100), 8 * 100)):
        ranks = serve([[Request(0, 0, 100, 3)], [Request(1, 0, 10, 3)]], size=8, padding=padding)
        for records in ranks:
            assert [record.end - record.start for record in records] == [100 + prompts, 1 + 8, 1 + 8]


@pytest.mark.parametrize(
    ("padding", "prompt", "decode"),
    [
        (UNPADDED, 110, 3),
        (RankPadding(decodes=64), 110, 4),  # in graphs, which no step with prompts has
        (RankPadding(decodes=64, prompts=99), 110, 4),  # the prompt is beyond the largest graph
        (RankPadding(decodes=64, prompts=100), 200, 4),
        (RankPadding(decodes=1, prompts=100), 200, 3),
    ],
)
def test_ranks_are_padded_to_the_largest(padding: RankPadding, prompt: int, decode: int) -> None:
    """100 prompt tokens on one rank, 10 on the other, which then decode 1 and 2 sequences."""
    busy, _ = serve([[Request(0, 0, 100, 2)], [Request(1, 0, 5, 2), Request(2, 0, 5, 2)]], padding=padding)
    assert [record.end - record.start for record in busy] == [100 + prompt, 2 + decode]


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"version": "0.16"}, (2048, 2048)),
        ({"version": "0.16", "enforce_eager": True}, (0, 0)),
        ({"version": "0.16", "enable_expert_parallel": True, "all2all_backend": "deepep_high_throughput"}, (0, 0)),
        ({"version": "0.17"}, (512, 512)),
        ({"profile": "sglang"}, (512, 0)),
    ],
)
def test_vllm_padded_all_ranks_of_all_steps_before_0_17(changes: dict[str, Any], tokens: tuple[int, int]) -> None:
    """vllm v0.16.0, allow_dp_padding, and v0.17.0, should_dp_pad."""
    assert EngineSpec(**{"profile": "vllm", "data_parallel_size": 8} | changes).padded_rank_tokens == tokens


def test_an_idle_rank_costs_nothing_and_tokens_are_conserved() -> None:
    busy, idle = serve([[Request(0, 0, 100, 5)], []])
    assert not idle
    assert [r.end - r.start for r in busy] == [200, 2, 2, 2, 2]
    assert sum(r.num_tokens * r.num_steps for r in busy) == 100 + 4


def test_steps_of_a_group_follow_each_other_without_gaps() -> None:
    for records in serve([[Request(0, 0, 30, 9)], [Request(1, 0, 5, 9)], [Request(2, 0, 80, 9)]]):
        assert all(one.end == next_.start for one, next_ in pairwise(records))


def starts_of_second_prompts(num_prompts: int, timeout: int) -> list[tuple[int, int]]:
    """(rank, step) at which prompts start that arrive while two ranks decode, one on each of the first ranks."""
    env, starts = TickEnvironment(), []
    lockstep = Lockstep(env, TokenBackend(), balance=PromptBalance(timeout) if timeout else None)

    def on_step(replica: EngineRank, record: Record) -> None:
        if record.num_chunks:
            starts.append((replica.index, record.step))

    loops = [ServeLoop(Scheduler(SchedulerConfig(), KVBlockManager(1000, 16))) for _ in range(2)]
    ranks = [EngineRank(lockstep, i, loop, lambda _, request: None, on_step) for i, loop in enumerate(loops)]
    for index, rank in enumerate(ranks):
        rank.add(Request(index, 0, 10, 60))
    env.run(until=100)
    for index in range(num_prompts):
        ranks[index].add(Request(2 + index, 100, 10, 2))
    env.run()
    return starts[2:]


def test_balanced_ranks_hold_a_prompt_until_all_have_one_or_the_wait_is_over() -> None:
    """TensorRT-LLM's attention-DP balance, with a timeout of 8 steps."""
    ((rank, at_once),) = starts_of_second_prompts(1, 0)
    assert rank == 0
    ((rank, held),) = starts_of_second_prompts(1, 8)
    assert rank == 0
    assert at_once < held <= at_once + 8
    assert starts_of_second_prompts(2, 8) == starts_of_second_prompts(2, 0) == [(0, at_once), (1, at_once)]


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "llama-3.1-8b"])
@pytest.mark.parametrize("dp", [1, 2])
def test_only_ranks_that_share_experts_are_a_group(name: str, dp: int) -> None:
    graph = build_graph(load_model(name), EngineSpec(data_parallel_size=dp))
    assert graph.has_group == (dp > 1 and name.startswith("qwen3"))


def test_experts_see_the_tokens_of_the_group_and_not_the_largest_rank_times_the_ranks() -> None:
    """8,000 tokens beside three ranks of 10 are as many for the experts as 2,007.5 on each of four."""
    uneven = TABLES.graph.by_depends[Depends.GROUP]
    one = TABLES.cost_of(uneven, BatchShape(8000, 0, group_tokens=8030)).duration
    even = TABLES.cost_of(uneven, BatchShape(2008, 0)).duration
    all_large = TABLES.cost_of(uneven, BatchShape(8000, 0)).duration
    assert one == pytest.approx(even, rel=0.01)
    assert one < 0.5 * all_large


def test_equal_ranks_need_not_be_told_the_group() -> None:
    cost_model, shape = GraphCostModel(TABLES), decode_shape(8, 1000)
    assert cost_model.duration_ps(shape) == cost_model.duration_ps(shape._replace(group_tokens=DP * 8))


def test_a_dense_model_serves_on_ranks_of_their_own_and_a_mixture_in_step() -> None:
    base = load_scenario("llama-3.1-8b-h100-2048-256", ["traffic.num_requests=40", "engine.data_parallel_size=2"])
    for model, together in ((base.model, False), (MOE, True)):
        steps = simulate(base.model_copy(update={"model": model})).steps
        assert steps is not None
        starts = [set(steps.start_s[steps.replica == rank]) for rank in (0, 1)]
        shared = len(starts[0] & starts[1]) / min(map(len, starts))
        assert (shared > 0.2) == together


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_equal_steps_are_merged_before_and_after_a_window_fills(is_async: str) -> None:
    """A prompt of 20 tokens and an answer of 200 before windows of 128: equal steps but for the one that fills them."""
    lengths = ("input", 20), ("output", 200)
    settings = [f"traffic.{name}_tokens={{distribution: fixed, value: {count}}}" for name, count in lengths]
    settings += [
        "model=tiny-gemma",
        "engine.max_model_len=512",
        "traffic.num_requests=1",
        f"engine.async_scheduling={is_async}",
    ]
    steps = simulate(load_scenario("llama-3.1-8b-a100", settings)).steps
    assert steps is not None
    assert steps.num_steps.sum() == 200
    assert (steps.index[1:] - steps.index[:-1]).tolist() in (
        steps.num_steps[:-1].tolist(),
        steps.num_steps[1:].tolist(),
    )
    assert len(steps) < 12
    assert steps.num_steps[steps.num_decodes > 0].max() > 50
