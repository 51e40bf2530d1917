"""Beam search: what the engine is asked for, what it computes, and what the client gets."""

import json
from math import floor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.engine import Request
from perfmodel.errors import PerfmodelError
from perfmodel.planning.search import make_plan
from perfmodel.serve.emulator import Emulator
from perfmodel.sim import simulate
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.records.collector import Collector
from perfmodel.sim.records.result import RunResult
from perfmodel.sim.replica.beams import BeamSearch
from perfmodel.specs import Scenario, load_scenario

RECORDED = Path(__file__).parents[4] / "measurements" / "front-end" / "vllm_0.30.0_beams.json"


def scenario(width: int, prompt: int = 100, answer: int = 40, *more: str, number: int = 6) -> Scenario:
    fixed = [{"distribution": "fixed", "value": value} for value in (prompt, answer)]
    traffic = {"input_tokens": fixed[0], "output_tokens": fixed[1], "num_requests": number, "beam_width": width}
    changes = (f"traffic={traffic | {'arrivals': {'process': 'burst'}}}", "slo={}", *more)
    return load_scenario("llama-3.1-8b-h100-2048-256", changes)


def computed(run: RunResult) -> int:
    assert run.steps is not None
    return int((run.steps.num_tokens * run.steps.num_steps).sum())


def by_hand(width: int, prompt: int, answer: int, block: int = 16) -> int:
    """The prompt, and W times n - b floor((n - 1) / b) for n = T + 1 ... T + L - 1."""
    later = range(prompt + 1, prompt + answer)
    return prompt + width * sum(n - block * floor((n - 1) / block) for n in later)


@pytest.mark.parametrize(("width", "prompt", "answer"), [(2, 100, 40), (5, 16, 33), (4, 33, 2), (3, 64, 1)])
def test_each_token_of_each_beam_computes_its_last_block(width: int, prompt: int, answer: int) -> None:
    """A beam that did not find the blocks of its parent, or found its last one, would compute more or less."""
    run = simulate(scenario(width, prompt, answer))
    assert computed(run) == 6 * by_hand(width, prompt, answer)
    asked = prompt + width * sum(range(prompt + 1, prompt + answer))
    assert run.summary["prefix_cache_hit_rate"] == pytest.approx(1 - by_hand(width, prompt, answer) / asked)


def test_progress_is_that_of_tokens_since_answers_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 answers as long as each other most is reported before the first is whole, and all at the end."""
    reported: list[int] = []
    at_first: list[int] = []
    add_request = Collector.add_request

    def added(self: Collector, request: Request, engine: int) -> None:
        at_first.append(reported[-1])
        add_request(self, request, engine)

    monkeypatch.setattr(Collector, "add_request", added)
    simulate(scenario(4, number=20), progress=lambda done, total: reported.append(done))
    assert at_first[0] >= 18
    assert reported == list(range(1, 21))


def test_without_a_prefix_cache_every_token_computes_all_before_it() -> None:
    """T + W (T + 1 + ... + T + L - 1)."""
    run = simulate(scenario(4, 100, 20, "engine.enable_prefix_caching=false", number=2))
    assert computed(run) == 2 * (100 + 4 * sum(range(101, 120)))


def test_the_client_gets_all_beams_at_once() -> None:
    """W L tokens that come together: no time between them."""
    summary = simulate(scenario(4, answer=20)).summary
    assert (summary["completed"], summary["total_input_tokens"], summary["total_output_tokens"]) == (6, 600, 6 * 4 * 20)
    assert summary["mean_ttft_ms"] == summary["mean_e2el_ms"]
    assert summary["mean_tpot_ms"] is summary["mean_itl_ms"] is summary["kv_cache_waste"] is None


def _plain(one: Scenario) -> dict[str, Any]:
    return one.traffic.model_dump(
        include={"arrivals", "num_requests", "input_tokens", "output_tokens"}, mode="json", exclude_none=True
    )


def test_one_beam_is_what_there_was_without_the_field() -> None:
    one = scenario(1)
    assert "beam_width" in one.traffic.model_fields_set
    plain = load_scenario("llama-3.1-8b-h100-2048-256", [f"traffic={_plain(one)}", "slo={}"])
    assert simulate(one).summary == simulate(plain).summary


def test_a_token_begins_when_the_last_beam_of_the_one_before_is_there() -> None:
    """One answer of 30 tokens takes 30 steps at least, and as long as 29 times the front end's work for its beams; the
    first of them begins a step of its own, so that twice the work is felt once for each token at least."""
    run = simulate(scenario(8, answer=30, number=1))
    assert run.steps is not None
    assert int(run.steps.num_steps.sum()) >= 30
    work_s = 8 * run.scenario.engine.described.facts.api_server_beam_s
    assert run.summary["mean_e2el_ms"] / 1e3 > 29 * work_s
    slow = simulate(scenario(8, 100, 30, "overheads.host=2", number=1))
    assert slow.summary["mean_e2el_ms"] - run.summary["mean_e2el_ms"] > 29 * work_s / 8 * 1e3


class _Engine:
    """Answers whatever it is asked at once, and keeps it."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def add(self, request: Request) -> None:
        self.asked.append(request)

    def delay_out(self, _: int) -> int:
        return 7


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(1, 70), st.integers(1, 60), st.integers(0, 5))
def test_beams_go_on_from_beams_of_the_token_before(width: int, prompt: int, answer: int, seed: int) -> None:
    """Blocks of a beam are those of one before it and at most a new one; full blocks alone have names, unlike in all
    beams of a token; the answer comes after 1 + W (L - 1) requests."""
    engine: Any = _Engine()
    search = BeamSearch(TickEnvironment(), width, 16, seed, lambda _: engine)
    search.add(Request(3, 0, prompt, answer))
    before: list[tuple[Any, ...]] = []
    for step in range(answer):
        tokens, engine.asked = engine.asked, []
        assert len(tokens) == (width if step else 1)
        for token in tokens:
            assert (token.num_prompt_tokens, token.max_output_tokens) == (prompt + step, 1)
            assert len(token.block_hashes) == (prompt + step) // 16
            assert not step or token.block_hashes[: len(before[0])] in before
            ends = search.on_finished(token)
        before = [token.block_hashes for token in tokens]
        if step and (prompt + step) % 16 == 0:
            assert len({blocks[-1] for blocks in before}) == width
    assert ends is not None
    assert (ends.request_id, ends.num_output_tokens, ends.finished_at) == (3, width * answer, 7)
    assert not engine.asked


@pytest.mark.parametrize(("width", "saved", "error"), [(2, 0.443, 0.04), (6, 0.663, 0.13)])
def test_beams_share_blocks_as_in_the_paper_on_paged_attention(width: int, saved: float, error: float) -> None:
    """ShareGPT with the paper's mean lengths, 161 and 338 (arXiv 2309.06180, section 6.3): of blocks without sharing,
    those saved, at most (W - 1) / W. Parents drawn alike share too much of six beams; beams that never went on from
    each other would save half of the prompt's alone, 0.22 of two beams."""
    engine: Any = _Engine()
    search = BeamSearch(TickEnvironment(), width, 16, 0, lambda _: engine)
    search.add(Request(0, 0, 161, 338))
    held = whole = 0
    for step in range(338):
        tokens, engine.asked = engine.asked, []
        if step:
            names = set().union(*(token.block_hashes for token in tokens))
            held += len(names) + width * ((161 + step) % 16 > 0)
            whole += width * -(-(161 + step) // 16)
        for token in tokens:
            search.on_finished(token)
    assert 1 - held / whole == pytest.approx(saved, abs=error)
    assert saved < 1 - held / whole < 1 - 1 / width


def test_the_real_server_asked_for_and_found_as_much() -> None:
    """vLLM 0.30.0's own counters (benchmarks/witness/beams.py): requests, tokens asked of its prefix cache and found,
    to the token; blocks of 32. Of long prompts the first block was there from the short ones, which begin alike."""
    document = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert len(document["rows"]) >= 6
    for row in document["rows"]:
        width, answer = row["beam_width"], row["completion_tokens"][0] // row["beam_width"]
        assert row["requests"] == len(row["prompt_tokens"]) * (1 + width * (answer - 1))
        lengths = row["prompt_tokens"]
        asked = sum(length + width * sum(range(length + 1, length + answer)) for length in lengths)
        assert row["tokens_asked"] == asked
        known = 32 * len(lengths) * (lengths[0] > 400)
        assert row["tokens_asked"] - row["tokens_hit"] == sum(by_hand(width, n, answer, 32) for n in lengths) - known


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("traffic.samples_per_prompt=2", "beam_width=4 beside samples_per_prompt: not modelled together; leave one"),
        ("traffic.rollouts={iterations: 2}", "beam_width=4 beside rollouts"),
        ("traffic.structured_outputs={count: 2}", "beam_width=4 beside structured_outputs"),
        ("traffic.adapters={count: 2}", "beam_width=4 beside adapters"),
        ("engine.profile=sglang", "beam_width=4 beside engine.profile=sglang, whose beams are not known"),
        ("engine.data_parallel_size=2", "beam_width=4 beside engine.data_parallel_size"),
        (
            "engine.speculative_config={method: ngram, num_speculative_tokens: 2, acceptance: {rate: 0.5}}",
            "beside engine.speculative_config",
        ),
        ("cluster.pools=[{role: prefill}, {role: decode}]", "beam_width=4 beside prefill and decode pools"),
        ("cluster.gateway={max_queue: 5}", "beam_width=4 beside a gateway"),
        ("model=bge-m3", "beam_width=4 beside bge-m3, which generates no text"),
    ],
)
def test_what_beams_do_not_go_with_is_refused_by_name(more: str, sentence: str) -> None:
    with pytest.raises(PerfmodelError, match=sentence) as caught:
        scenario(4, 100, 40, more)
    assert "\n" not in str(caught.value)


def test_a_server_and_a_plan_refuse_beams(tmp_path: Path) -> None:
    with pytest.raises(PerfmodelError, match="a server's clients ask for beams, leave it out"):
        Emulator(scenario(4))
    beams = ("traffic.beam_width=4", "plan={rate: 2}")
    with pytest.raises(PerfmodelError, match="which closed forms do not have; simulate it"):
        make_plan("llama-3.1-8b-h100-2048-256", beams, tmp_path / "points.sqlite")
