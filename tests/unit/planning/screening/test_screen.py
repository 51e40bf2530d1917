"""The screen, against the tables it reads, laws of any such answer, and the simulator."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel import sim
from perfmodel.cost import GraphCostModel
from perfmodel.errors import SpecError
from perfmodel.ops import BatchShape
from perfmodel.planning.finalist import Screened
from perfmodel.planning.points import highest
from perfmodel.planning.screen import Screen
from perfmodel.planning.service import at_rate, demand_of
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import Surfaces, step_surface
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.specs import load_scenario
from perfmodel.specs.overrides import as_overrides

BASE = Base("llama-3.1-8b-a100")
ONE = {"tensor_parallel_size": (1,), "max_num_seqs": (128,), "max_num_batched_tokens": (2048,)}


def screened(base: Base = BASE, attainment: float = 0.9, **space: object) -> list[Screened]:
    spec = PlanSpec.model_validate({"space": {**ONE, **space}})
    screen = Screen(enumerate_space(base, spec).candidates, base.load(), attainment)
    return screen.all()


def test_steps_are_the_simulators_own() -> None:
    """At a knot, to the rounding of a picosecond; between knots within a few per cent."""
    scenario = BASE.load()
    demand = demand_of(scenario)
    surfaces = Surfaces(
        [step_surface(scenario, demand.context, demand.mean_prompt, 512, 8192)], np.array([0], dtype=np.intp)
    )
    cost_model = GraphCostModel(shared_step_costs(scenario).tables)
    knots = ((batch, 1e-9) for batch in (1, 2, 3, 4, 6, 64))
    for batch, within in (*knots, (80, 0.04), (300, 0.07)):
        seconds = cost_model.duration_ps(BatchShape(batch, batch, (), batch, round(batch * demand.context))) / 1e12
        assert surfaces.decode(np.array([[float(batch)]]))[0, 0] == pytest.approx(seconds, rel=within)
    for tokens, within in ((1024, 1e-9), (1500, 0.03), (700, 0.08)):
        shape = BatchShape(64 + tokens, 65, ((tokens, 0),), 64, round(64 * demand.context))
        seconds = cost_model.duration_ps(shape) / 1e12
        read = surfaces.mixed_step_time(np.array([[64.0]]), np.array([[float(tokens)]]))[0, 0]
        assert read == pytest.approx(seconds, rel=within)


def test_harder_limits_are_met_at_lower_rates_only() -> None:
    """More seconds, or fewer requests that have to keep them, never mean a lower rate."""
    (usual,) = screened()
    (loose,) = screened(Base(BASE.path, ("slo={ttft_ms: 2000, tpot_ms: 100}",)))
    (strict,) = screened(attainment=0.99)
    assert strict.rate < usual.rate < loose.rate


def test_what_binds_is_what_was_made_scarce() -> None:
    assert screened(max_num_seqs=(4,))[0].binds == "max_num_seqs"
    assert screened(Base(BASE.path, ("slo={tpot_ms: 15}",)))[0].binds == "tpot"
    assert screened(Base(BASE.path, ("slo={ttft_ms: 150}",)))[0].binds == "ttft"


def test_an_slo_that_no_lone_request_meets_has_no_rate() -> None:
    assert screened(Base(BASE.path, ("slo={tpot_ms: 5}",)))[0].rate == 0.0


def test_a_plan_without_limits_is_refused() -> None:
    with pytest.raises(SpecError, match="slo"):
        screened(Base(BASE.path, ("slo={}",)))


@pytest.mark.release
@pytest.mark.parametrize(
    "space",
    [
        {},
        {"hardware": ("h100-sxm-80gb",), "max_num_seqs": (16,)},
        {"disaggregation": ("1:1",)},
        {
            "disaggregation": ("1:2",),
            "prefill": {
                "hardware": ("h100-sxm-80gb",),
                "tensor_parallel_size": (2,),
                "max_num_batched_tokens": (8192,),
            },
        },
        {"speculation": ({"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"rate": 0.6}},)},
    ],
)
def test_the_simulator_agrees_about_the_highest_rate(space: dict[str, object]) -> None:
    """Within a quarter: queues of a few hundred requests scatter by a tenth themselves."""
    (found,) = screened(**space)
    scenario = found.candidate.layout.scenario

    def is_served(rate: float) -> bool:
        texts = (*found.candidate.overrides(1), *as_overrides(at_rate(scenario, rate, 500)))
        summary = sim.simulate(load_scenario(BASE.path, texts), keep_steps=False).summary
        return float(summary["request_goodput"]) >= 0.9 * float(summary["request_throughput"])

    simulated = highest(is_served, found.rate)
    assert simulated is not None
    assert found.rate == pytest.approx(simulated, rel=0.25)


def test_more_devices_in_a_group_serve_more() -> None:
    one, two = screened(disaggregation=("1:1", "2:2"))
    assert two.rate == pytest.approx(2 * one.rate, rel=0.02)
    assert replace(one, candidate=two.candidate).rate_per_device == pytest.approx(one.rate / 4)


def test_drafts_that_are_accepted_raise_the_rate_and_those_that_are_not_lower_it() -> None:
    def rate(acceptance: float) -> float:
        drafts = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"rate": acceptance}}
        return screened(Base(BASE.path, ("slo={tpot_ms: 25}",)), speculation=(drafts,))[0].rate

    (without,) = screened(Base(BASE.path, ("slo={tpot_ms: 25}",)))
    assert rate(0.0) < without.rate < rate(0.9)


def test_a_faster_prefill_engine_helps_where_prompts_bind() -> None:
    """An H100 before an A100 serves more than two A100s, less or as much as two H100s."""
    base, apart = Base(BASE.path, ("slo={ttft_ms: 150, tpot_ms: 100}",)), {"disaggregation": ("1:1",)}
    (slow,) = screened(base, **apart)
    (mixed,) = screened(base, **apart, prefill={"hardware": ("h100-sxm-80gb",)})
    (fast,) = screened(base, **apart, hardware=("h100-sxm-80gb",))
    assert slow.rate < mixed.rate <= 1.01 * fast.rate
    assert slow.candidate.usd_per_hour is not None
    assert mixed.candidate.usd_per_hour is not None
    assert fast.candidate.usd_per_hour is not None
    assert mixed.candidate.usd_per_hour == pytest.approx(
        (slow.candidate.usd_per_hour + fast.candidate.usd_per_hour) / 2
    )
