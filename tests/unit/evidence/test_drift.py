"""A server vs its prediction: counters by hand, and planted drifts that are named."""

from math import nan, sqrt

import pytest

from perfmodel.errors import SpecError
from perfmodel.evidence import drift
from perfmodel.evidence.drift import DriftGuard, Observed, observed_between, read_counts
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

RATE = 5.0
BASE = (
    f"traffic.arrivals.rate={RATE}",
    "traffic.num_requests=400",
    "traffic.input_tokens={distribution: fixed, value: 1200}",
    "traffic.output_tokens={distribution: exponential, mean: 150}",
    "traffic.prefix={num_groups: 4, shared_tokens: 900}",
    "engine.enable_prefix_caching=true",
    "engine.max_num_seqs=64",
    "engine.speculative_config={method: eagle, num_speculative_tokens: 3, acceptance: {rate: 0.8}}",
)


def scenario(*changes):
    return load_scenario("llama-3.1-8b-a100", [*BASE, *changes])


def observed(*changes, slower=1.0, **more):
    """What a server would count that runs `scenario(*changes)`; slower: all its times."""
    run = simulate(scenario(*changes))
    summary = run.summary
    counted = {
        "rate": RATE,
        "requests": 400.0,
        "means": {name: slower * summary[name] for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")},
        "lengths": {
            "output_tokens": float(run.requests.num_output_tokens.mean()),
            "input_tokens": float(run.requests.num_prompt_tokens.mean()),
        },
        "running": summary["mean_batch"],
        "waiting": 0.0,
        "hit_rate": summary["prefix_cache_hit_rate"],
        "from_drafts": drift._drafted(summary),
    }
    return Observed(**{**counted, **more})


@pytest.fixture(scope="module")
def guard():
    return DriftGuard(scenario())


def test_a_server_that_does_as_predicted_has_no_drift(guard):
    judgement = guard.judge(observed())
    assert judgement.drifted == ()
    assert judgement.because == ""
    assert "outside" not in str(judgement)


def test_fewer_requests_say_less(guard):
    """A hundred times as many narrow what comes from chance to a tenth, and leave the model's own interval."""
    few, many, most = (guard.judge(observed(requests=n)).intervals["mean_e2el_ms"] for n in (4.0, 400.0, 1e9))
    mean = guard.judge(observed()).predicted["mean_e2el_ms"]
    assert few[0] < many[0] <= most[0] < mean < most[1] <= many[1] < few[1]
    added = [sqrt((interval[1] - mean) ** 2 - (most[1] - mean) ** 2) for interval in (few, many)]
    assert added[0] == pytest.approx(10 * added[1], rel=1e-3)


@pytest.mark.release
@pytest.mark.parametrize(
    ("changes", "more", "named"),
    [
        ((), {"slower": 2.5}, "steps take 2.50 times as long"),
        (
            ("engine.enable_prefix_caching=false", "traffic.arrivals.rate=9"),
            {"rate": 9.0, "hit_rate": 0.0},
            "prefix cache",
        ),
        (("traffic.output_tokens={distribution: exponential, mean: 450}",), {}, "answers of"),
        (("engine.speculative_config.acceptance={rate: 0.1}",), {}, "drafts that bring"),
        (("engine.speculative_config=null",), {"from_drafts": 0.0}, "drafts that bring 0% of the answers' tokens"),
        (
            ("engine.max_num_seqs=4",),
            {"running": 4.0, "waiting": 9.0},
            "4 requests in a batch while 9 wait, 64 allowed",
        ),
    ],
    ids=["slower steps", "colder cache", "longer answers", "fewer drafts", "no drafts", "smaller batch"],
)
def test_a_planted_drift_is_named(guard, changes, more, named):
    judgement = guard.judge(observed(*changes, **more))
    assert judgement.drifted
    assert named in judgement.because
    assert "outside" in str(judgement)


def test_a_difference_that_the_scenario_cannot_serve_is_said(guard):
    """Prompts of 30,000 tokens where 8,192 are allowed."""
    lengths = {"output_tokens": 150.0, "input_tokens": 30_000.0}
    judgement = guard.judge(observed(slower=2.5, lengths=lengths))
    assert (
        "prompts of 30,000 tokens in the mean, 1,200 expected, which the scenario does not serve" in judgement.because
    )


@pytest.mark.parametrize(("rate", "depth", "share"), [(0.0, 2, 0.0), (1.0, 3, 0.75), (0.5, 3, 0.875 / 1.875)])
def test_of_a_chain_a_draft_counts_where_all_before_it_were_accepted(rate, depth, share):
    """By hand, with one half: 1/2 + 1/4 + 1/8 beside the step's own token."""
    assert drift._from_drafts(rate, depth) == pytest.approx(share)


TEXT = """# HELP vllm:e2e_request_latency_seconds Latency.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="1.0",model_name="m"} 1.0
vllm:e2e_request_latency_seconds_count{model_name="m",engine="0"} 3.0
vllm:e2e_request_latency_seconds_count{model_name="m",engine="1"} 2.0
vllm:e2e_request_latency_seconds_sum{model_name="m"} 1.05e+01
vllm:num_requests_running{model_name="m"} 7.0
vllm:prefix_cache_queries_total{model_name="m"} 1000.0
process_cpu_seconds_total 12.5
"""


def test_counts_are_summed_over_labels_and_lose_what_only_prometheus_needs():
    counts = read_counts(TEXT)
    assert counts["e2e_request_latency_seconds_count"] == 5.0
    assert counts["e2e_request_latency_seconds_sum"] == 10.5
    assert counts["prefix_cache_queries"] == 1000.0
    assert "process_cpu_seconds" not in counts
    with pytest.raises(SpecError, match="none is of vllm"):
        read_counts("process_cpu_seconds_total 12.5")


def test_counts_of_other_servers_have_their_names():
    """Names of sglang 0.5.10's metrics_collector.py and of TensorRT-LLM's collector.py. Two requests of 30 tokens."""
    for prefix, engine in (("sglang:", "sglang"), ("trtllm_", "trtllm")):
        names = ("e2e_request_latency_seconds_count", "e2e_request_latency_seconds_sum", "generation_tokens_total")
        readings = [dict(zip(names, row, strict=True)) for row in ((1, 2.0, 40), (3, 8.0, 100))]
        texts = ("".join(f'{prefix}{name}{{m="m"}} {value}\n' for name, value in row.items()) for row in readings)
        counts = [read_counts(text, engine) for text in texts]
        between = observed_between(*counts, 10.0)
        assert (between.requests, between.means["mean_e2el_ms"], between.lengths["output_tokens"]) == (
            2.0,
            3000.0,
            30.0,
        )
    with pytest.raises(SpecError, match="none is of sglang"):
        read_counts("trtllm_num_requests_running 1", "sglang")


def test_means_are_of_what_came_between_two_readings():
    """Ten requests in 5 s, 3 s each, while six run at both ends; 60 of 80 looked-up tokens found; 5 of 30 tokens from
    drafts."""
    names = ("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds")
    names += ("request_generation_tokens", "request_prompt_tokens")
    before = {f"{name}_{part}": 100.0 for name in names for part in ("sum", "count")} | {"num_requests_running": 6.0}
    after = {f"{name}_sum": 130.0 for name in names} | {f"{name}_count": 110.0 for name in names}
    after |= {"prefix_cache_hits": 60.0, "prefix_cache_queries": 80.0, "num_requests_running": 6.0}
    after |= {"spec_decode_num_accepted_tokens": 5.0, "generation_tokens": 30.0}
    between = observed_between(before, after, 5.0)
    assert (between.rate, between.requests) == (2.0, 10.0)
    assert set(between.means.values()) == {3000.0}
    assert between.lengths == {"output_tokens": 3.0, "input_tokens": 3.0}
    assert (between.hit_rate, between.from_drafts, between.running) == (0.75, 1 / 6, 6.0)
    assert between.in_flight == pytest.approx(6.0)
    assert "mean_tpot_ms" not in observed_between(before, after | {f"{names[1]}_count": 100.0}, 5.0).means
    assert observed_between(before, after | {"prefix_cache_queries": 0.0}, 5.0).hit_rate == 0.0  # caches no prefix
    assert observed_between(before, {k: v for k, v in after.items() if "cache" not in k}, 5.0).hit_rate is None
    for gauge, count in (("num_requests_waiting", 10.0), ("num_requests_running", 16.0)):
        assert observed_between(before, after | {gauge: count}, 5.0).rate == 4.0  # more have come than have gone
    assert observed_between(after, after, 5.0) is None
    assert observed_between(after, before, 5.0) is None  # it has begun anew


def test_a_server_of_vectors_has_no_drafts_to_explain_it():
    """It has no answers, and so no time per token, and no share of them that was drafted."""
    means, lengths = {"mean_ttft_ms": 90.0, "mean_e2el_ms": 90.0}, {"output_tokens": 0.0, "input_tokens": 300.0}
    judgement = DriftGuard(load_scenario("arctic-embed-m-h200")).judge(Observed(30.0, 200.0, means, lengths, 3, 0))
    assert "limit explains it: steps take" in judgement.because


def test_traffic_without_a_load_is_refused():
    batch = load_scenario("summaries-8b-offline")
    with pytest.raises(SpecError, match="neither a rate nor a concurrency"):
        DriftGuard(batch).judge(
            Observed(1.0, 60.0, dict.fromkeys(("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"), nan), {}, 0, 0)
        )
