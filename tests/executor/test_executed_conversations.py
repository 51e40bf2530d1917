"""Turns of conversations, executed: a prompt has the model's own answers in it, and finds their KV in the cache."""

import json

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402

from perfmodel.sim import simulate  # noqa: E402
from perfmodel.specs import load_scenario  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402
from perfmodel_executors.tokens import TokenStore  # noqa: E402


def conversations():
    scenario = load_scenario("tiny-llama-cpu")
    traffic = type(scenario.traffic).model_validate(
        {
            "arrivals": {"process": "closed_loop", "concurrency": 3},
            "num_requests": 16,
            "input_tokens": {"distribution": "uniform", "low": 4, "high": 20},
            "output_tokens": {"distribution": "uniform", "low": 2, "high": 20},
            "conversations": {"turns": {"distribution": "uniform", "low": 2, "high": 4}, "system_tokens": 20},
        }
    )
    engine = scenario.engine.model_copy(
        update={"max_model_len": 128, "dtype": "float32", "num_gpu_blocks_override": 64}
    )
    return scenario.model_copy(update={"model": MODELS["gqa"], "engine": engine, "traffic": traffic})


@pytest.fixture
def texts(monkeypatch):
    """What each request of a run came to: (id, all tokens)."""
    found = {}
    release = TokenStore.release

    def kept(self, request):
        found[request.request_id] = list(self.of(request)), request.session, request.turn
        release(self, request)

    monkeypatch.setattr(TokenStore, "release", kept)
    return found


def test_a_turn_begins_with_the_answers_before_it_and_caching_changes_no_text(texts):
    cached = execute_scenario(conversations())
    with_cache = dict(texts)
    texts.clear()
    plain = conversations()
    engine = plain.engine.model_copy(update={"enable_prefix_caching": False})
    execute_scenario(plain.model_copy(update={"engine": engine}))
    assert with_cache == texts
    assert cached.summary["prefix_cache_hit_rate"] > 0.4
    for tokens, session, turn in texts.values():
        before = [said for said, other, number in texts.values() if (other, number) == (session, turn - 1)]
        assert all(tokens[: len(said)] == said for said in before)
        assert len(before) == (turn > 0)


def test_both_clocks_serve_the_same_turns():
    executed, simulated = (run(conversations()).requests for run in (execute_scenario, simulate))
    for name in ("request_id", "session", "turn", "num_prompt_tokens", "num_output_tokens"):
        columns = [
            dict(zip(each.request_id.tolist(), getattr(each, name).tolist(), strict=True))
            for each in (executed, simulated)
        ]
        assert columns[0] == columns[1]


def with_traffic(traffic):
    scenario = conversations()
    return scenario.model_copy(update={"traffic": type(scenario.traffic).model_validate(traffic)})


def shares_of(result):
    """(prompt, answer, cached tokens) of each request."""
    rows = result.requests
    counts = (rows.num_prompt_tokens, rows.num_output_tokens, rows.num_cached_tokens)
    return dict(zip(rows.request_id.tolist(), zip(*(each.tolist() for each in counts), strict=True), strict=True))


def test_a_session_that_forks_has_the_texts_of_its_hashes_on_both_clocks(texts, tmp_path):
    """Prompts that share hashes begin alike, a changed one does not, and caching changes no text."""
    blocks = [[1, 2], [1, 2, 3], [1, 2, 4], [1, 5]]
    requests = [
        {"t": 9.0 * number, "in": 16 * len(ids) + 3, "out": 4, "hash_ids": ids, "think_time": 1.0, "api_time": 8.0}
        for number, ids in enumerate(blocks)
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps({"block_size": 16, "requests": requests}), encoding="utf-8")
    scenario = with_traffic(
        {
            "arrivals": {"process": "closed_loop", "concurrency": 1},
            "trace": {"path": str(path), "format": "agents", "repeat": 1},
        }
    )
    executed = execute_scenario(scenario)
    with_cache = dict(texts)
    assert shares_of(executed) == shares_of(simulate(scenario))
    assert [cached for _, _, cached in shares_of(executed).values()] == [0, 32, 32, 16]
    texts.clear()
    execute_scenario(
        scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"enable_prefix_caching": False})})
    )
    assert with_cache == texts
    prompts = [texts[number][0] for number in range(4)]
    assert prompts[1][:32] == prompts[2][:32] == prompts[0][:32]
    assert prompts[3][:16] == prompts[0][:16]
    assert prompts[3][16:32] != prompts[0][16:32]


def test_answers_of_a_prompt_and_their_iterations_run_on_both_clocks():
    scenario = with_traffic(
        {
            "arrivals": {"process": "burst"},
            "num_requests": 8,
            "samples_per_prompt": 4,
            "input_tokens": {"distribution": "fixed", "value": 40},
            "output_tokens": {"distribution": "uniform", "low": 2, "high": 20},
            "rollouts": {"iterations": 2, "weight_update_s": 3, "max_answer_tokens": 12},
        }
    )
    executed, simulated = execute_scenario(scenario), simulate(scenario)
    assert shares_of(executed) == shares_of(simulated)
    for result in (executed, simulated):
        first, second = sorted(set(result.requests.arrival_s.tolist()))
        ends = result.requests.finished_s[result.requests.arrival_s == first]
        assert second == pytest.approx(ends.max() + 3, abs=0.05)
