"""Several front ends, ranks left to chance, and whose servers have the work of prompts' texts."""

from collections import Counter
from itertools import pairwise

import pytest

from perfmodel.engine import Request
from perfmodel.sim.driver import simulate
from perfmodel.sim.fleet.pool import FleetRouter
from perfmodel.sim.fleet.routing import ROUTERS, FrontEnds
from perfmodel.specs import load_scenario


class Target:
    """What routers know of a replica or rank."""

    block_size, num_outstanding, num_prompt_blocks = 16, 0, 0

    def __init__(self, index: int, num_ranks: int = 0) -> None:
        self.index = index
        self.ranks = tuple(Target(10 * index + rank) for rank in range(num_ranks))

    def watch(self, on_less: object) -> None: ...


def requests(count: int) -> list[Request]:
    return [Request(number, 0, 100, 10) for number in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_front_ends_that_take_turns_each_reach_all_in_turn(seed: int) -> None:
    """Ten front ends before three workers: 30 requests give each ten, but three in a row are not one for each."""
    router = FrontEnds(ROUTERS["round_robin"], 10, seed)
    for index in range(3):
        router.join(Target(index))
    chosen = [router(request).index for request in requests(60)]
    assert Counter(chosen[:30]) == Counter(chosen[30:]) == {0: 10, 1: 10, 2: 10}
    assert {(after - before) % 3 for before, after in zip(chosen[:10], chosen[10:20], strict=True)} == {1}
    assert any(len(set(chosen[i : i + 3])) < 3 for i in range(0, 30, 3))


def test_a_target_that_leaves_one_leaves_all() -> None:
    router = FrontEnds(ROUTERS["least_outstanding"], 4)
    targets = [Target(index) for index in range(3)]
    for target in targets:
        router.join(target)
    router.leave(targets[1])
    assert {router(request).index for request in requests(20)} <= {0, 2}
    assert len(router.targets) == 2


def test_one_request_a_worker_waits_where_front_ends_do_not_know_each_other() -> None:
    """Three workers of one slot each and three requests at a time. One router in turn has nearly always a free worker
    for them; of ten, which choose apart, a request meets each other one on its worker with a chance of a third, and
    then waits for most of an answer (measured: 0.72 answers, docs/disaggregation.md)."""
    waits = {}
    for front_ends in (1, 10):
        settings = ["engine.profile=trtllm", "traffic.arrivals={process: closed_loop, concurrency: 3}"]
        settings += ["traffic.num_requests=60", "traffic.input_tokens={distribution: fixed, value: 100}"]
        settings += ["traffic.output_tokens={distribution: uniform, low: 80, high: 100}"]
        pools = "[{role: prefill, engine: {max_num_seqs: 8}}, {role: decode, replicas: 3, engine: {max_num_seqs: 1}}]"
        settings += [f"cluster={{front_ends: {front_ends}, pools: {pools}}}"]
        summary = simulate(load_scenario("llama-3.1-8b-h100-2048-256", settings)).summary
        answer_ms = summary["mean_e2el_ms"] - summary["mean_ttft_ms"]
        waits[front_ends] = summary["mean_ttft_ms"] / answer_ms
    assert waits[1] < 0.15
    assert 0.35 < waits[10] < 1.2


def test_ranks_left_to_chance_are_no_less_loaded_ones() -> None:
    """Eight ranks, 8,000 requests that never end: by chance each has 1,000, give or take 4 x 30; no two neighbours in
    the order of arrival are bound to different ranks."""
    replica = Target(0, num_ranks=8)
    router = FleetRouter("round_robin", [replica], seed=7, within="random")  # type: ignore[list-item]
    chosen = [router(request).index for request in requests(8000)]
    assert all(abs(count - 1000) < 120 for count in Counter(chosen).values())
    same = sum(a == b for a, b in pairwise(chosen))
    assert abs(same - 1000) < 120


def test_a_replica_and_its_rank_are_drawn_apart() -> None:
    """Four replicas of four ranks, both by chance: all sixteen ranks are reached."""
    replicas = [Target(index, num_ranks=4) for index in range(4)]
    router = FleetRouter("random", replicas, seed=3, within="random")  # type: ignore[arg-type]
    assert len({router(request).index for request in requests(400)}) == 16


@pytest.mark.parametrize(("profile", "version", "role", "by"), [
    ("sglang", "0.5.5", "decode", "random"),
    ("sglang", "0.5.8", "decode", "round_robin"),
    ("sglang", "0.5.8", "prefill", "random"),
    ("sglang", "0.5.8", "unified", "round_robin"),
    ("vllm", "0.30", "prefill", None),
])  # fmt: skip
def test_engines_say_how_they_choose(profile: str, version: str, role: str, by: str | None) -> None:
    """data_parallel_controller.py and server_args.py, _handle_load_balance_method."""
    settings = (f"engine.profile={profile}", f"engine.version={version}")
    engine = load_scenario("llama-3.1-8b-h100-2048-256", settings).engine
    assert engine.described.facts.ranks_by.get(role) == by


def test_a_pool_chooses_ranks_as_its_role_has_it() -> None:
    """SGLang 0.5.8: ranks of decode workers take turns, those of prefill workers do not."""
    settings = ["engine.profile=sglang", "engine.version=0.5.8", "cluster.pools=[{role: prefill}, {role: decode}]"]
    scenario = load_scenario("llama-3.1-8b-h100-2048-256", settings)
    takes_turns = {}
    for pool in scenario.pools:
        router = FleetRouter.of("round_robin", [Target(0, num_ranks=4)], scenario, pool)  # type: ignore[list-item]
        chosen = [router(request).index for request in requests(40)]
        takes_turns[pool.role] = all(a == b for a, b in pairwise(chosen[::4]))
    assert takes_turns == {"prefill": False, "decode": True}


def test_prefill_replicas_share_the_work_of_texts() -> None:
    """16 prompts of 8,000 tokens at once, 15.6 us a token, one after another in each server: four servers are through
    in a quarter of the time."""
    last = {}
    for replicas in (1, 4):
        settings = ["engine.profile=sglang", "traffic.arrivals={process: closed_loop, concurrency: 16}"]
        settings += ["traffic.num_requests=16", "traffic.input_tokens={distribution: fixed, value: 8000}"]
        settings += ["traffic.output_tokens={distribution: fixed, value: 2}"]
        settings += [f"cluster.pools=[{{role: prefill, replicas: {replicas}}}, {{role: decode}}]"]
        requests = simulate(load_scenario("llama-3.1-8b-h100-2048-256", settings)).requests
        assert requests is not None
        last[replicas] = float((requests.first_scheduled_s - requests.arrival_s).max())
    serial = 8000 * 1.5648e-5
    assert last[1] >= 16 * serial
    assert 4 * serial <= last[4] < 8 * serial
