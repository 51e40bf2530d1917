"""Runs of requests that end with their prompts: what they count, how they are planned, and the front end's queue."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.calibrations.engine_profile import ServerFit
from perfmodel.engine import Request
from perfmodel.errors import PerfmodelError, WorkloadError
from perfmodel.sim import simulate
from perfmodel.sim.replica.replica import FrontEnd
from perfmodel.specs import load_scenario

TOKENS = 60
CLOSED = {"arrivals": {"process": "closed_loop", "concurrency": 400}, "num_requests": 2000}
BASE = {"name": "x", "model": "arctic-embed-m", "hardware": "h100-sxm-80gb", "seed": 3}


def scenario(tmp_path, engine=None, traffic=None, **more):
    import json

    lengths = {"input_tokens": {"distribution": "fixed", "value": TOKENS}}
    data = {**BASE, "engine": engine or {}, "traffic": {**CLOSED, **lengths, **(traffic or {})}, **more}
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps(data))
    return load_scenario(file)


def test_a_run_has_prompts_alone(tmp_path):
    """No output tokens, nothing between tokens; the vector is there when the prompt is."""
    summary = simulate(scenario(tmp_path)).summary
    assert (summary["completed"], summary["total_input_tokens"], summary["total_output_tokens"]) == (2000, 120_000, 0)
    for statistic in ("mean", "p99"):
        assert summary[f"{statistic}_ttft_ms"] == summary[f"{statistic}_e2el_ms"] > 0
        assert summary[f"{statistic}_tpot_ms"] is summary[f"{statistic}_itl_ms"] is None
    assert summary["output_throughput"] is summary["usd_per_million_output_tokens"] is None
    assert summary["total_token_throughput"] == pytest.approx(120_000 / summary["duration"])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_so_many_api_servers_take_so_many_times_the_requests(tmp_path, count):
    """Each has 0.8 ms of work for a request and 4.24 us for each of its 60 tokens, whatever the device can: at most
    count / 1.054 ms a second. The first requests fill the queues, and the last answers come some steps after."""
    result = simulate(scenario(tmp_path, {"api_server_count": count}))
    work_s = 0.0008 + TOKENS * 4.2398051183112395e-06
    assert result.summary["request_throughput"] == pytest.approx(count / work_s, rel=0.05)
    assert result.summary["request_throughput"] < count / work_s


def test_one_api_server_is_what_there_was_without_the_field():
    """Of text, bit by bit; and a data-parallel rank has its own unless their number is given."""
    few = ["traffic.num_requests=40"]
    plain, one = (
        simulate(load_scenario("llama-3.1-8b-a100", [*few, *more])).summary
        for more in ([], ["engine.api_server_count=1"])
    )
    assert plain == one
    ranks = ["engine.data_parallel_size=2", "cluster.replicas=1", "traffic.arrivals.rate=200", *few]
    own, shared = (
        simulate(load_scenario("llama-3.1-8b-a100", [*ranks, *more])).summary["mean_ttft_ms"]
        for more in ([], ["engine.api_server_count=1"])
    )
    assert shared > own


def test_a_request_waits_for_the_first_api_server_that_is_free():
    """Two processes, 3 ms for each of four requests that come at once, then 1 ms in parallel: 4, 4, 7 and 7 ms."""
    front = FrontEnd(ServerFit(in_s=1e-3, in_serial_s=3e-3), num_processes=2)
    delays = [front.delay(Request(i, 0, 10, 1), 0) / 1e9 for i in range(4)]
    assert delays == [4, 4, 7, 7]


def test_what_is_serial_is_a_part_of_what_was_fitted_whole():
    """An idle server is as quick as before, if it was not quicker than the work alone."""
    server = ServerFit(in_s=2e-3)
    whole = server.answering_whole(8e-4)
    assert whole.in_s + whole.in_serial_s == pytest.approx(server.in_s)
    assert ServerFit(in_s=1e-4).answering_whole(8e-4).in_serial_s == 8e-4


@settings(max_examples=20)
@given(st.lists(st.integers(1, 512), min_size=1, max_size=40), st.integers(512, 3000), st.integers(1, 9))
def test_each_prompt_of_an_encoder_is_in_one_step(lengths, budget, num_seqs):
    """Whole, once, within the budget and the sequences; all are computed."""
    from perfmodel.engine import scheduler_for
    from perfmodel.sim.replica.serving import engine_scheduler_config, kv_block_manager
    from perfmodel.specs.engine.spec import EngineSpec

    engine = EngineSpec(
        kv_cache="off", enable_chunked_prefill=False, max_num_batched_tokens=budget, max_num_seqs=num_seqs
    )
    config = replace(engine_scheduler_config(engine, 512), max_num_batched_tokens=budget)
    scheduler = scheduler_for(config, kv_block_manager(engine, 10**6))
    for number, length in enumerate(lengths):
        scheduler.add(Request(number, number, length, 1))
    granted: list[tuple[int, int]] = []
    while scheduler.has_requests:
        plan = scheduler.plan(0)
        assert 0 < plan.num_tokens <= budget
        assert len(plan.chunks) <= num_seqs
        assert not plan.decodes
        granted += [(grant.request.request_id, grant.num_new_tokens) for grant in plan.chunks]
        scheduler.apply(plan, 1)
    assert sorted(granted) == list(enumerate(lengths))


def test_defaults_are_those_of_vllm_for_each_kind_of_pooling(tmp_path):
    """Chunks and the prefix cache for the last token's state of a decoder alone; no plan ahead for any."""

    def defaults(model, **engine):
        made = scenario(tmp_path, {"max_model_len": 512, **engine}, model=model).engine
        return made.enable_chunked_prefill, made.enable_prefix_caching, made.kv_cache, made.async_scheduling

    assert defaults("qwen3-embedding-0.6b") == (True, True, "paged", False)
    assert defaults("qwen3-embedding-0.6b", pooler_config={"pooling_type": "MEAN"}) == (False, False, "paged", False)
    assert defaults("bge-m3") == (False, False, "off", False)
    assert defaults("qwen3-embedding-0.6b", async_scheduling=True)[3]
    assert defaults("qwen3-embedding-0.6b", profile="sglang")[3]


def test_a_model_of_text_gives_vectors_where_it_is_told_to(tmp_path):
    made = scenario(tmp_path, {"runner": "pooling", "max_model_len": 512}, model="llama-3.1-8b").model
    assert (made.pooling, made.num_labels) == ("last", 0)
    engine = {"runner": "pooling", "convert": "classify", "max_model_len": 512}
    assert scenario(tmp_path, engine, model="llama-3.1-8b").model.num_labels == 2


@pytest.mark.parametrize(
    ("engine", "traffic", "more", "sentence"),
    [
        ({"runner": "generate"}, {}, {}, "engine.runner: got generate, and .* returns a vector or scores"),
        ({"kv_cache": "paged"}, {}, {}, "engine.kv_cache: got paged for .*, whose tokens see both ways"),
        ({"convert": "embed", "max_model_len": 512}, {}, {"model": "llama-3.1-8b"}, "traffic: needs output_tokens"),
        (
            {"pooler_config": {"pooling_type": "CLS"}, "max_model_len": 512},
            {"output_tokens": {"distribution": "fixed", "value": 9}},
            {"model": "llama-3.1-8b"},
            "got pooler_config for llama-3.1-8b, which generates text; set engine.runner to pooling",
        ),
        (
            {"pooler_config": {"pooling_type": "MEAN"}, "enable_chunked_prefill": True, "max_model_len": 512},
            {},
            {"model": "qwen3-embedding-0.6b"},
            "enable_chunked_prefill: got true for .*, and mean pooling needs all states",
        ),
        ({"kv_offload": {"capacity_bytes": 1e9}}, {}, {}, "kv_offload: got kv_offload for .*, which keeps no keys"),
        ({}, {}, {"cluster": {"pools": [{"role": "prefill"}, {"role": "decode"}]}}, "prefill and decode pools"),
        (
            {},
            {"conversations": {"turns": {"distribution": "fixed", "value": 2}}, **CLOSED},
            {},
            "got conversations with",
        ),
    ],
)
def test_what_does_not_go_with_vectors_is_refused_by_name(tmp_path, engine, traffic, more, sentence):
    with pytest.raises(PerfmodelError, match=sentence) as caught:
        scenario(tmp_path, engine, traffic, **more)
    assert "\n" not in str(caught.value)


def test_lengths_of_answers_count_for_nothing_and_every_answer_says_so(tmp_path):
    plain = simulate(scenario(tmp_path))
    long = simulate(scenario(tmp_path, traffic={"output_tokens": {"distribution": "fixed", "value": 500}}))
    assert long.summary == plain.summary
    assert any("returns a vector of each prompt, which counts as one token" in note for note in plain.notes)


def test_a_prompt_may_fill_the_context(tmp_path):
    """512 tokens of 512, where text would need room for an answer; 513 are too many."""
    fits = scenario(tmp_path, traffic={"input_tokens": {"distribution": "fixed", "value": 512}, "num_requests": 400})
    assert simulate(fits).summary["completed"] == 400
    with pytest.raises(WorkloadError, match="leaves room for at most 512; raise"):
        simulate(scenario(tmp_path, traffic={"input_tokens": {"distribution": "fixed", "value": 513}}))
