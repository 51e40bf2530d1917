"""Prices by their age on a given day."""

import json
from datetime import date

import pytest

from perfmodel.specs.hardware import listed_prices


def seconds_at(day):
    return str((day - date(1970, 1, 1)).days * 86400)


@pytest.mark.parametrize(("days", "num_stale"), [(0, 0), (183, 0), (185, 1)])
def test_half_a_year_after_its_date_a_price_is_stale(run, monkeypatch, days, num_stale):
    """The newest one of the list; all others are older."""
    newest = max(price.date for price in listed_prices().values())
    monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds_at(newest.fromordinal(newest.toordinal() + days)))
    facts = json.loads(run("prices", "--json").output)
    of_newest = [fact for fact in facts if fact["date"] == newest.isoformat()]
    assert {fact["age_days"] for fact in of_newest} == {days}
    assert {fact["is_stale"] for fact in of_newest} == {bool(num_stale)}


def test_what_should_be_asked_again_is_listed_alone(run, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds_at(date(2026, 3, 10)))
    every, stale = (json.loads(run("prices", *flags, "--json").output) for flags in ([], ["--stale"]))
    assert [fact for fact in every if fact["is_stale"] or fact["is_unconfirmed"]] == stale
    assert 0 < len(stale) < len(every) == len(listed_prices())
    text = run("prices", "--stale").output
    assert all(fact["device"] in text for fact in stale)
    assert f"of {len(stale)} are more than half a year old" in text
