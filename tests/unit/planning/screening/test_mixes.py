"""What a split serves when lengths change: laws of the answers, and the means of mixes by hand."""

import json

import numpy as np
import pytest

from perfmodel.planning.finalist import Deployment
from perfmodel.planning.mixes import MixAnswer, mix_answers, scaled
from perfmodel.planning.screen import Screen
from perfmodel.planning.service import demand_of
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec

CHAT = Base("llama-3.1-8b-a100")
SPACE = {"tensor_parallel_size": (1,), "max_num_seqs": (128,), "max_num_batched_tokens": (2048,)}


def answers(base: Base, disaggregation: str, replicas: int) -> list[MixAnswer]:
    spec = PlanSpec.model_validate({"space": {**SPACE, "disaggregation": (disaggregation,)}})
    scenario = base.load()
    (screened,) = Screen(enumerate_space(base, spec).candidates, scenario, 0.9).all()
    return mix_answers(scenario, Deployment(screened, replicas), 0.9)


def test_longer_prompts_and_answers_cost_rate_and_shift_the_best_split_their_way() -> None:
    """Of eight devices: prefill replicas for prompts, decode replicas for answers."""
    planned, short, long, brief, wordy = answers(CHAT, "1:1", 4)
    assert planned.name == "as planned"
    assert short.max_rate >= planned.max_rate >= long.max_rate
    assert brief.max_rate >= planned.max_rate >= wordy.max_rate
    assert short.best[0] <= planned.best[0] <= long.best[0]
    assert short.best[0] < long.best[0]
    assert brief.best[1] <= planned.best[1] <= wordy.best[1]
    assert brief.best[1] < wordy.best[1]
    for mix in (planned, short, long, brief, wordy):
        assert mix.best_rate >= mix.max_rate > 0
        assert sum(mix.best) == 8
        if mix.best == (4, 4):
            assert mix.best_rate == mix.max_rate


def test_replicas_that_do_both_have_no_split() -> None:
    assert answers(CHAT, "none", 2) == []


def test_a_mix_scales_prompts_and_answers_and_the_context_with_them() -> None:
    """Of the mean context, what is generated is half of the answers' second moment over their first."""
    demand = demand_of(CHAT.load())
    generated = (demand.outputs**2).mean() / demand.outputs.mean() / 2
    twice = scaled(demand, 2.0, 0.5)
    assert twice.mean_prompt == pytest.approx(2 * demand.mean_prompt)
    assert twice.mean_outputs == pytest.approx(np.maximum(demand.outputs / 2, 1).mean())
    assert twice.context == pytest.approx(2 * (demand.context - generated) + generated / 2)
    same = scaled(demand, 1.0, 1.0)
    assert (same.context, same.mean_prompt) == (pytest.approx(demand.context), demand.mean_prompt)


def test_turns_of_recorded_conversations_are_scaled_as_drawn_ones_are(tmp_path) -> None:
    talk = {
        "arrival_s": 0,
        "turns": [{"input_tokens": 300, "output_tokens": 60}, {"input_tokens": 90, "output_tokens": 60}],
    }
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({**talk, "arrival_s": at}) + "\n" for at in range(4)), encoding="utf-8")
    trace = json.dumps({"trace": {"path": str(file), "format": "conversations"}})
    assert len(answers(Base(CHAT.path, (f"traffic={trace}",)), "1:1", 1)) == 5


def test_of_a_trace_mixes_are_the_means_of_its_quarters(tmp_path) -> None:
    """Two requests in the first quarter of 40 s, one in the last: 100 and 300 tokens of prompt, then 800."""
    rows = [(0, 100, 50), (5, 300, 150), (40, 800, 40)]
    file = tmp_path / "day.jsonl"
    names = ("arrival_s", "input_tokens", "output_tokens")
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows), encoding="utf-8")
    trace = json.dumps({"trace": {"path": str(file), "format": "jsonl"}})
    planned, first, last = answers(Base(CHAT.path, (f"traffic={trace}",)), "1:1", 1)
    assert (planned.prompt_tokens, planned.output_tokens) == (400, 80)
    assert (first.name, first.prompt_tokens, first.output_tokens) == (
        "quarter 1 of the trace",
        pytest.approx(200),
        pytest.approx(100),
    )
    assert (last.name, last.prompt_tokens, last.output_tokens) == (
        "quarter 4 of the trace",
        pytest.approx(800),
        pytest.approx(40),
    )
