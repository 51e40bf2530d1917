"""Prices in hardware_specs: each says where it is from and of when, and old ones are told."""

import datetime

import pytest

from perfmodel.dates import today
from perfmodel.errors import SpecError
from perfmodel.sim import simulate
from perfmodel.specs import list_names, load_scenario
from perfmodel.specs.scenario import is_stale, price_lines, stale_price_notes
from perfmodel.specs.scenario_file import load_hardware

SCENARIO = "llama-3.1-8b-a100"
PRICED = [device for name in list_names("hardware") if (device := load_hardware(name)).price is not None]


@pytest.mark.parametrize("device", PRICED, ids=lambda device: device.name)
def test_a_price_has_a_source_and_a_date(device):
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
    with pytest.raises(SpecError, match="SOURCE_DATE_EPOCH=soon: allowed a number of seconds"):
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
    own = load_scenario(SCENARIO, ["price.usd_per_gpu_hour=9"])
    assert price_lines(own) == ["Price: 9 USD per device hour, given in the scenario."]
    assert stale_price_notes(own) == []
