"""Deployments side by side: what is asked of each, what is said of their differences, and the pictures."""

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.commands.runs import MemoryRequest, SimulateRequest
from perfmodel.web.compare import OF_DEPLOYMENTS, compared, headings
from perfmodel.web.pages import Pages
from perfmodel.web.pictures import column_bars, measured_dots
from perfmodel.web.results import QueryResult
from perfmodel.web.service import QueryService, QueryState
from perfmodel.web.state import PageState, read_state
from perfmodel.web.views import COMPARE, columns_of, deployment_of, main_of

DEPLOYMENTS, SERVED = COMPARE.parts
ONE = {"model": "llama-3.1-8b", "hardware": "h100-sxm-80gb", "rate": "5", "ttft": "1s", "traffic.num_requests": "100"}
OTHER = PageState((("model", "llama-3.1-8b"), ("hardware", "a100-sxm-80gb"), ("engine.max_num_seqs", "64")))
TOO_LARGE = PageState((("model", "llama-3.1-70b"), ("hardware", "l40s")))


def state_of(*others, **more):
    return PageState(tuple({**ONE, **more}.items()), others)


@pytest.fixture(scope="module")
def pages():
    desk = QueryService()
    yield Pages(desk, "token")
    desk.uploads.close()


def finding_of(data, measured=(), command="simulate"):
    question = MemoryRequest() if command == "memory" else SimulateRequest()
    return QueryState(question, QueryResult(question, data, {"blocks": []}, measured=measured))


def test_addresses_keep_the_others():
    state = state_of(OTHER, TOO_LARGE)
    assert read_state(state.query) == state
    assert read_state(read_state(state.query).query).others == (OTHER, TOO_LARGE)


def test_all_get_the_traffic_and_the_limits_of_the_first():
    first, other = columns_of(state_of(OTHER))
    assert (first.get("hardware"), other.get("hardware")) == ("h100-sxm-80gb", "a100-sxm-80gb")
    for key in ("rate", "ttft", "traffic.num_requests"):
        assert other.get(key) == first.get(key) == ONE[key]
    own = PageState((*OTHER.fields, ("rate", "9")))
    assert columns_of(state_of(own))[1].get("rate") == "9"


def test_what_is_duplicated_is_the_deployment_without_its_traffic():
    copied = deployment_of(state_of(**{"engine.tensor_parallel_size": "2", "batch": "8"}))
    assert dict(copied.fields) == {
        "model": "llama-3.1-8b",
        "hardware": "h100-sxm-80gb",
        "engine.tensor_parallel_size": "2",
    }
    assert deployment_of(PageState()).get("model")  # what is shown without an address, too


def test_a_column_and_the_first_one_change_places_and_back():
    state = state_of(OTHER, TOO_LARGE)
    turned = main_of(state, 1)
    assert turned.get("hardware") == "a100-sxm-80gb"
    assert turned.get("rate") == "5"
    assert turned.others[0].get("hardware") == "h100-sxm-80gb"
    back = main_of(turned, 1)
    assert dict(back.fields) == dict(state.fields)
    assert set(back.others[0].fields) == set(OTHER.fields)


def test_each_column_is_asked_the_same_of():
    questions = SERVED.ask(state_of(OTHER))
    assert [question.command for question in questions] == ["simulate", "whatif"] * 2
    assert [question.given["hardware"] for question in questions[::2]] == ["h100-sxm-80gb", "a100-sxm-80gb"]
    assert all("traffic.num_requests=100" in question.overrides for question in questions)
    steps = DEPLOYMENTS.ask(state_of(OTHER, batch="16"))[1::2]
    assert {question.batch for question in steps} == {16}
    assert "engine.max_num_seqs=64" in steps[1].overrides


def test_a_column_that_is_refused_says_why_and_the_others_stand(pages):
    html = str(pages.part(COMPARE, DEPLOYMENTS, state_of(TOO_LARGE, OTHER)))
    assert "l40s has 48.0 GB" in html
    assert html.count("fits") >= 2
    assert 'data-path="max_tokens"' in html
    alone = str(pages.part(COMPARE, DEPLOYMENTS, PageState(TOO_LARGE.fields)))
    assert "l40s has 48.0 GB" in alone
    assert "data-duplicate" in alone


@pytest.mark.release
def test_headings_are_those_of_the_answers():
    desk = QueryService()
    split = PageState((*OTHER.fields, ("engine.tensor_parallel_size", "4"), ("engine.pipeline_parallel_size", "2")))
    named = PageState((("scenario", "llama-3.1-8b-a100"), ("engine.data_parallel_size", "2")))
    state = state_of(split, named, TOO_LARGE)
    found = headings(columns_of(state), [desk.answer(each) for each in DEPLOYMENTS.ask(state)])
    served = headings(
        columns_of(state), [desk.answer(each) for each in SERVED.ask(state) if each.command == "simulate"]
    )
    desk.uploads.close()
    assert served == found
    assert found == [
        ("llama-3.1-8b", "1 x h100-sxm-80gb"),
        ("llama-3.1-8b", "8 x a100-sxm-80gb"),
        ("llama-3.1-8b", "2 x a100-sxm-80gb"),
        ("llama-3.1-70b", "l40s"),
    ]


def test_four_stand_side_by_side_at_most(pages):
    assert "data-duplicate" in str(pages.part(COMPARE, DEPLOYMENTS, state_of(OTHER, OTHER)))
    assert "data-duplicate" not in str(pages.part(COMPARE, DEPLOYMENTS, state_of(OTHER, OTHER, OTHER)))


def test_hostile_names_are_text(pages):
    hostile = PageState((("model", "<script>alert(1)</script>"), ("hardware", '"><img src=x>')))
    html = str(pages.part(COMPARE, DEPLOYMENTS, state_of(hostile)))
    assert "<script>alert" not in html
    assert "<img src=x" not in html


def test_differences_are_those_to_the_first_column():
    desk = QueryService()
    questions = DEPLOYMENTS.ask(state_of(OTHER, PageState(tuple(deployment_of(state_of()).fields))))
    rows = {each.row.path: each for each in compared([desk.answer(each) for each in questions], OF_DEPLOYMENTS, 3)}
    desk.uploads.close()
    first, other, same = rows["duration_s"].cells
    slower = other.shown.data["duration_s"] / first.shown.data["duration_s"] - 1
    assert slower > 0  # an A100 has 2.0 of the H100's 3.35 TB/s
    assert (first.words, same.words) == ("", "the same")
    assert other.words in (f"{slower:.1%} higher, worse".replace("%", " %"), f"{1 + slower:.3g} times, worse")
    assert other.tone == "bad"
    assert (first.share, other.share) == pytest.approx((1 / (1 + slower), 1))


def test_bars_carry_their_intervals_and_units():
    data = {"mean_ttft_ms": 50.0, "interval": {"mean_ttft_ms": [40.0, 70.0]}}
    refused = QueryState(SimulateRequest(), refusal="does not fit")
    picture = column_bars([finding_of(data), refused, finding_of({"mean_ttft_ms": 20.0})], "mean_ttft_ms")
    (bars,) = picture["data"]
    assert (bars["x"], bars["y"]) == ([50.0, 20.0], ["A", "C"])
    assert (bars["error_x"]["array"], bars["error_x"]["arrayminus"]) == ([20.0, 0.0], [10.0, 0.0])
    assert "ms" in picture["layout"]["xaxis"]["title"]["text"]


def test_dots_are_predicted_over_measured():
    row = {"label": "one run", "metric": "tpot_mean", "predicted": 12.0, "measured": 1000.0}
    cell = {"median_error": 0.25, "rows": 3, "model": "m", "device": "d", "metric": "tpot_mean"}
    picture = measured_dots([finding_of({"trust": {"nearest": [cell]}}, [row]), finding_of({})])
    dots, cells = picture["data"]
    assert dots["x"] == [12 / 1000]
    assert cells["x"] == [1.25, 0.8]
    assert "times" in picture["layout"]["xaxis"]["title"]["text"]
    assert measured_dots([finding_of({})]) is None
