"""Throughput against interactivity: curves from commands' JSON, columns laid over each other, and a page for a host."""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from typing import NamedTuple

from web_site import Page

from perfmodel.errors import SpecError
from perfmodel.trust import measured_rows
from perfmodel.web.compare import (
    MeasuredPoint,
    _has_lengths,
    _num_devices,
    _throughput,
    at_speed,
    cheapest,
    own_points,
    own_results,
    published_points,
    reading_text,
)
from perfmodel.web.pages import export_page
from perfmodel.web.pictures import front
from perfmodel.web.service import resolved_fields
from perfmodel.web.state import PageState, read_state
from perfmodel.web.views import OVERLAYS, PARETO, columns_of, in_flight, name_of, overlaid, without

BENCH = Path(__file__).parents[2] / "data" / "bench"
START = read_state("model=llama-3.1-8b&hardware=h100&rate=4")


class Answer(NamedTuple):
    data: dict


def points(tpots_ms, throughputs, interval=None):
    """A deployment with 1, 2, 4 ... requests in flight."""
    return Answer(
        {
            "points": [
                {
                    "set": f"traffic.arrivals.concurrency={2**number}",
                    "values": {"mean_tpot_ms": tpot, "mean_e2el_ms": 1000.0, "output_throughput_per_gpu": throughput},
                    **({"interval": interval} if interval else {}),
                }
                for number, (tpot, throughput) in enumerate(zip(tpots_ms, throughputs, strict=True))
            ]
        }
    )


def test_a_user_gets_a_token_each_tpot():
    (curve,) = front([points([10.0, 20.0], [90.0, 160.0])], "output_throughput_per_gpu", [START])["data"]
    assert curve["x"] == [100.0, 50.0]
    assert curve["y"] == [90.0, 160.0]
    assert curve["text"] == ["1", "2"]


def test_a_band_lies_between_the_slowest_and_the_fastest_steps():
    """With a fixed number in flight throughput goes with one over the time of a request: 1 s, between 0.8 and 1.25."""
    answer = points([10.0], [100.0])
    band = points([10.0], [100.0], {"mean_tpot_ms": [8.0, 12.5], "mean_e2el_ms": [800.0, 1250.0]})
    area, curve = front([answer], "output_throughput_per_gpu", [START], [band])["data"]
    assert area["x"] == pytest.approx([80.0, 125.0])
    assert area["y"] == pytest.approx([80.0, 125.0])
    assert curve["y"] == [100.0]


def test_a_refused_deployment_leaves_the_others_their_colours():
    both = front([points([10.0], [1.0])] * 2, "output_throughput_per_gpu", [START, START])["data"]
    (second,) = front([None, points([10.0], [1.0])], "output_throughput_per_gpu", [START, START])["data"]
    assert second["line"] == both[1]["line"]


def test_a_point_opens_the_deployment_under_its_load():
    (curve,) = front([points([10.0, 20.0], [1.0, 2.0])], "mean_tpot_ms", [START])["data"]
    opened = read_state(curve["customdata"][1])
    assert opened.get("traffic.arrivals") == "{process: closed_loop, concurrency: 2}"
    assert opened.get("model") == "llama-3.1-8b"
    assert not opened.get("rate")
    assert in_flight(opened, "8").get("traffic.arrivals").endswith("8}")


@pytest.mark.parametrize(("key", "value", "label"), OVERLAYS)
def test_what_is_laid_over_differs_in_one_field(key, value, label):
    state = overlaid(START, key, value)
    first, second = columns_of(state)
    changed = {**dict(first.fields), key: value}
    assert dict(second.fields) == changed
    assert value in name_of(second)
    assert without(state, 1) == START


def test_each_column_asks_for_the_same_loads():
    state = overlaid(overlaid(START, "hardware", "h200-sxm"), "engine.profile", "sglang")
    (part,) = PARETO.parts
    requests = part.ask(state)
    assert len(requests) == 3
    assert {request.vary for request in requests} == {("traffic.arrivals.concurrency=1..128:8",)}
    assert len(part.later(state)) == 3


def test_an_exported_page_needs_no_server_and_shows_what_the_commands_say(tmp_path):
    address = "http://127.0.0.1:1/pareto?model=llama-3.1-8b&hardware=h100&traffic.num_requests=20"
    export_page(address, tmp_path)
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    answers = json.loads((tmp_path / "data.json").read_text(encoding="utf-8"))
    for name in re.findall(r'(?:src|href)="([^"]+)"', html):
        assert name.startswith(("/pareto?", "/data/")) or (tmp_path / name).is_file()  # the first are not shown
    (area, curve), *_ = (plot["data"] for plot in Page(html).plots)
    told = [point["values"]["output_throughput_per_gpu"] for point in answers[0]["answer"]["points"]]
    assert curve["y"] == told
    assert len(area["x"]) == 8
    assert [answer["command"].split()[1] for answer in answers] == ["whatif", "whatif"]


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("nowhere?model=x", "--view: got 'nowhere"),
        ("pareto?model=llama-9", "llama-9"),
        ("pareto?model=llama-3.1-8b&model=llama-3.1-8b", "comes twice"),
        ("pareto?modle=llama-3.1-8b", "unknown key 'modle'"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_a_sentence(address, sentence, tmp_path):
    with pytest.raises(SpecError, match=sentence):
        export_page(address, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="--export"):
        export_page("memory?model=llama-3.1-8b", tmp_path / "file")


def resolved(query):
    return resolved_fields(read_state(query), Path("/nowhere"))


def test_published_points_are_the_measured_rows_of_the_model_and_device():
    """Row `..._c16_tp8_...` of measurements/steady-state: Qwen3-32B in BF16 on eight H100 with vLLM 0.12, 16 in flight,
    answers of 0.8 to 1.0 times 1,024 tokens: 921.5 in the mean; 100.8 ms to the first, 8.925 ms for each other. One
    takes 100.8 + 920.5 x 8.925 = 8,316 ms, so that by Little's law 16 x 921.5 / 8.316 / 8 = 221.6 tokens/s come from a
    device."""
    lengths = {"distribution": "fixed", "value": 1024}
    fields = resolved("model=qwen3-32b&hardware=h100-sxm-80gb&engine.tensor_parallel_size=8")
    fields["traffic"] = {**fields["traffic"], "input_tokens": lengths, "output_tokens": lengths}
    points = published_points(fields)
    assert len(points) > 100
    (point,) = [point for point in points if point.words.endswith("_1024x1024_c16_tp8_epnone_36")]
    assert point.speed == pytest.approx(1e3 / 8.925)
    assert point.throughput == pytest.approx(221.6, rel=1e-3)
    assert point.is_alike
    assert "vllm 0.12, bf16, 8 devices, 922 in, 922 out, 16 in flight" in point.words
    assert "aiconfigurator" in point.words
    assert {point.is_alike for point in points} == {True, False}
    lengths_alike = {point.words.partition(" in, ")[2].partition(" out")[0] for point in points if point.is_alike}
    assert lengths_alike == {"922"}  # 8,192 tokens in or out are others
    four = published_points({**fields, "engine": {**fields["engine"], "tensor_parallel_size": 4}})
    assert {", 4 devices," in point.words for point in four if point.is_alike} == {True}
    assert not published_points(resolved("model=qwen3-32b&hardware=l4"))


@pytest.mark.parametrize(
    ("tokens_in", "tokens_out", "is_alike"),
    [(2000.0, 250.0, True), (500.0, 1000.0, True), (2001.0, 500.0, False), (499.0, 500.0, False), (1e3, 1001.0, False)],
)
def test_lengths_are_alike_up_to_twice_and_down_to_half(tokens_in, tokens_out, is_alike):
    """Of traffic with 1,000 tokens in and 500 out in the mean; where a file has them, any are."""
    setup = next(iter(measured_rows())).setup._replace(input_tokens=tokens_in, output_tokens=tokens_out)
    lengths = {"input_tokens": {"mean": 1000, "p99": 4000, "distribution": "lognormal"}}
    lengths["output_tokens"] = {"distribution": "uniform", "low": 250, "high": 750}
    assert _has_lengths(setup, lengths) == is_alike
    assert _has_lengths(setup, {"trace": {"path": "a.csv"}})


def test_throughput_by_littles_law_is_the_measured_one():
    """Of servers that state output tokens/s beside TTFT, TPOT and the requests in flight."""
    loads = defaultdict(dict)
    for row in measured_rows():
        if row.setup.concurrency and not row.setup.separate:
            loads[row.setup, row.label][row.metric] = row.measured
    ratios = []
    for (setup, _), metrics in loads.items():
        stated = metrics.pop("output_tokens_per_s", 0.0)
        if stated and {"ttft_mean", "tpot_mean"} <= metrics.keys():
            ratios.append(_throughput(setup, metrics) / stated)
    assert len(ratios) > 50
    assert 0.95 < median(ratios) < 1.1
    assert sum(0.8 < ratio < 1.25 for ratio in ratios) > 0.7 * len(ratios)  # the others: short runs, which end slowly


def test_own_results_are_points_on_the_forms_devices():
    """vllm.json says a mean TPOT of 10.33 ms, 315.5 output tokens/s and at most 4 in flight; two devices ran it."""
    fields = resolved("model=llama-3.1-8b&hardware=h100&engine.tensor_parallel_size=2")
    (point,) = own_points(BENCH / "vllm.json", _num_devices(fields["engine"]))
    assert point.speed == pytest.approx(1e3 / 10.326446, rel=1e-6)
    assert point.throughput == pytest.approx(315.4717 / 2, rel=1e-6)
    assert "2 devices, 4 in flight" in point.words
    with pytest.raises(SpecError, match="no run has both"):
        own_points(BENCH / "llama_bench.csv", 1)


def test_marks_are_drawn_with_the_curves_and_leave_them_their_room():
    mark = MeasuredPoint(500.0, 9000.0, True, "a<br>b")
    fields = resolved("model=qwen3-32b&hardware=h100-sxm-80gb&engine.tensor_parallel_size=8")
    answer = points([10.0, 20.0], [90.0, 160.0])
    answer.data["provenance"] = {"inputs": {"scenario": fields}}
    drawn = front([answer], "output_throughput_per_gpu", [START], own=[mark], speed=60.0)
    *published, own, curve = drawn["data"]
    assert sum(len(trace["x"]) for trace in published) == len(published_points(fields))
    assert all(trace["visible"] == "legendonly" for trace in published if "other setups" in trace["name"])
    assert (own["x"], own["y"], list(own["text"])) == ([500.0], [9000.0], ["a<br>b"])
    assert curve["x"] == [100.0, 50.0]
    assert drawn["layout"]["yaxis"]["range"] == [0, pytest.approx(1.05 * 320)]  # twice the curve
    assert [shape["x0"] for shape in drawn["layout"]["shapes"]] == [60.0]


def priced(tpots_ms, throughputs, costs):
    answer = points(tpots_ms, throughputs)
    for point, cost in zip(answer.data["points"], costs, strict=True):
        point["values"] |= {"usd_per_million_output_tokens": cost, "joules_per_output_token": 1.0}
    return answer


def test_a_reading_lies_on_the_curve_as_it_is_drawn():
    """50 tokens/s lie halfway between 60 and 40: throughput halfway, cost at the geometric mean of 8 and 2."""
    slow = priced([1e3 / 60, 1e3 / 40], [100.0, 300.0], [8.0, 2.0])
    fast = priced([1e3 / 200, 1e3 / 100], [10.0, 20.0], [90.0, 50.0])
    never = priced([1e3 / 30, 1e3 / 20], [1.0, 2.0], [1.0, 0.1])
    readings = [at_speed(answer.data["points"], 50.0) for answer in (slow, fast, never)]
    first, late, last = readings
    assert first.in_flight == "1 to 2"
    assert first.values["output_throughput_per_gpu"] == pytest.approx(200.0)
    assert first.values["usd_per_million_output_tokens"] == pytest.approx(4.0)
    assert reading_text("usd_per_million_output_tokens", first) == "≈ 4"
    assert (late.in_flight, late.values["usd_per_million_output_tokens"]) == ("2 or more", 50.0)
    assert last is None
    assert cheapest([late, None, first]) == (2, pytest.approx(1 - 4 / 50))
    assert cheapest([first, None]) is None  # of one there is nothing to say


@pytest.mark.parametrize("speed", ["0", "-3x", "many", "1e99"])
def test_a_speed_that_is_none_is_refused(speed):
    with pytest.raises(SpecError, match="speed"):
        PARETO.parts[0].ask(START.changed({"speed": speed}))


@pytest.mark.parametrize("mark", ["/etc/passwd", "drop:0123456789abcdef/../x", "drop:0123456789abcdef/gone.json"])
def test_results_are_a_dropped_file_or_nothing(mark, tmp_path):
    none, refusal = own_results(START.changed({"results": mark}), resolved(START.query), tmp_path)
    assert none == ()
    assert "drop" in refusal
    assert str(tmp_path) not in refusal


def test_an_empty_state_has_a_name():
    assert name_of(PageState()).startswith("llama")
