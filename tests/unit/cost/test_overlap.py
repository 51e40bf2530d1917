"""Two-batch overlap: the pipeline of two halves against a simulated timeline, its bounds, when steps are split."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.steps.overlap import Half, OverlapCostModel, halves, overlapped
from perfmodel.cost.steps.step_costs import step_costs
from perfmodel.errors import SpecError, UnsupportedError
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs import load_scenario

TIMES = st.floats(0.0, 100.0)
HALVES = st.builds(Half, TIMES, TIMES, TIMES, TIMES, TIMES)
BASE = {
    "name": "wide",
    "model": "deepseek-v3",
    "hardware": "h100-sxm-80gb",
    "traffic": "chat",
    "engine": {
        "data_parallel_size": 32,
        "enable_expert_parallel": True,
        "all2all_backend": "deepep_low_latency",
        "enable_dbo": True,
    },
}


def scenario(*overrides):
    return load_scenario(json.dumps(BASE), list(overrides))


def timeline(first, second, num_layers):
    """When the last message arrives, if each half's phases and each resource's turns follow one another."""
    halves_of = [[getattr(half, name) / num_layers for name in half._fields[:4]] for half in (first, second)]
    free, ready = {"compute": 0.0, "links": 0.0}, [0.0, 0.0]
    order = [(half, phase) for _ in range(num_layers) for phase in (0, 2) for half in (0, 1)]
    # compute a1 a2 e1 e2 ...; links d1 d2 c1 c2 ...: a message starts with the other half's turn on the units
    for half, phase in order:
        attention, experts, dispatch, combine = halves_of[half]
        compute, message = (attention, dispatch) if phase == 0 else (experts, combine)
        start = max(free["compute"], ready[half])
        free["compute"] = start + compute
        begin = max(free["compute"], free["links"])
        free["links"] = ready[half] = begin + message
    return max(ready)


@given(HALVES, HALVES, st.integers(1, 6))
def test_the_closed_form_is_no_shorter_than_the_free_timeline_and_equal_for_equal_halves(first, second, num_layers):
    first, second = first._replace(outside=0.0), second._replace(outside=0.0)
    assert overlapped(first, second, num_layers) >= timeline(first, second, num_layers) * (1 - 1e-9)
    equal = Half(8.0, 4.0, 3.0, 2.0, 0.0)  # each message shorter than each turn: only the first and the last show
    assert overlapped(equal, equal, 4) == pytest.approx(timeline(equal, equal, 4))
    assert overlapped(equal, equal, 4) == pytest.approx(2 * (8 + 4) + 2 / 4)


@given(HALVES, HALVES, st.integers(1, 60), st.floats(0.0, 0.9))
def test_between_the_longer_resource_and_no_overlap(first, second, num_layers, share):
    """Never faster than all compute or all messages, nor slower than one after the other on the units left to each."""
    slowed = (first.attention + first.experts + second.attention + second.experts) / (1 - share)
    compute, messages = slowed + first.outside + second.outside, first.messages + second.messages
    time = overlapped(first, second, num_layers, share)
    assert max(compute, messages) * (1 - 1e-9) <= time <= (compute + messages) * (1 + 1e-9)
    assert time >= overlapped(first, second, num_layers) * (1 - 1e-12)


def test_units_that_are_messages_slow_the_work_even_where_no_message_is_on_its_way():
    """SGLang and vLLM limit the products' units for the whole step; layers without experts keep all units."""
    none = Half(5.0, 3.0, 0.0, 0.0, 1.0)
    assert overlapped(none, none, 7) == pytest.approx(18.0)
    assert overlapped(none, none, 7, 0.5) == pytest.approx(2 * (5 + 3) / 0.5 + 2)
    both = Half(5.0, 3.0, 1.0, 1.0, 1.0)  # under work on the units left, but for the last
    assert overlapped(both, both, 7, 0.5) == pytest.approx(34.0 + 1 / 7)


@given(
    st.lists(st.tuples(st.integers(2, 900), st.integers(0, 500)), max_size=5),
    st.integers(0, 40),
    st.integers(0, 3000),
)
def test_halves_add_up(prefills, num_decodes, context):
    """Tokens, query-key pairs and context of both are the step's; only one computes logits."""
    tokens = sum(new for new, _ in prefills) + num_decodes
    shape = BatchShape(
        tokens, len(prefills) + num_decodes, tuple(prefills), num_decodes, context, (context // 2,), 8 * tokens
    )
    parts = halves(shape)
    for name in ("num_tokens", "num_samples", "num_decodes", "decode_context", "group_tokens"):
        assert sum(getattr(part, name) for part in parts) == getattr(shape, name)
    assert parts[1].num_tokens - parts[0].num_tokens in (0, 1)
    assert parts[1].num_samples == 0
    assert sum(part.decode_windowed[0] for part in parts) == context // 2

    def pairs(part):
        return sum(new * cached + new * (new + 1) // 2 for new, cached in part.prefills)

    assert sum(map(pairs, parts)) == pairs(shape)
    assert all(part.num_tokens == part.num_decodes + sum(new for new, _ in part.prefills) for part in parts)


def test_a_prompt_is_cut_where_vllm_cuts_it():
    """create_ubatch_slices: 3 decodes and prompts of 4 and 6 after 10 cached, 13 tokens, are cut before token 6."""
    first, second = halves(BatchShape(13, 5, ((4, 0), (6, 10)), 3, 30))
    assert (first.num_decodes, first.prefills) == (3, ((3, 0),))
    assert (second.num_decodes, second.prefills) == (0, ((1, 3), (6, 10)))


def test_thresholds_by_kind_of_step_and_the_rank_with_fewest_tokens():
    model = step_costs(scenario("engine.dbo_prefill_token_threshold=100")).cost_model()
    assert isinstance(model, OverlapCostModel)
    assert [model.is_split(decode_shape(count, 500)) for count in (31, 32)] == [False, True]
    assert [model.is_split(BatchShape(count, 1, ((count, 0),))) for count in (99, 100)] == [False, True]
    assert not model.is_split(decode_shape(64, 500)._replace(group_tokens=32 * 31))


def test_below_the_threshold_and_without_it_steps_cost_the_same():
    plain = step_costs(scenario("engine.enable_dbo=false")).cost_model()
    split = step_costs(scenario()).cost_model()
    for shape in (decode_shape(16, 800), BatchShape(200, 1, ((200, 0),))):
        assert split.duration_ps(shape) == plain.duration_ps(shape)
    assert split.usage() == plain.usage()


@pytest.mark.parametrize("backend", ["deepep_low_latency", "deepep_high_throughput", "deepep_auto"])
@pytest.mark.parametrize("shape", [decode_shape(128, 4000), BatchShape(8000, 4, ((2000, 0),) * 4)])
def test_steps_hide_messages_and_what_they_report_adds_up(backend, shape):
    """Explained, priced and summed by bound alike; faster than both halves in a row; weights are read twice."""
    costs = step_costs(scenario(f"engine.all2all_backend={backend}"))
    model = costs.cost_model()
    seconds, estimate = model.duration_ps(shape) / 1e12, costs.estimate(shape)
    assert estimate.duration_s == pytest.approx(seconds, rel=2e-3)
    assert sum(model.usage().bound_s.values()) == pytest.approx(estimate.device_s, rel=2e-3)
    assert sum(estimate.bound_share.values()) == pytest.approx(1.0)
    assert model.usage().flops == pytest.approx(estimate.flops, rel=1e-6)
    plain = step_costs(scenario(f"engine.all2all_backend={backend}", "engine.enable_dbo=false"))
    apart = sum(plain.estimate(part).device_s for part in halves(shape))
    assert seconds < apart
    whole = plain.estimate(shape)
    assert estimate.hbm_bytes > whole.hbm_bytes
    assert estimate.flops == pytest.approx(whole.flops, rel=0.02)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("engine.all2all_backend=allgather_reducescatter", "no DeepEP messages"),
        ("engine.data_parallel_size=1", "no DeepEP messages"),
        ("engine.pipeline_parallel_size=2", "pipeline_parallel_size"),
        (
            "engine.speculative_config={method: ngram, num_speculative_tokens: 2, acceptance: {rate: 0.5}}",
            "speculative_config",
        ),
    ],
)
def test_what_two_halves_do_not_go_with(override, why):
    with pytest.raises(UnsupportedError, match=f"enable_dbo.*{why}"):
        scenario(override)


def test_a_half_has_at_least_a_token():
    with pytest.raises(SpecError, match="dbo_decode_token_threshold"):
        scenario("engine.dbo_decode_token_threshold=1")


def test_kernels_by_kind_of_step():
    """Steps with prompts as in high throughput, others as in low latency."""
    models = {
        name: step_costs(scenario("engine.enable_dbo=false", f"engine.all2all_backend=deepep_{name}")).cost_model()
        for name in ("auto", "high_throughput", "low_latency")
    }
    for shape, alike in (
        (decode_shape(64, 900), "low_latency"),
        (BatchShape(2000, 1, ((2000, 0),)), "high_throughput"),
    ):
        times = {name: model.duration_ps(shape) for name, model in models.items()}
        assert times["auto"] == times[alike] != times["high_throughput" if alike == "low_latency" else "low_latency"]


def test_a_hot_rank_receives_more():
    """Messages of skewed experts take longer, by at most the share that the hottest rank has too much."""

    def exchange(distribution):
        shape, costs = decode_shape(64, 900), step_costs(scenario("engine.enable_dbo=false", f"routing={distribution}"))
        return sum(row.duration_s for row in costs.estimate(shape).rows if row.name.startswith("moe_dispatch"))

    even, skewed = exchange("{distribution: uniform}"), exchange("{distribution: power_law, alpha: 1.2}")
    assert even < skewed < 8 * even
    assert all(a <= b for a, b in pairwise([even, exchange("{distribution: trained, dispersion: 0.3}"), skewed]))
