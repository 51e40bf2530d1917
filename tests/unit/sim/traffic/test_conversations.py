"""Turns of conversations: what their prompts contain, when they come, and what is cached of them."""

import json
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import PerfmodelError, WorkloadError
from perfmodel.sim.driver import simulate
from perfmodel.sim.traffic.conversations import Conversation, Turn, turns_of
from perfmodel.sim.traffic.traces import read_conversations
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs import load_scenario

BASE = "llama-3.1-8b-h100-2048-256"
TURNS = st.lists(
    st.builds(Turn, st.integers(1, 400), st.integers(1, 400), st.floats(0, 30)), min_size=1, max_size=8
).map(tuple)


def scenario(conversations="{turns: {distribution: uniform, low: 2, high: 6}, think_time: {mean_s: 3}}", *more):
    traffic = (
        "traffic={arrivals: {process: poisson, rate: 6}, num_requests: 150, "
        "input_tokens: {distribution: uniform, low: 20, high: 300}, "
        f"output_tokens: {{distribution: uniform, low: 10, high: 120}}, conversations: {conversations}}}"
    )
    return load_scenario(BASE, [traffic, *more])


@given(TURNS, st.integers(0, 200), st.sampled_from([16, 32]), st.integers(40, 3000))
def test_a_prompt_is_all_that_was_said_and_what_is_new(turns, system, block_size, limit):
    found = list(turns_of(Conversation(0.0, turns, system, 3), 7, block_size, limit))
    said = system
    for turn, each in zip(turns, found, strict=False):
        assert each.num_prompt_tokens == said + turn.num_new_tokens < limit
        assert each.num_output_tokens == min(turn.num_output_tokens, limit - each.num_prompt_tokens)
        said = each.num_prompt_tokens + each.num_output_tokens
        assert len(each.block_contents) == said // block_size
    for one, other in pairwise(found):
        assert other.block_contents[: len(one.block_contents)] == one.block_contents
    if len(found) < len(turns):
        assert said + turns[len(found)].num_new_tokens >= limit


@given(TURNS, TURNS, st.integers(0, 200), st.integers(0, 2), st.integers(0, 2))
def test_conversations_have_the_system_prompt_of_their_group_in_common_and_nothing_else(one, other, system, g, h):
    first, second = (
        set(list(turns_of(Conversation(0.0, turns, system, group), number, 16, 10**6))[-1].block_contents)
        for number, turns, group in ((1, one, g), (2, other, h))
    )
    assert len(first & second) == (system // 16 if g == h else 0)


def test_turns_come_a_pause_after_the_answer_and_in_their_order():
    result = simulate(
        scenario("{turns: {distribution: fixed, value: 5}, think_time: {mean_s: 2, distribution: fixed}}")
    )
    requests = result.requests
    assert len(requests) == 150
    for session in set(requests.session.tolist()):
        rows = np.flatnonzero(requests.session == session)
        rows = rows[np.argsort(requests.turn[rows])]
        assert requests.turn[rows].tolist() == list(range(len(rows)))
        np.testing.assert_allclose(requests.arrival_s[rows[1:]], requests.finished_s[rows[:-1]] + 2, rtol=1e-9)
        said = requests.num_prompt_tokens[rows] + requests.num_output_tokens[rows]
        assert (requests.num_prompt_tokens[rows[1:]] > said[:-1]).all()


def test_a_cache_with_room_has_all_that_was_computed():
    """Of a prompt all full blocks of what was said before but its last token, whose KV no step computed."""
    requests = simulate(scenario()).requests
    order = np.lexsort((requests.turn, requests.session))
    later = order[1:][np.diff(requests.session[order]) == 0]
    before = order[:-1][np.diff(requests.session[order]) == 0]
    said = requests.num_prompt_tokens[before] + requests.num_output_tokens[before]
    assert requests.num_cached_tokens[later].tolist() == ((said - 1) // 16 * 16).tolist()


def test_prefill_replicas_know_earlier_prompts_and_no_answers():
    """vLLM's NixlConnector as it is by default: KV goes from prefill to decode replicas, and nothing comes back. Of the
    prompt before all full blocks are there, and the answer to it is computed again."""
    result = simulate(
        scenario(
            "{turns: {distribution: fixed, value: 3}, think_time: {mean_s: 3}}",
            "cluster={pools: [{role: prefill}, {role: decode}]}",
        )
    )
    requests = result.requests
    order = np.lexsort((requests.turn, requests.session))
    is_later = np.diff(requests.session[order]) == 0
    later, before = order[1:][is_later], order[:-1][is_later]
    prompts = requests.num_prompt_tokens[before]
    assert requests.num_cached_tokens[later].tolist() == (prompts // 16 * 16).tolist()
    assert any("compute earlier answers again" in note for note in result.notes)
    assert not any("compute earlier answers again" in note for note in simulate(scenario()).notes)


def test_the_summary_counts_turns_and_conversations():
    result = simulate(scenario())
    found, requests = result.summary["conversations"], result.requests
    assert found["conversations"] == len(set(requests.session.tolist()))
    assert sum(each["requests"] for each in found["turns"]) == len(requests) == 150
    assert found["mean_turns"] == pytest.approx(150 / found["conversations"])
    whole = {}
    for session, e2el in zip(requests.session.tolist(), requests.e2el_s.tolist(), strict=True):
        whole[session] = whole.get(session, 0.0) + e2el
    assert found["mean_waiting_ms"] == pytest.approx(1e3 * np.mean(list(whole.values())))
    assert found["mean_duration_ms"] > found["mean_waiting_ms"]
    prompts = [each["mean_prompt_tokens"] for each in found["turns"]]
    assert prompts == sorted(prompts)


def test_requests_come_at_the_rate_that_is_asked_for():
    """Without pauses and with answers of one token, turns of a conversation come together: so do their rates."""
    loaded = scenario(
        "{turns: {distribution: uniform, low: 1, high: 9}}",
        "traffic.num_requests=3000",
        "traffic.output_tokens={distribution: fixed, value: 1}",
    )
    duration = simulate(loaded, keep_steps=False).summary["duration"]
    assert 3000 / duration == pytest.approx(6, rel=0.1)


def test_a_closed_loop_has_so_many_conversations_at_a_time():
    conversations = "{turns: {distribution: fixed, value: 3}, think_time: {mean_s: 1, distribution: fixed}}"
    requests = simulate(scenario(conversations, "traffic.arrivals={process: closed_loop, concurrency: 4}")).requests
    assert len(requests) == 150
    begins = [requests.arrival_s[requests.session == session].min() for session in set(requests.session.tolist())]
    ends = [requests.finished_s[requests.session == session].max() for session in set(requests.session.tolist())]
    assert max(sum(b <= t < e for b, e in zip(begins, ends, strict=True)) for t in begins) == 4


@pytest.mark.parametrize("process", ["{process: poisson, rate: 30}", "{process: closed_loop, concurrency: 6}"])
def test_leaps_change_nothing(process):
    tools = "think_time: {mean_s: 1}, tool_share: 0.5, tool_time: {mean_s: 0.2}"
    loaded = scenario(
        f"{{turns: {{distribution: uniform, low: 1, high: 6}}, {tools}}}",
        f"traffic.arrivals={process}",
        "engine.num_gpu_blocks_override=400",
    )
    leaping, stepping = (simulate(loaded, can_leap=can_leap).requests for can_leap in (True, False))
    for name in leaping.names:
        assert getattr(leaping, name).tolist() == getattr(stepping, name).tolist(), name


def test_a_session_stays_with_its_cache():
    fleet = ("cluster.replicas=4", "traffic.num_requests=300")
    hits = {}
    for router in ("session_affinity", "random"):
        result = simulate(scenario("{turns: {distribution: fixed, value: 6}}", *fleet, f"cluster.router={router}"))
        hits[router] = result.summary["prefix_cache_hit_rate"]
        homes = {len(set(result.requests.replica[result.requests.session == s])) for s in range(50)}
        assert (homes == {1}) == (router == "session_affinity")
    assert hits["session_affinity"] > 1.3 * hits["random"]


def test_a_conversation_ends_where_its_context_is_full():
    loaded = scenario("{turns: {distribution: fixed, value: 6}, system_tokens: 600}", "engine.max_model_len=1000")
    drafts = list(Workload(loaded).drafts())
    assert len(drafts) == 150
    assert max(draft.num_prompt_tokens for draft in drafts) < 1000
    assert len({draft.session for draft in drafts}) > 150 / 6


def test_equal_seeds_give_equal_turns_and_others_others():
    one, again, other = (list(Workload(scenario().model_copy(update={"seed": seed})).drafts()) for seed in (1, 1, 2))
    assert one == again != other


RECORDED = {
    "conversations": [
        {"arrival_s": 1.0, "system_tokens": 64, "turns": [{"input_tokens": 30, "output_tokens": 20}]},
        {"arrival_s": 2.5, "turns": [{"input_tokens": 8, "output_tokens": 4, "pause_s": 0}] * 2},
    ],
    "sharegpt": [
        {"id": "a", "conversations": [{"from": "human", "value": "x" * 119}, {"from": "gpt", "value": "y" * 80}]},
        {
            "conversations": [
                {"from": "system", "value": "s" * 256},
                *[{"from": "human", "value": "q" * 32}, {"from": "gpt", "value": "a" * 16}] * 2,
                {"from": "human", "value": "and?"},
            ]
        },
    ],
    "guidellm": [
        {"system_prompt": "s" * 8, "prompt": "x" * 120, "output_tokens_count": 20},
        {"prompt_1": "q" * 30, "prompt_0": "q" * 32, "output_tokens_count_1": 5, "output_tokens_count_0": 4},
    ],
    "aiperf": [
        {"session_id": "a", "turns": [{"role": "system", "text": "s" * 8}, {"text": "x" * 120, "output_length": 20}]},
        {"session_id": "b", "turns": [{"text": "q" * 32}, {"text": "q" * 32, "delay": 1500}]},
    ],
}


def written(tmp_path, format_, entries=None, as_array=False):
    file = tmp_path / f"{format_}.jsonl"
    entries = RECORDED[format_] if entries is None else entries
    file.write_text(json.dumps(entries) if as_array else "\n".join(map(json.dumps, entries)), encoding="utf-8")
    return file


@pytest.mark.parametrize("as_array", [False, True])
def test_sharegpt_texts_are_counted_by_four_characters(tmp_path, as_array):
    first, second = read_conversations(written(tmp_path, "sharegpt", as_array=as_array), "sharegpt")
    assert [turn[:2] for turn in first.turns] == [(30, 20)]
    assert second.num_system_tokens == 64
    assert [turn[:2] for turn in second.turns] == [(8, 4), (8, 4)]  # the last question has no answer


def test_aiperf_turns_have_delays_and_lengths_where_they_are_given(tmp_path):
    first, second = read_conversations(written(tmp_path, "aiperf"), "aiperf")
    assert (first.num_system_tokens, first.turns) == (2, ((30, 20, None),))
    assert second.turns == ((8, None, None), (8, None, 1.5))


def test_guidellm_columns_have_the_number_of_their_turn(tmp_path):
    first, second = read_conversations(written(tmp_path, "guidellm"), "guidellm")
    assert (first.num_system_tokens, first.turns) == (2, ((30, 20, None),))
    assert second.turns == ((8, 4, None), (8, 5, None))


@pytest.mark.parametrize("format_", list(RECORDED))
def test_recorded_conversations_are_served(tmp_path, format_):
    file = written(tmp_path, format_)
    arrivals = "" if format_ == "conversations" else ", arrivals: {process: poisson, rate: 2}"
    lengths = ", output_tokens: {distribution: fixed, value: 9}" if format_ == "aiperf" else ""
    traffic = f"traffic={{trace: {{path: {file}, format: {format_}}}{arrivals}{lengths}}}"
    requests = simulate(load_scenario(BASE, [traffic])).requests
    assert len(requests) == 3
    assert sorted(zip(requests.session.tolist(), requests.turn.tolist(), strict=True)) == [(0, 0), (1, 0), (1, 1)]
    if format_ == "conversations":
        assert sorted(requests.arrival_s.tolist())[:2] == [0.0, 1.5]


@pytest.mark.parametrize(
    ("format_", "entries", "words"),
    [
        ("conversations", [{"turns": [{"input_tokens": 0, "output_tokens": 1}]}], ":1: got 0 tokens"),
        ("conversations", [{"turns": [{"input_tokens": 5}]}], ":1: the conversation has no field 'output_tokens'"),
        ("conversations", [{"arrival_s": float("nan"), "turns": []}], ":1: got nan s"),
        ("conversations", [{"turns": []}], "has no conversation with a turn"),
        ("conversations", [*RECORDED["conversations"][::-1]], ":2: its arrival is before"),
        ("sharegpt", [{"conversations": [{"from": "alien", "value": "x"}]}], ":1: got a message from 'alien'"),
        ("sharegpt", [{"conversations": [{"from": "human", "value": 3}]}], ":1: got '3'; expected a text"),
        ("sharegpt", ["x"], ":1: got 'x'; expected a JSON object"),
        ("guidellm", [{"prompt": 7}], ":1: got '7'; expected a text"),
        ("guidellm", [{"answer": "x"}], "has no conversation with a turn"),
        ("aiperf", [{"turns": [{"delay": 4}]}], ":1: the conversation has no field 'text'"),
        ("aiperf", [{"turns": [{"text": "x", "delay": "soon"}]}], ":1: the conversation cannot be read"),
    ],
)
def test_bad_conversations_are_refused_with_their_line(tmp_path, format_, entries, words):
    with pytest.raises(WorkloadError) as refused:
        list(read_conversations(written(tmp_path, format_, entries), format_))
    assert words in str(refused.value)


@pytest.mark.parametrize("format_", ["conversations", "aiperf", "guidellm", "sharegpt"])
@pytest.mark.parametrize("bad", ['{"turns": [', '{"turns": ' + 10_000 * "[" + 10_000 * "]" + "}"])
def test_a_line_that_is_cut_off_or_nested_without_end_is_named(tmp_path, format_, bad):
    good = json.dumps(RECORDED[format_][0])
    for lines, number in (([bad, good], 1), ([good, bad], 2)):
        path = tmp_path / "trace"
        path.write_text("\n".join(lines), encoding="utf-8")
        with pytest.raises(WorkloadError, match=f":{number}: the conversation cannot be read"):
            list(read_conversations(path, format_))


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        (("traffic.conversations={tool_share: 0.5, turns: {distribution: fixed, value: 2}}",), "without tool_time"),
        (("traffic.conversations={}",), "need `turns`"),
        (("traffic.prefix={shared_tokens: 10}",), "beside a prefix"),
        (("traffic.arrivals={process: burst, order: longest_prompt_first}",), "in their own order"),
        (("engine.max_model_len=250", "traffic.input_tokens={distribution: fixed, value: 300}"), "begins with 300"),
    ],
)
def test_what_excludes_conversations_is_refused(settings_, words):
    with pytest.raises(PerfmodelError) as refused:
        simulate(scenario("{turns: {distribution: fixed, value: 2}}", *settings_))
    assert words in str(refused.value)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 8), st.floats(0, 1), st.integers(60, 500), st.booleans())
def test_every_turn_is_answered_once_whatever_the_blocks(seed, turns, share, blocks, is_closed):
    arrivals = "{process: closed_loop, concurrency: 5}" if is_closed else "{process: gamma, rate: 20, cv: 2}"
    loaded = scenario(
        f"{{turns: {{distribution: fixed, value: {turns}}}, tool_share: {share}, tool_time: {{mean_s: 0.1}}}}",
        *("traffic.num_requests=60", f"traffic.arrivals={arrivals}"),
        *(f"engine.num_gpu_blocks_override={blocks}", "engine.max_model_len=900", f"seed={seed}"),
    )
    requests = simulate(loaded).requests
    assert sorted(requests.request_id.tolist()) == list(range(60))
    assert (requests.num_cached_tokens < requests.num_prompt_tokens).all()


@pytest.mark.parametrize("count", [1, 4])
def test_conversations_are_spread_evenly_over_groups(count):
    """One of four groups has 100 of 400, within four standard deviations."""
    grouped = scenario(
        f"{{turns: {{distribution: fixed, value: 2}}, system_tokens: 64, num_groups: {count}}}",
        "traffic.num_requests=800",
    )
    groups = [turns[0][1].block_hashes[0] for turns in islice(Workload(grouped).conversations(), 400)]
    assert len(groups) == 400
    assert len(set(groups)) == count
    assert max(groups.count(group) for group in set(groups)) <= 400 / count + 35
