"""The view of traffic: what it asks, and its pictures as pure functions of a command's JSON."""

import math
import re
from urllib.parse import quote

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.errors import SpecError
from perfmodel.web.pictures import goodput_curve, latency_curve, prompt_curve
from perfmodel.web.results import QueryResult
from perfmodel.web.state import read_state
from perfmodel.web.views import TRAFFIC, WHATIF, asked_rate

NOW, LIMIT, CURVE, PROMPTS = TRAFFIC.parts
QUICK = "model=llama-3.1-8b&hardware=h100-sxm-80gb&rate=3&ttft=1s&traffic.num_requests=30"
RATES = [1.0, 2.0, 4.0, 8.0]


def asked(part, query):
    (question, *_) = part.ask(read_state(query))
    return question


def varied(query):
    return asked(CURVE, query).vary[0]


def whatif_data(limits=None, kept=None, knee=4.0, intervals=True):
    """What `whatif --vary traffic.arrivals.rate` prints, as far as pictures read it."""
    names = [f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "e2el") for statistic in ("mean", "p99")]
    points = []
    for rate in RATES:
        values = {name: 10 * rate * (3 if name.startswith("p99") else 1) for name in names}
        values |= {"request_throughput": rate, "request_goodput": rate / 2 if limits else None}
        point = {"set": f"traffic.arrivals.rate={rate:g}", "values": values}
        if intervals:
            point["interval"] = {name: [values[name] * 0.8, values[name] * 1.3] for name in names if "mean" in name}
        points.append(point)
    load = {"rate": 2.0, "rates": RATES, "limits_ms": limits or {}, "knee": knee, "within_slo": kept}
    return {"points": points, "load": load}


def named(picture):
    return {trace["name"]: trace for trace in picture["data"]}


def test_the_curve_asks_one_what_if_of_few_requests():
    question = asked(CURVE, "rate=8&ttft=500ms")
    assert question.command == "whatif"
    assert question.given["ttft"] == "500ms"
    assert "mean_ttft_ms" in question.metric
    assert "traffic.num_requests=400" in question.overrides


def test_the_range_stays_while_the_rate_is_dragged_a_little():
    """So the curve that is known stays, and only the mark of the rate moves."""
    assert asked(CURVE, "rate=8") == asked(CURVE, "rate=9.9") == asked(CURVE, "traffic.arrivals.rate=8")
    assert asked(CURVE, "rate=8") != asked(CURVE, "rate=80")


@pytest.mark.parametrize("rate", [0.02, 0.3, 1, 2.4, 7.7, 64, 999])
def test_the_range_holds_the_rate(rate):
    low, high = varied(f"rate={rate}").partition("=")[2].split(":")[0].split("..")
    assert float(low) < rate < float(high)


def test_the_range_is_that_of_the_address_where_it_says_one():
    assert varied("rate=8&low=3&high=30").endswith("=3..30:7")
    assert varied("low=3").endswith("=3..20:7")
    assert varied("high=30").endswith("..30:7")


def test_without_a_rate_multiples_of_the_traffic_s_own_are_asked():
    assert varied("model=llama-3.1-8b").endswith("=0.25x..4x:7")


def test_rates_are_read_as_the_command_reads_them():
    assert asked_rate(read_state("rate=300/min")) == pytest.approx(5)
    assert asked_rate(read_state("rate=nonsense")) is None
    assert asked_rate(read_state("")) is None
    assert asked(CURVE, "rate=nonsense").given["rate"] == "nonsense"  # for the command to refuse


def test_what_the_address_says_of_requests_and_pauses_stays():
    question = asked(CURVE, "traffic.num_requests=1000&traffic.arrivals.think_time_s=5")
    assert question.overrides.count("traffic.num_requests=1000") == 1
    assert not any(text.startswith("traffic.num_requests=4") for text in question.overrides)
    assert [text for text in question.overrides if "think_time_s" in text] == ["traffic.arrivals.think_time_s=5"]


def test_scenarios_are_asked_with_their_rate_as_a_field():
    question = asked(NOW, "scenario=llama-3.1-8b-a100&rate=3")
    assert question.scenario == "llama-3.1-8b-a100"
    assert "traffic.arrivals.rate=3" in question.overrides
    assert not any("rate=3" in text for text in asked(CURVE, "scenario=llama-3.1-8b-a100&rate=3").overrides)


def test_prompts_come_alone_and_have_one_length():
    question = asked(PROMPTS, "rate=50&model=llama-3.1-8b")
    assert "rate" not in question.given
    assert "traffic.input_tokens.distribution=fixed" in question.overrides
    assert question.vary[0].startswith("traffic.input_tokens.value=")


@pytest.mark.parametrize("name", ["ttft", "tpot", "e2el"])
def test_latencies_are_those_of_the_json_with_units(name):
    data = whatif_data()
    lines = named(latency_curve(data, name))
    label = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}[name]
    assert lines["mean"]["y"] == [point["values"][f"mean_{name}_ms"] for point in data["points"]]
    assert lines["p99"]["y"] == [point["values"][f"p99_{name}_ms"] for point in data["points"]]
    assert lines["p99"]["line"]["dash"] == "dash"
    assert lines["mean"]["x"] == RATES
    layout = latency_curve(data, name)["layout"]
    assert layout["xaxis"]["title"]["text"] == "arriving, requests/s"
    assert layout["yaxis"]["title"]["text"] == f"{label}, ms"


def test_the_fan_has_the_ends_of_the_intervals_and_is_left_out_without_them():
    data = whatif_data()
    band = named(latency_curve(data, "ttft"))["80 % band"]
    ends = {(x, y) for x, y in zip(band["x"], band["y"], strict=True)}
    for rate, point in zip(RATES, data["points"], strict=True):
        low, high = point["interval"]["mean_ttft_ms"]
        assert {(rate, low), (rate, high)} <= ends
    assert "80 % band" not in named(latency_curve(whatif_data(intervals=False), "ttft"))


def test_bands_that_come_later_are_of_the_rates_that_they_are_known_at():
    bands = {"load": {"rates": [1.0, 4.0]}, "points": whatif_data()["points"][::2]}
    picture = named(latency_curve(whatif_data(intervals=False), "ttft", bands=bands))
    assert set(picture["80 % band"]["x"]) == {1.0, 4.0}
    assert picture["mean"]["x"] == RATES


def test_bands_are_asked_for_at_rates_of_the_curve_and_without_limits():
    state = read_state("rate=8&ttft=500ms&traffic.arrivals.think_time_s=5")
    (bands,), (curve,) = CURVE.later(state), CURVE.ask(state)
    assert bands.intervals
    assert not curve.intervals
    assert "ttft" not in bands.given
    assert bands.vary[0].split(":")[0] == curve.vary[0].split(":")[0]
    assert set(bands.metric) < set(curve.metric)
    assert CURVE.later(read_state("rate=8"))[0] == CURVE.later(read_state("rate=9&ttft=1s"))[0]


def test_a_get_begins_no_bands_and_the_part_stands_without_them(site):
    address = f"traffic/curve?{QUICK}"
    (question,) = CURVE.ask(read_state(QUICK))
    site.desk.answer(question)
    page = site.get(f"/part/{address}").body.decode()
    assert "80 % bands follow" in page
    assert f"/later/{address.split('?')[0]}" in page
    assert "80 % bands follow" in site.get(f"/later/{address}").body.decode()
    assert site.desk.look(CURVE.later(read_state(QUICK))[0]).job is None


@pytest.mark.parametrize(
    ("limits", "aside"),
    [
        ("tpot=9ms", "90.0 % of requests meet it"),
        ("slo.tpot_p50_ms=9", "its mean and percentiles hold"),
        ("tpot=1s", "90.0 % of requests meet it"),  # a queue that grows ends it
        ("tpot=1s&traffic.num_requests=20", "all rates that were tried are within it"),  # too few for one to be seen
        ("tpot=1ms", "missed even at"),
        ("seed=3", "give a limit on TTFT, TPOT or E2E"),
    ],
)
def test_each_end_of_the_service_level_is_said(site, limits, aside):
    requests = "" if "num_requests" in limits else "&traffic.num_requests=60"
    query = f"model=llama-3.1-8b&hardware=h100-sxm-80gb&rate=3{requests}&{limits}"
    assert site.desk.answer(asked(LIMIT, query)).shown, site.desk.answer(asked(LIMIT, query)).refusal
    response = site.get(f"/part/traffic/limit?{quote(query, safe='=&')}")
    assert response.status == 200
    assert aside in re.sub(r"<[^>]*>", "", response.body.decode())


def test_bands_that_are_refused_are_said_and_not_asked_for_again_and_again(site):
    query = f"{QUICK}&seed=5"
    (curve,), (bands,) = CURVE.ask(read_state(query)), CURVE.later(read_state(query))
    assert site.desk.answer(curve).shown
    site.desk.known.keep(bands, SpecError("too many requests for this machine."))
    html = site.get(f"/part/traffic/curve?{query}").body.decode()
    assert "No 80 % bands: too many requests for this machine." in html
    assert "/later/" not in html


def test_traffic_of_a_duration_is_not_bounded_by_a_number_and_prompts_still_come():
    state = read_state("model=llama-3.1-8b&hardware=h100&rate=4&traffic.duration_s=20")
    for part in (CURVE, LIMIT, NOW):
        (question,) = part.ask(state)
        assert "traffic.duration_s=20" in question.overrides
        assert not any(override.startswith("traffic.num_requests") for override in question.overrides)
    (prompts,) = PROMPTS.ask(state)
    assert not any(override.startswith("traffic.duration_s") for override in prompts.overrides)
    for question in WHATIF.parts[0].ask(state):
        assert not any(override.startswith("traffic.num_requests") for override in question.overrides)


def test_with_the_bands_the_part_is_drawn_anew(site):
    address = f"traffic/curve?{QUICK}"
    for question in (*CURVE.ask(read_state(QUICK)), *CURVE.later(read_state(QUICK))):
        site.desk.answer(question)
    answer = site.get(f"/later/{address}")
    assert "hx-retarget" not in dict(answer.headers)  # an error where that part is no longer on the page
    page = answer.body.decode()
    assert 'hx-get="/part/traffic/curve' in page
    assert 'hx-target="#part-curve"' in page
    page = site.get(f"/part/{address}").body.decode()
    assert "80 % bands follow" not in page
    assert "80 % band" in page


def test_limits_knee_and_the_largest_rate_are_marked_where_they_are():
    picture = latency_curve(whatif_data({"ttft": 60.0}, {"max_rate": 5.0}), "ttft", now=3.0)
    upright = {shape["x0"] for shape in picture["layout"]["shapes"] if shape.get("yref") == "y domain"}
    assert upright == {3.0, 4.0, 5.0}
    across = [shape["y0"] for shape in picture["layout"]["shapes"] if shape.get("xref") == "x domain"]
    assert across == [60.0]
    words = " ".join(note["text"] for note in picture["layout"]["annotations"])
    assert all(word in words for word in ("limit 60 ms", "knee", "now", "SLO limit"))
    all_met = latency_curve(whatif_data({"ttft": 60.0}, {"max_rate": 8.0, "is_all": True}), "ttft", now=3.0)
    assert "SLO limit" not in str(all_met["layout"])  # the largest rate shown is not a limit
    bare = latency_curve(whatif_data(knee=None), "ttft")
    assert [shape["x0"] for shape in bare["layout"]["shapes"]] == [2.0]  # the traffic's own rate


def test_every_value_lies_on_the_axes_and_they_stay_while_values_move_a_little():
    picture = latency_curve(whatif_data({"ttft": 1000.0}), "ttft", now=0.7)
    for axis, key in (("xaxis", "x"), ("yaxis", "y")):
        low, high = picture["layout"][axis]["range"]
        values = [math.log10(value) for trace in picture["data"] for value in trace[key]]
        assert low <= min(values) <= max(values) <= high
        assert len(picture["layout"][axis]["tickvals"]) == len(picture["layout"][axis]["ticktext"]) >= 2
    assert picture["layout"]["xaxis"]["range"][0] <= math.log10(0.7)
    moved = whatif_data({"ttft": 1000.0})
    for point in moved["points"]:
        point["values"] = {name: value and value * 1.02 for name, value in point["values"].items()}
    assert latency_curve(moved, "ttft", now=0.7)["layout"]["yaxis"] == picture["layout"]["yaxis"]


def test_points_without_an_answer_leave_a_gap():
    data = whatif_data()
    data["points"][1] = {"set": "traffic.arrivals.rate=2", "values": {}, "problem": "does not fit"}
    assert named(latency_curve(data, "ttft"))["mean"]["y"][1] is None
    assert named(goodput_curve(data))["completed"]["y"][1] is None


def test_goodput_is_shown_where_there_is_an_slo():
    assert named(goodput_curve(whatif_data({"ttft": 60.0})))["within the SLO"]["y"] == [rate / 2 for rate in RATES]
    assert "within the SLO" not in named(goodput_curve(whatif_data()))
    assert "requests/s" in goodput_curve(whatif_data())["layout"]["yaxis"]["title"]["text"]


def test_prompts_are_told_by_their_tokens():
    data = {
        "points": [
            {"set": "traffic.input_tokens.value=256", "values": {"mean_ttft_ms": 20.0}},
            {"set": "traffic.input_tokens.value=4096", "values": {}, "problem": "longer than the model's context"},
            {"set": "traffic.input_tokens.value=1024", "values": {"mean_ttft_ms": 60.0}},
        ]
    }
    picture = prompt_curve(data)
    assert (picture["data"][0]["x"], picture["data"][0]["y"]) == ([256, 1024], [20.0, 60.0])
    assert picture["layout"]["xaxis"]["title"]["text"] == "tokens of the prompt"
    assert picture["layout"]["yaxis"]["title"]["text"] == "TTFT, ms"


def test_prompts_without_an_answer_say_why(site):
    (question,) = PROMPTS.ask(read_state(f"{QUICK}&seed=9"))
    points = [
        {"set": f"traffic.input_tokens.value={n}", "values": {}, "problem": f"{n}: too long."} for n in (256, 512)
    ]
    site.desk.known.keep(question, QueryResult(question, {"points": points}, {"blocks": []}))
    html = site.get(f"/part/traffic/prompts?{QUICK}&seed=9").body.decode()
    assert "256: too long." in html
    assert "data-figure" not in html
