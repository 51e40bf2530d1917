"""Several answers of a prompt, and iterations of reinforcement learning that are made of them."""

from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import SpecError
from perfmodel.planning.search import make_plan
from perfmodel.sim import simulate
from perfmodel.sim.records.columns import RequestColumns, rollout_times
from perfmodel.sim.traffic.workload import RequestDraft, Workload
from perfmodel.specs import Scenario, load_scenario

LONGEST = 4096


def scenario(traffic: dict[str, Any], *more: str) -> Scenario:
    lengths = {
        "input_tokens": {"distribution": "uniform", "low": 40, "high": 400},
        "output_tokens": {"distribution": "lognormal", "mean": 60, "std": 60, "max": 900},
    }
    changes = (
        "model=llama-3.1-8b",
        "hardware=h100-sxm-80gb",
        f"engine={{max_model_len: {LONGEST}, profile: vllm}}",
        f"traffic={lengths | traffic}",
    )
    return load_scenario("llama-3.1-8b-h100-2048-256", (*changes, *more))


BURST = {"arrivals": {"process": "burst"}, "num_requests": 48, "samples_per_prompt": 4}


def drafts(traffic: dict[str, Any]) -> list[RequestDraft]:
    return list(Workload(scenario(traffic)).drafts())


def test_answers_of_a_prompt_share_it_and_have_lengths_of_their_own() -> None:
    groups = [list(group) for _, group in groupby(drafts(BURST), key=lambda draft: draft.session)]
    assert [len(group) for group in groups] == [4] * 12
    for group in groups:
        assert len({(draft.num_prompt_tokens, draft.block_hashes) for draft in group}) == 1
        assert len(group[0].block_hashes) == group[0].num_prompt_tokens // 16
    contents = [set(group[0].block_hashes) for group in groups]
    assert len(set().union(*contents)) == sum(map(len, contents))  # prompts share nothing with each other
    assert len({draft.num_output_tokens for draft in groups[0]}) > 1


@pytest.mark.parametrize("router", ["round_robin", "random", "power_of_two", "least_outstanding"])
def test_answers_of_a_prompt_go_to_one_replica(router: str) -> None:
    """They are one request at a router, so three of four find the prompt in the cache of the first."""
    changes = ("cluster.replicas=3", f"cluster.router={router}", "traffic.input_tokens.low=100")
    requests = simulate(scenario(BURST, *changes)).requests
    replicas = requests.replica[np.argsort(requests.request_id)].reshape(-1, 4)
    assert (replicas == replicas[:, :1]).all()
    assert len(set(replicas[:, 0])) == 3
    assert np.count_nonzero(requests.num_cached_tokens) == 36


def test_one_answer_a_prompt_draws_what_it_drew_before() -> None:
    plain = drafts(BURST | {"samples_per_prompt": 1})
    sampled = drafts(BURST)
    assert [draft.num_prompt_tokens for draft in sampled[::4]] == [draft.num_prompt_tokens for draft in plain[:12]]
    assert not any(draft.block_hashes for draft in plain)


def test_rates_count_answers_so_prompts_come_at_a_share_of_them() -> None:
    open_loop = {"arrivals": {"process": "constant", "rate": 8}, "num_requests": 40, "samples_per_prompt": 4}
    times = [draft.arrival_s or 0.0 for draft in drafts(open_loop)]
    assert [times.count(time) for time in dict.fromkeys(times)] == [4] * 10
    assert [later - time for time, later in pairwise(dict.fromkeys(times))] == pytest.approx([0.5] * 9)


def test_n_answers_compute_their_prompts_whole_blocks_once() -> None:
    """A prompt of 160 tokens is ten blocks: the first answer computes all, each of the others finds nine, as the last
    block is computed for its logits. 7 x 144 of 8 x 160 tokens are found."""
    fixed = BURST | {"samples_per_prompt": 8, "input_tokens": {"distribution": "fixed", "value": 160}}
    result = simulate(scenario(fixed))
    cached = np.sort(result.requests.num_cached_tokens)
    assert cached.tolist() == [0] * 6 + [144] * 42
    assert result.summary["prefix_cache_hit_rate"] == pytest.approx(7 * 144 / (8 * 160))


def test_in_rollouts_affinity_keeps_the_answers_of_a_prompt_together_and_round_robin_does_not() -> None:
    rollouts = BURST | {"rollouts": {"iterations": 1}}
    split, together = (
        simulate(scenario(rollouts, "cluster.replicas=2", f"cluster.router={router}")).summary["prefix_cache_hit_rate"]
        for router in ("round_robin", "session_affinity")
    )
    assert split < 0.55 < 0.65 < together < 0.75


def test_a_closed_loop_user_asks_again_when_all_answers_have_come() -> None:
    loop = {"arrivals": {"process": "closed_loop", "concurrency": 8}, "num_requests": 32, "samples_per_prompt": 4}
    requests = simulate(scenario(loop)).requests
    by_arrival = {}
    for arrival, end, number in zip(requests.arrival_s, requests.finished_s, requests.request_id // 4, strict=True):
        by_arrival.setdefault(int(number), []).append((float(arrival), float(end)))
    assert all(len({arrival for arrival, _ in group}) == 1 for group in by_arrival.values())
    ends = [max(end for _, end in by_arrival[number]) for number in range(8)]
    begins = [by_arrival[number][0][0] for number in range(8)]
    assert begins[:2] == [0, 0]
    assert begins[2] == pytest.approx(min(ends[:2]), abs=0.05)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"classes": [{"name": "a", "share": 1}]}, "beside a trace, conversations or classes"),
        ({"arrivals": {"process": "closed_loop", "concurrency": 6}}, "got concurrency 6, .* a multiple of"),
        ({"rollouts": {}, "arrivals": {"process": "poisson", "rate": 1}}, "whose iterations are bursts"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        scenario(BURST | change)


def test_greedy_sampling_with_several_answers_is_refused_as_vllm_does() -> None:
    with pytest.raises(SpecError, match="greedy"):
        scenario(BURST, "sampling.method=greedy")


# ---------------------------------------------------------------- rollouts


def rolled(**rollouts: Any) -> Scenario:
    return scenario(BURST | {"rollouts": {"iterations": 3, "weight_update_s": 7} | rollouts})


def iterations(result_or_requests: RequestColumns) -> list[RequestColumns]:
    times = np.unique(result_or_requests.arrival_s)
    return [result_or_requests.some(np.flatnonzero(result_or_requests.arrival_s == time)) for time in times]


def test_an_iteration_begins_an_update_after_the_last_answer_of_the_one_before() -> None:
    result = simulate(rolled())
    parts = iterations(result.requests)
    assert [len(part) for part in parts] == [48] * 3
    for part, later in pairwise(parts):
        assert later.arrival_s[0] == pytest.approx(part.finished_s.max() + 7, abs=0.05)
    assert result.summary["iteration_s"] == pytest.approx(result.summary["rollout_s"] + 7)
    assert result.summary["rollout_s"] == pytest.approx(
        np.mean([part.finished_s.max() - part.arrival_s[0] for part in parts])
    )


def test_new_weights_leave_nothing_in_the_prefix_cache() -> None:
    """Prompts of one group begin alike: they find each other's within an iteration, and never the one before's."""
    shared = BURST | {"prefix": {"shared_tokens": 64}, "samples_per_prompt": 1, "rollouts": {"iterations": 2}}
    first, second = iterations(simulate(scenario(shared)).requests)
    assert [int((part.num_cached_tokens == 0).sum()) for part in (first, second)] == [1, 1]


@settings(max_examples=20, deadline=None)
@given(budget=st.integers(20, 300), count=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_cut_answer_goes_on_until_all_its_tokens_are_there(budget: int, count: int, seed: int) -> None:
    """Each answer of L tokens comes in ceil(L / budget) parts, one an iteration, each with all before it as prompt."""
    partial = rolled(max_answer_tokens=budget, iterations=count).with_({"seed": seed})
    workload, whole = Workload(partial), {}
    stream = Workload(partial.with_({"traffic.num_requests": 48 * count})).drafts()
    answers = list(stream)
    left: list[tuple[int, int]] = []
    for number, group in enumerate(workload.conversations()):
        expected = left + [(d.num_prompt_tokens, d.num_output_tokens) for d in answers[48 * number : 48 * number + 48]]
        assert [(r.num_prompt_tokens, r.max_output_tokens) for _, r, _ in group] == [
            (prompt, min(output, budget)) for prompt, output in expected
        ]
        left = [(prompt + budget, output - budget) for prompt, output in expected if output > budget]
        whole[number] = sum(request.max_output_tokens for _, request, _ in group)
    assert sum(whole.values()) + sum(output for _, output in left) == sum(d.num_output_tokens for d in answers)
    assert all(after == -1 for _, _, after in group)


def test_resumed_answers_compute_their_prompt_and_tokens_again_and_say_so() -> None:
    result = simulate(rolled(max_answer_tokens=50))
    _, second, _ = iterations(result.requests)
    resumed = second.some(np.flatnonzero(second.request_id < second.request_id.min() + len(second) - 48))
    assert len(resumed) == sum(draft.num_output_tokens > 50 for draft in drafts(BURST)) > 10
    # Siblings that were both cut share their prompt's whole blocks again; nothing beyond them.
    assert (resumed.num_cached_tokens <= 400).all()
    assert (resumed.num_prompt_tokens > 50).all()
    assert any("resume an answer that was cut" in note for note in result.notes)


def test_cutting_answers_shortens_the_tail() -> None:
    whole, cut = (simulate(rolled(**change)).summary for change in ({}, {"max_answer_tokens": 100}))
    assert cut["rollout_s"] < 0.7 * whole["rollout_s"]
    assert cut["slowest_tenth_share"] < whole["slowest_tenth_share"]


def columns(ends: list[float], engines: list[int], begin: float = 0.0) -> dict[str, Any]:
    count = len(ends)
    zeros = np.zeros(count, np.int64)
    counts = ("request_id", "num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions")
    return {
        **dict.fromkeys(counts, zeros),
        "arrival_s": np.full(count, begin),
        "first_scheduled_s": np.full(count, begin),
        "first_token_s": np.full(count, begin),
        "finished_s": np.array(ends),
        "replica": np.array(engines),
    }


def test_shares_of_a_rollout_by_hand() -> None:
    """Ten answers on two engines: nine in ten are there at 9 s of 20, engine 1 is done at 8 s. With the second
    iteration, of ten seconds more in which engine 1 has nothing: a tail of 11 + 0 of 30 s, idle (12 + 10) / 2 of 30."""
    first = columns([1, 2, 3, 4, 5, 6, 7, 8, 9, 20], [0, 1, 0, 1, 0, 1, 0, 1, 0, 0])
    second = columns([35.0], [0], begin=25.0)
    rows = RequestColumns(**{name: np.concatenate([first[name], second[name]]) for name in first})
    times = rollout_times(rows, 5.0)
    assert times["rollout_s"] == pytest.approx(15)
    assert times["iteration_s"] == pytest.approx(20)
    assert times["slowest_tenth_share"] == pytest.approx(11 / 30)
    assert times["idle_share"] == pytest.approx(11 / 30)
    assert times["update_share"] == pytest.approx(10 / 40)


def test_iterations_are_planned_one_at_a_time(tmp_path: Path) -> None:
    job = ("plan.objective=shortest_job", "traffic.rollouts={iterations: 2}")
    with pytest.raises(SpecError, match="out to plan one iteration"):
        make_plan("summaries-8b-offline", job, tmp_path / "points.sqlite")
