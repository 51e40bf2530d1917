"""The price list: kind, source and date of every price; outdated, unconfirmed and missing prices are reported."""

import datetime

import pytest

from perfmodel.cost import usd_per_hour
from perfmodel.dates import today
from perfmodel.errors import SpecError
from perfmodel.files.catalog import data_dir
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import is_stale, price_lines, price_notes
from perfmodel.specs.scenario_file import load_hardware

SCENARIO = "llama-3.1-8b-a100"
LISTED = load_yaml(data_dir("prices") / "prices.yaml").data["prices"]
PRICED = [load_hardware(name) for name in LISTED]


@pytest.mark.parametrize("device", PRICED, ids=lambda device: device.name)
def test_a_price_has_a_kind_a_source_and_a_date(device):
    assert LISTED[device.name]["usd_per_hour"] == device.price.usd_per_hour
    assert LISTED[device.name]["kind"] in ("on_demand", "reserved", "spot", "owned")
    assert len(device.price.source.split()) >= 2
    assert datetime.date(2020, 1, 1) <= device.price.date <= datetime.datetime.now(datetime.UTC).date()


def test_a_price_is_old_after_half_a_year():
    price = PRICED[0].price
    for days, expected in ((0, False), (180, False), (190, True)):
        dated = price.model_copy(update={"date": today() - datetime.timedelta(days=days)})
        assert is_stale(dated) == expected


def test_what_day_it_is_can_be_said(monkeypatch):
    """So that equal inputs give equal bytes on any day; 2021-01-01T00:00:00Z is 1,609,459,200 s after 1970."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1609459200")
    assert today() == datetime.date(2021, 1, 1)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    with pytest.raises(SpecError, match="SOURCE_DATE_EPOCH=soon: expected a number of seconds"):
        today()
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert abs((today() - datetime.datetime.now(datetime.UTC).date()).days) <= 1


def test_an_old_price_gets_a_note_and_a_new_one_none():
    scenario = load_scenario(SCENARIO, ["traffic.num_requests=3"])

    def notes(days):
        price = scenario.hardware.price.model_copy(update={"date": today() - datetime.timedelta(days=days)})
        aged = scenario.model_copy(update={"hardware": scenario.hardware.model_copy(update={"price": price})})
        return [note for note in simulate(aged).notes if "price" in note], price.date.isoformat()

    assert notes(10)[0] == []
    (note,), date = notes(200)
    assert date in note


def test_the_price_in_use_is_told_with_its_source():
    scenario = load_scenario(SCENARIO)
    (line,) = price_lines(scenario)
    price = scenario.hardware.price
    assert f"{price.usd_per_hour:g} USD" in line
    assert price.source in line
    assert price.date.isoformat() in line
    assert "on demand" in line
    own = load_scenario(SCENARIO, ["price.usd_per_gpu_hour=9", "price.kind=reserved"])
    assert price_lines(own) == ["Price: 9 USD per device hour of a100-sxm-80gb (reserved, given in the scenario)."]
    assert price_notes(own) == []


def test_all_prices_are_in_one_file():
    for folder in ("hardware", "families"):
        for path in data_dir(folder).glob("*.yaml"):
            assert "\nprice" not in path.read_text(encoding="utf-8"), path


def test_an_unconfirmed_price_is_marked():
    """The entry of the MI300X has no list or quote as its source."""
    scenario = load_scenario(SCENARIO, ["hardware=mi300x"])
    assert "unconfirmed" in price_lines(scenario)[0]
    assert "is unconfirmed: no list or quote" in price_notes(scenario)[0]
    assert price_notes(load_scenario(SCENARIO, ["hardware=mi300x", "hardware.price=3"])) == []


def test_a_missing_price_is_noted():
    scenario = load_scenario(SCENARIO, ["hardware=gb200", "traffic.num_requests=3"])
    assert price_lines(scenario) == []
    assert [note for note in simulate(scenario).notes if note.startswith("No price of gb200 is known")]


def test_a_price_of_the_user_overrides_a_missing_or_listed_one():
    for name in ("gb200", "h100"):
        price = load_hardware(name, ["hardware.price=3"]).price
        assert (price.usd_per_hour, price.source) == (3, "given in the scenario")
    assert (
        load_hardware("h100", ["hardware.price=0.5x"]).price.usd_per_hour == LISTED["h100-sxm-80gb"]["usd_per_hour"] / 2
    )


def test_several_prices_apply_to_their_devices():
    changes = ["price.usd_per_gpu_hour={h100: 2, gb200: 5}"]
    for device, usd in (("h100", 2), ("gb200", 5), ("h200", LISTED["h200-sxm"]["usd_per_hour"])):
        scenario = load_scenario(SCENARIO, [*changes, f"hardware={device}"])
        assert usd_per_hour(scenario.hardware, scenario.price) == usd
