"""Renting, owning and an API by hand; mixes of prices; grids; plans by energy and by CO2."""

from types import SimpleNamespace
from typing import Any

import pytest

from perfmodel.errors import SpecError
from perfmodel.ops import BatchShape
from perfmodel.planning.choice import objective_key
from perfmodel.planning.finalist import Finalist, Screened
from perfmodel.planning.points import Record
from perfmodel.planning.spec import PlanSpec
from perfmodel.report.views.run import alternatives_sentences
from perfmodel.sim import simulate
from perfmodel.sim.records.summary import DeviceTotals, alternatives
from perfmodel.sim.replica.backend import PromptTime
from perfmodel.specs import load_hardware, load_scenario
from perfmodel.specs.hardware import HOURS_PER_YEAR, Owned, Price, PriceOverride, listed_grids

API = (
    "api: {usd_per_million_input_tokens: 2, usd_per_million_cached_input_tokens: 0.5, usd_per_million_output_tokens: 8}"
)
PRICE = f"price={{owned: {{purchase_usd: 1000, years: 1}}, {API}}}"
SITE = "site={usd_per_kwh: 0.5, pue: 1.25, server_factor: 1.6}"


def by_hand(rent: float = 6.0) -> dict[str, float | None]:
    """Half an hour; a million input tokens, 400,000 of them cached, half a million output tokens; owned devices for 1
    USD per hour that draw 400 W idle and 1,000 W in the run, for 0.5 x 1.25 x 1.6 = 1 USD per kWh."""
    totals = DeviceTotals(2, usd_per_hour=rent, energy_j=1000 * 1800.0, owned=(1.0, 400.0))
    run = {"duration": 1800.0, "total_input_tokens": 1_000_000, "total_output_tokens": 500_000}
    scenario = load_scenario("llama-3.1-8b-a100", [PRICE, SITE])
    return alternatives(totals, scenario, run | {"request_throughput": 3.0}, 400_000)


def test_costs_of_an_hour_and_break_even_points_by_hand() -> None:
    """API: (0.6 x 2 + 0.4 x 0.5 + 0.5 x 8) / 0.5 h = 10.8 USD per hour. Owned: 1 + 0.4 idle, 1 + 1.0 in use."""
    costs = by_hand()
    assert costs["api_usd_per_hour"] == pytest.approx(10.8)
    assert costs["own_idle_usd_per_hour"] == pytest.approx(1.4)
    assert costs["own_usd_per_hour"] == pytest.approx(2.0)
    assert costs["own_usd_per_million_tokens"] == pytest.approx(2.0 / 3)
    assert costs["api_usd_per_million_tokens"] == pytest.approx(10.8 / 3)
    assert costs["rent_api_break_even_share"] == pytest.approx(6 / 10.8)
    assert costs["rent_api_break_even_req_s"] == pytest.approx(3 * 6 / 10.8)
    for name, hourly in (("own_rent_break_even_share", 6.0), ("own_api_break_even_share", 10.8)):
        share = costs[name]
        assert share is not None
        assert 1.4 + (2.0 - 1.4) * share == pytest.approx(hourly * share)  # the lines cross there


def test_owning_never_pays_against_a_rent_below_its_electricity() -> None:
    assert by_hand(rent=0.6)["own_rent_break_even_share"] is None
    assert any("not cheaper than renting" in sentence for sentence in alternatives_sentences(by_hand(rent=0.6)))
    assert any("more than 26% of all" in sentence for sentence in alternatives_sentences(by_hand()))


def test_an_owned_hour_is_lost_value_and_upkeep() -> None:
    owned = Owned(purchase_usd={"h100": 40_000.0}, years=4, residual_share=0.2, upkeep_share_per_year=0.1)
    assert owned.usd_per_hour(load_hardware("h100")) == pytest.approx(40_000 * (0.8 / 4 + 0.1) / HOURS_PER_YEAR)
    assert owned.usd_per_hour(load_hardware("h200")) is None


def test_owned_devices_need_a_price_of_electricity() -> None:
    with pytest.raises(SpecError, match="usd_per_kwh"):
        load_scenario("llama-3.1-8b-a100", [PRICE])


@pytest.mark.parametrize(("interruptions", "spot_usd"), [(0.0, 0.8), (6.0, 0.8 * 1.5)])
def test_a_mix_costs_its_mean(interruptions: float, spot_usd: float) -> None:
    """Half reserved at 1.5, a quarter on demand at 2, a quarter spot at 0.8 USD; six interruptions an hour that take
    five minutes make an hour's work cost that of one and a half."""
    spot = {"share": 0.25, "discount": 0.6, "interruptions_per_hour": interruptions}
    spot |= {"restart_s": 240, "lost_work_s": 60}
    mix = PriceOverride.model_validate({"reserved": {"share": 0.5, "discount": 0.25}, "spot": spot})
    price = mix.mixed(Price(source="a list", usd_per_hour=2.0))
    assert price.usd_per_hour == pytest.approx(0.5 * 1.5 + 0.25 * 2 + 0.25 * spot_usd)
    assert "25% spot" in price.origin


def test_shares_beyond_all_devices_are_refused() -> None:
    with pytest.raises(SpecError, match="at most 1"):
        load_scenario(
            "llama-3.1-8b-a100", ["price.reserved={share: 0.7, discount: 0.2}", f"price.spot={{share: 0.5, {LATE}}}"]
        )


LATE = "discount: 0.5, interruptions_per_hour: 0, restart_s: 0"


def test_a_region_has_its_grid_and_others_are_refused() -> None:
    site = load_scenario("llama-3.1-8b-a100", ["site.region=DE"]).site
    assert site is not None
    assert site.grid_gco2_per_kwh == listed_grids().gco2_per_kwh["DE"] == 381
    for wrong in (["site.region=Atlantis"], ["site.region=DE", "site.gco2_per_kwh=3"]):
        with pytest.raises(SpecError, match="gco2_per_kwh"):
            load_scenario("llama-3.1-8b-a100", wrong)


def test_cached_tokens_pay_for_what_reading_them_takes() -> None:
    """Prompts alone take 40 ticks, 30 if no cached token were read: a quarter of their half of a step of 80 is the
    cached tokens'; a copy from the second tier is theirs entirely."""
    time = PromptTime(lambda shape: (40 if sum(seen for _, seen in shape.prefills) else 30, 40))
    time.add(BatchShape(101, 1, ((100, 512),), 1, 50), 80, [512])
    assert time.share == pytest.approx(1 / 2)
    assert time.cached_share == pytest.approx(10 / 80)
    time.add(BatchShape(100, 0, ((100, 512),)), 20, [0], restoring=20)
    assert time.cached_share == pytest.approx(30 / 100)


def test_a_plan_by_carbon_takes_the_lower_one_and_not_the_cheaper_one() -> None:
    """At 1,000 tokens/s, 0.9 J per token for 2 USD or 0.5 J for 5 USD; 1.2 x 100 g per kWh."""
    site = load_scenario("llama-3.1-8b-a100", ["site={gco2_per_kwh: 100, pue: 1.2}"]).site

    def option(usd: float, joules: float) -> Finalist:
        layout = SimpleNamespace(scenario=SimpleNamespace(site=site))
        candidate: Any = SimpleNamespace(num_devices=1, usd_per_hour=usd, layout=layout, tdp_w=800.0)
        values: Any = {"joules_per_output_token": joules, "output_throughput": 1000.0}
        record = Record(values)
        return Finalist(Screened(candidate, 10.0, "ttft", 1.0, "calibrated"), 1, records=(record,), rates=(10.0,))

    cheap, clean = option(2.0, 0.9), option(5.0, 0.5)
    assert clean.power_w == pytest.approx(500)
    assert clean.gco2_per_hour == pytest.approx(0.5 * 1.2 * 100)
    best = {}
    for objective in ("cheapest", "joules", "carbon"):
        spec = PlanSpec.model_validate({"objective": objective})
        best[objective] = min((cheap, clean), key=lambda one, spec=spec: objective_key(one, spec))
    assert best == {"cheapest": cheap, "joules": clean, "carbon": clean}


def test_prompts_that_were_not_cached_have_one_price() -> None:
    summary = simulate(load_scenario("llama-3.1-8b-a100", ["traffic.num_requests=3"])).summary
    assert summary["usd_per_million_input_tokens_split"] > 0
    assert summary["usd_per_million_cached_input_tokens_split"] is None
    assert summary["usd_per_million_computed_input_tokens_split"] is None
