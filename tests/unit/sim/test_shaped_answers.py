"""Whole runs with answers of a required shape: what masks cost, who waits for a grammar, and what is refused."""

import pytest

from perfmodel.cost import step_costs
from perfmodel.errors import PerfmodelError
from perfmodel.ops.work import decode_shape
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario

USERS, CONTEXT = 32, 500


def scenario(*overrides: str) -> Scenario:
    """Users of equal requests, all with a shape whose grammar is there at once."""
    lengths = [
        f"traffic.{name}={{distribution: fixed, value: {n}}}"
        for name, n in (("input_tokens", 400), ("output_tokens", 200))
    ]
    loop = [f"traffic.arrivals={{process: closed_loop, concurrency: {USERS}}}", f"traffic.num_requests={USERS}"]
    shape = "traffic.structured_outputs={count: 1, mask_s: 0, compile_s: 0}"
    return load_scenario("llama-3.1-8b-a100", [*loop, *lengths, shape, *overrides])


def masks(seconds: float, *overrides: str) -> Scenario:
    return scenario(f"traffic.structured_outputs.mask_s={seconds!r}", *overrides)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_step_waits_for_what_masks_take_beyond_the_device(is_async: bool, share: float) -> None:
    """t = serial + max(hidden + share n mask, device): nothing up to the device's time, then all of it."""
    own = f"engine.async_scheduling={str(is_async).lower()}", f"traffic.structured_outputs.share={share}"
    shape = decode_shape(USERS, CONTEXT)
    plain = step_costs(scenario(*own)).estimate(shape)
    slack = plain.device_s - plain.hidden_host_s
    assert slack > 1e-3
    for beyond in (-0.5e-3, 0.0, 0.7e-3, 5e-3):
        with_masks = step_costs(masks((slack + beyond) / (share * USERS), *own)).estimate(shape)
        assert with_masks.duration_s - plain.duration_s == pytest.approx(max(beyond, 0.0), abs=1e-9)


def test_runs_are_priced_by_the_masks_of_their_plans() -> None:
    """200 tokens of 32 requests: 199 steps of 32 masks and one that ends the prompts, all far beyond the device."""
    took = [simulate(masks(seconds)).summary["duration"] for seconds in (5e-3, 6e-3)]
    assert took[1] - took[0] == pytest.approx(200 * USERS * 1e-3, rel=0.1)  # prompts come in some steps


def test_a_quarter_of_the_requests_needs_a_quarter_of_the_masks() -> None:
    whole = [simulate(masks(seconds)).summary["duration"] for seconds in (5e-3, 6e-3)]
    part = "traffic.structured_outputs.share=0.25"
    quarter = [simulate(masks(seconds, part, "seed=3")).summary["duration"] for seconds in (5e-3, 6e-3)]
    assert 0.1 < (quarter[1] - quarter[0]) / (whole[1] - whole[0]) < 0.45


def test_each_drafted_token_needs_a_mask() -> None:
    """Of n-grams that are never right each step still makes 1 + 3 masks a request."""
    drafts = "engine.speculative_config={method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.0}}"
    alone = [simulate(masks(seconds)).summary["duration"] for seconds in (5e-3, 6e-3)]
    drafted = [simulate(masks(seconds, drafts)).summary["duration"] for seconds in (5e-3, 6e-3)]
    assert (drafted[1] - drafted[0]) / (alone[1] - alone[0]) == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(
    "drafts", ["null", "{method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.6}}"], ids=["plain", "drafts"]
)
def test_where_by_chance_no_request_has_a_shape_no_mask_is_made(drafts: str) -> None:
    """A mask of a second would be noticed: steps have the masks of their requests, not those of the mean."""
    few = "traffic.structured_outputs.share=0.002", f"engine.speculative_config={drafts}"
    assert simulate(masks(1.0, *few)).summary["duration"] == simulate(masks(0.0, *few)).summary["duration"]


@pytest.mark.parametrize("mask_s", [0.0, 0.2e-3, 3e-3])
def test_leaps_are_as_steps_one_by_one_with_masks(mask_s: float) -> None:
    own = masks(
        mask_s,
        "traffic.arrivals={process: poisson, rate: 3}",
        "traffic.structured_outputs={count: 6, share: 0.5, compile_s: 0.3}",
    )
    leaps, steps = simulate(own).summary, simulate(own, keep_steps=True, can_leap=False).summary
    for name in ("duration", "mean_ttft_ms", "p99_e2el_ms"):
        assert leaps[name] == steps[name]


def one_at_a_time(*overrides: str) -> Scenario:
    return scenario("traffic.arrivals={process: closed_loop, concurrency: 1}", "traffic.num_requests=5", *overrides)


def test_the_first_request_of_a_shape_waits_for_its_grammar() -> None:
    """One user, one shape: 0.8 s for the first request, and nothing that the others would notice."""
    plain = simulate(one_at_a_time()).summary
    own = simulate(one_at_a_time("traffic.structured_outputs.compile_s=0.8"))
    assert own.summary["duration"] - plain["duration"] == pytest.approx(0.8, abs=1e-4)
    assert "1 grammars of answers were compiled, for which 1 requests waited." in own.notes


def test_a_new_shape_each_time_waits_each_time() -> None:
    same = ["traffic.structured_outputs.count=1000000"]
    plain = simulate(one_at_a_time(*same)).summary
    own = simulate(one_at_a_time(*same, "traffic.structured_outputs.compile_s=0.8")).summary
    assert own["duration"] - plain["duration"] == pytest.approx(5 * 0.8, abs=5e-4)


def test_requests_that_name_a_grammar_under_compilation_wait_for_the_same_end() -> None:
    own = simulate(scenario("traffic.structured_outputs.compile_s=2"))
    assert f"1 grammars of answers were compiled, for which {USERS} requests waited." in own.notes
    assert own.summary["mean_ttft_ms"] == pytest.approx(
        simulate(scenario()).summary["mean_ttft_ms"] + 2000, abs=20
    )  # they come within a front end's milliseconds


def test_requests_without_a_shape_go_on_meanwhile() -> None:
    """Half have a shape that takes a minute: the others are done before it is there."""
    own = simulate(scenario("traffic.structured_outputs={count: 1, share: 0.5, compile_s: 60}"))
    seconds = sorted(own.requests.finished_s)
    num_waiting = sum(one > 60 for one in seconds)
    assert 8 <= num_waiting <= 24
    assert f"for which {num_waiting} requests waited" in " ".join(own.notes)
    assert all(one < 20 for one in seconds[: USERS - num_waiting])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine.profile=sglang"], "beside engine.profile=sglang, which is not modelled"),
        (["engine.profile=trtllm"], "leave out or change one"),
        (["engine.pipeline_parallel_size=2"], "engine.pipeline_parallel_size=2"),
        (["engine.batching=static"], "engine.batching=static"),
        (["engine.structured_outputs_config.backend=outlines"], "xgrammar"),
        (["traffic.structured_outputs={count: 3, shares: [1, 2]}"], "expected one for each"),
        (["traffic.structured_outputs={count: 2, shares: [1, 2], zipf: 1}"], "leave one of them out"),
        (
            ["cluster={pools: [{role: prefill, replicas: 1}, {role: decode, replicas: 1}]}"],
            "beside prefill and decode pools",
        ),
    ],
)
def test_what_shapes_do_not_go_with_is_refused_by_name(overrides: list[str], words: str) -> None:
    with pytest.raises(PerfmodelError, match=words):
        scenario(*overrides)


def test_backends_cost_what_was_measured() -> None:
    """llguidance compiles in a hundredth of xgrammar's time, and a mask takes it longer."""
    named = "traffic.structured_outputs={count: 1000000}"
    first = {
        backend: simulate(one_at_a_time(named, f"engine.structured_outputs_config.backend={backend}")).summary
        for backend in ("auto", "xgrammar", "guidance")
    }
    assert first["auto"]["mean_ttft_ms"] == first["xgrammar"]["mean_ttft_ms"]
    assert first["xgrammar"]["mean_ttft_ms"] - first["guidance"]["mean_ttft_ms"] == pytest.approx(50.9 - 0.552, abs=0.5)
