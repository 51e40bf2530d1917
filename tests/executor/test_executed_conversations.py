"""Turns of conversations, executed: a prompt has the model's own answers in it, and finds their KV in the cache."""

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
