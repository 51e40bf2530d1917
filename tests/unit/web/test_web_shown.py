"""Figures and fields: the digits that an interval allows; what the form asks is what the engine has."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from web_site import Page

from perfmodel.commands.runs import MemoryRequest
from perfmodel.report.numbers import MISSING
from perfmodel.specs import load_scenario
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.web.figures import GROUPS, NUMBER_FORMS, choices_of, default_of, figure, shown_number, value_at
from perfmodel.web.pictures import memory_bar
from perfmodel.web.state import read_state, request_of

FIELDS = [field for group in GROUPS for field in group.fields]
SIZES = st.floats(1e-6, 1e9)


@given(SIZES, st.floats(1e-6, 2.0), st.integers(0, 6))
def test_the_last_digit_is_at_most_a_tenth_of_the_interval(value, width, most):
    low, high = value * (1 - width / 3), value * (1 + width)
    text = shown_number(value, (low, high), most)
    shown = float(text.replace(",", ""))
    digits = len(text.partition(".")[2])
    assert digits <= most
    room = (high - low) / 10
    if 10**-most <= room:  # else the metric's own digits are the limit
        assert abs(shown - value) <= room / 2 * (1 + 1e-9)
        assert digits == 0 or 10**-digits > room / 10 * (1 - 1e-6)  # and no digit more than that
    else:
        assert abs(shown - value) <= 10**-most / 2 * (1 + 1e-6) + 1e-12 * value


@given(SIZES, st.integers(0, 4))
def test_without_an_interval_a_metric_has_its_own_digits(value, most):
    for interval in (None, (value, value), (None, value), (2.0, 1.0)):
        assert len(shown_number(value, interval, most).partition(".")[2]) == most


def test_no_number_is_a_dash():
    for value in (None, float("nan"), float("inf")):
        assert shown_number(value, (1.0, 2.0), 2) == MISSING
    for name, form in NUMBER_FORMS.items():
        assert form(None) == MISSING, name


@given(st.sampled_from([name for name in NUMBER_FORMS if name != "text"]), SIZES)
def test_each_form_shows_any_size(name, value):
    assert re.search(r"\d", NUMBER_FORMS[name](value))


def test_a_figure_escapes_what_it_shows():
    found = str(figure({"a<b": "<img src=x onerror=alert(1)>"}, "a<b", "text"))
    assert "<img" not in found
    assert found.count("<") == 2
    assert "&lt;img" in found


def test_places_in_data():
    data = {"a": [{"b": 1}, {"b": 2}], "c": None}
    assert value_at(data, "a.1.b") == 2
    for path in ("a.7.b", "a.x", "a.-1", "c.d", "z", "a.1.b.c"):
        assert value_at(data, path) is None


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.key)
def test_a_field_says_what_it_asks(field):
    assert field.help.endswith(".")
    assert "  " not in field.help
    assert field.label
    assert read_state(f"{field.key}=1").get(field.key) == "1"
    if field.key.startswith("engine."):
        name = field.key.removeprefix("engine.")
        assert name in EngineSpec.model_fields
        assert field.label == name
    if field.kind == "slider":
        assert 0 < field.low < field.high
    if field.kind == "names":
        (kind,) = field.choices
        assert len(choices_of(kind)) > 2
        assert len(set(choices_of(kind))) == len(choices_of(kind))


def test_no_field_comes_twice():
    assert len({field.key for field in FIELDS}) == len(FIELDS)
    assert len({group.name for group in GROUPS}) == len(GROUPS)


def test_what_counts_where_a_field_is_empty_is_what_the_scenario_resolved():
    scenario = load_scenario("llama-3.1-8b-a100")
    data = scenario.model_dump(mode="json")
    shown = {field.key: default_of(field, data) for field in FIELDS}
    assert shown["engine.tensor_parallel_size"] == str(scenario.engine.tensor_parallel_size)
    for field in FIELDS:
        if field.key.startswith("engine.") and shown[field.key]:
            value = getattr(scenario.engine, field.key.removeprefix("engine."))
            assert shown[field.key] == str(value).lower() if isinstance(value, bool) else shown[field.key]
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert float(shown[field.key]) == pytest.approx(value, rel=1e-5)


def test_the_bar_of_memory_adds_up_to_what_a_process_sees():
    from perfmodel.web.results import run_query

    for query in ("", "model=llama-3.1-70b&engine.tensor_parallel_size=4", "model=gpt-oss-20b&hardware=mi300x"):
        data = run_query(request_of(MemoryRequest, read_state(query))).data
        drawn = memory_bar(data)
        assert sum(bar["x"][0] for bar in drawn["data"]) * 1e9 == pytest.approx(data["visible_bytes"], rel=1e-6)
        assert all(bar["x"][0] > 0 for bar in drawn["data"])
        assert f"of the {data['visible_bytes'] / 1e9:.1f} that" in drawn["layout"]["xaxis"]["title"]["text"]


def test_the_device_card_and_the_memory_bar_agree(site):
    """80 GB in the datasheet are 85.0 GB visible to a process; both are shown."""
    page = Page(site.get("/deployment?hardware=h100-sxm-80gb").body.decode())
    (card,) = (figures for arguments, figures in page.cards if arguments[:2] == ["hardware", "show"])
    texts = {path.rpartition(".")[2]: text for path, _, _, text in card}
    assert (texts["visible_bytes"], texts["capacity_bytes"]) == ("85.0 GB", "80.0 GB")
    (bar,) = (plot for plot in page.plots if plot["layout"]["xaxis"].get("range"))
    assert bar["layout"]["xaxis"]["range"] == [0, 85.0]
