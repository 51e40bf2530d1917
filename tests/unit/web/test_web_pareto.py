"""Throughput against interactivity: curves from commands' JSON, columns laid over each other, and a page for a host."""

import json
import re

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from typing import NamedTuple

from web_site import Page

from perfmodel.errors import SpecError
from perfmodel.web.export import export_page
from perfmodel.web.pictures import front
from perfmodel.web.state import PageState, read_state
from perfmodel.web.views import OVERLAYS, PARETO, columns_of, in_flight, name_of, overlaid, without

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


def test_an_empty_state_has_a_name():
    assert name_of(PageState()).startswith("llama")
