"""What if, plan and techniques: their questions, their files, and that only a button begins long work."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `web` is not installed")
pytest.importorskip("jinja2", reason="the extra `web` is not installed")

from typer.testing import CliRunner

from perfmodel.cli import app as command_line
from perfmodel.commands.catalog import TechniquesRequest
from perfmodel.commands.request import CommandRequest
from perfmodel.commands.runs import MemoryRequest
from perfmodel.commands.searches import PlanRequest
from perfmodel.report.plots.whatif import front_plot, tornado
from perfmodel.specs.overrides import parse_override
from perfmodel.web.app import build_app
from perfmodel.web.pictures import against_lines, bounds_plot, devices_bars
from perfmodel.web.results import QueryResult, run_query
from perfmodel.web.service import QueryService
from perfmodel.web.state import PageState, read_state, request_of
from perfmodel.web.views import VIEWS, fields_of, find_view, opened

SPACE = (
    "plan={finalists: 2, seeds: 1, num_requests: 60, max_gpus: 4, space: {hardware: [a100-sxm-80gb, h100-sxm-80gb], "
    "tensor_parallel_size: [1], max_num_seqs: [64], max_num_batched_tokens: [2048]}}"
)
SHORT = (
    "traffic.input_tokens={distribution: fixed, value: 300}",
    "traffic.output_tokens={distribution: fixed, value: 40}",
    "traffic.arrivals.rate=20",
)
PLANNED = PlanRequest("llama-3.1-8b-a100", overrides=(*SHORT, SPACE))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> QueryResult:
    """A plan as the page has it, with a store of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return run_query(PLANNED)


@pytest.mark.release
def test_files_of_a_plan_are_those_that_the_command_writes(plan: QueryResult, tmp_path: Path) -> None:
    arguments = [*PLANNED.arguments, "--store", str(tmp_path / "store"), "--export", str(tmp_path / "out")]
    ran = CliRunner().invoke(command_line, arguments)
    assert ran.exit_code == 0, ran.output
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()}
    assert "kubernetes.yaml" in written
    assert {name: text for name, text in plan.files.items() if name != "report.html"} == written
    assert plan.files["report.html"].startswith("<!doctype html>")
    assert plan.data["winner"]["label"] in plan.files["report.html"]


def test_an_opened_row_is_the_deployment_that_was_planned(plan: QueryResult) -> None:
    """The scenario of the opened address has the row's device, layout and replicas; what was planned for stays."""
    state = read_state("scenario=llama-3.1-8b-a100&devices=a100-sxm-80gb,h100-sxm-80gb&engine.tensor_parallel_size=4")
    for row in plan.data["ranked"]:
        found = read_state(opened(state, plan.data, row))
        assert found.get("hardware") == row["choices"]["hardware"]
        assert found.get("engine.tensor_parallel_size") == "1"
        assert found.get("cluster.replicas") == str(row["replicas"])
        assert found.get("devices") == state.get("devices")
        memory = run_query(request_of(MemoryRequest, found)).data
        assert memory["hardware"] == row["choices"]["hardware"]


def test_a_row_of_the_only_device_that_was_ticked_opens_on_it() -> None:
    """One device is no choice, so the row does not name it."""
    state = read_state("model=llama-3.1-8b&hardware=h100-sxm-80gb&devices=l40s")
    data: dict[str, Any] = {"provenance": {"inputs": {"scenario": {}}}}
    assert read_state(opened(state, data, {"choices": {}})).get("hardware") == "l40s"


def test_what_a_plan_chooses_is_no_part_of_its_question() -> None:
    """So an opened row leads back to the plan that it is from."""
    (part,) = _view("plan").parts
    state = read_state("model=llama-3.1-70b&devices=h100-sxm-80gb,mi300x&ttft=1s&plan.max_gpus=8")
    opened_state = state.changed({"hardware": "mi300x", "engine.tensor_parallel_size": "2", "cluster.replicas": "3"})
    assert part.ask(opened_state) == part.ask(state)
    (question,) = part.ask(state)
    assert question.given["hardware"] == "h100-sxm-80gb,mi300x"
    assert "plan.max_gpus=8" in question.overrides


def test_pictures_show_the_rows_of_the_plan(plan: QueryResult) -> None:
    bars = devices_bars(plan.data)
    assert bars is not None
    shown = dict(zip(bars["data"][0]["y"], bars["data"][0]["x"], strict=True))
    assert shown == {each["device"]: each["usd_per_hour"] for each in plan.data["devices"]}
    front = front_plot(plan.data)
    assert front is not None
    costs = {x for trace in front["data"] for x in trace["x"]}
    assert {row["usd_per_hour"] for row in plan.data["ranked"]} <= costs
    for picture in (bars, front):
        assert "USD per hour" in picture["layout"]["xaxis"]["title"]["text"]


def test_a_tornado_is_as_wide_as_its_sensitivities_widest_on_top() -> None:
    def row(path: str, low: float, high: float) -> dict[str, Any]:
        ends = {"low": {"value": "0.5x", "metric": low}, "high": {"value": "2x", "metric": high}}
        return {"path": path, "metric": "mean_tpot_ms", "base": {"value": 1.0, "metric": 10.0}, **ends}

    data = {
        "base": {"values": {"mean_tpot_ms": 10.0}},
        "sensitivities": [
            row("hardware.peak_flops", 11.0, 9.5),
            row("hardware.hbm.bandwidth", 20.0, 5.0),
            row("overheads.host", 10.0, 10.0),
        ],
    }
    picture = tornado(data, "mean_tpot_ms")
    assert picture is not None
    low, high = picture["data"]
    assert low["y"] == ["peak FLOPs", "HBM bandwidth"]  # plotly draws from below; what moves nothing is left out
    assert [low["base"] + each for each in low["x"]] == [11.0, 20.0]
    assert [high["base"] + each for each in high["x"]] == [9.5, 5.0]
    assert tornado(data, "mean_ttft_ms") is None


def test_bounds_follow_one_another_without_a_gap() -> None:
    turns = [("memory", "compute", 100.0), ("overhead", "memory", 8.0)]
    changes = [
        {"path": "step.batch", "what": "qkv", "before": before, "after": after, "at": at, "unit": ""}
        for before, after, at in turns
    ]
    picture = bounds_plot({"bound_changes": changes})
    assert picture is not None
    spans = sorted(
        (base, base + x, each["name"])
        for each in picture["data"]
        for base, x in zip(each["base"], each["x"], strict=True)
    )
    assert [name for *_, name in spans] == ["overhead-bound", "memory-bound", "compute-bound"]
    assert [low for low, *_ in spans[1:]] == [high for _, high, _ in spans[:-1]]
    assert bounds_plot({"bound_changes": []}) is None


def test_lines_of_an_alternative_have_its_values_and_the_crossover() -> None:
    def point(x: str, value: float) -> dict[str, Any]:
        return {"set": f"traffic.arrivals.rate={x}", "values": {"mean_tpot_ms": value}}

    turn = {"metric": "mean_tpot_ms", "path": "traffic.arrivals.rate", "low": 1.5, "at": 1.6, "high": 1.8}
    data = {
        "points": [point("1x", 5.0), point("2x", 9.0)],
        "against": {"set": ["engine.quantization=fp8"], "points": [point("1x", 6.0), point("2x", 7.0)]},
        "crossovers": [turn],
    }
    picture = against_lines(data, "mean_tpot_ms")
    assert picture is not None
    assert [each["y"] for each in picture["data"]] == [[5.0, 9.0], [6.0, 7.0]]
    assert [each["x"] for each in picture["data"]] == [[1.0, 2.0], [1.0, 2.0]]
    assert [shape["x0"] for shape in picture["layout"]["shapes"]] == [1.5, 1.6]


def test_each_switch_is_a_state_of_the_page_that_says_the_same() -> None:
    """`Use it`: what a page's state overrides is what the switch overrides."""
    for row in TechniquesRequest().answer().data:
        fields = fields_of(row["switch"])
        state = read_state(PageState(tuple(fields.items())).query)
        assert dict(state.fields) == fields
        overrides = [parse_override(text) for text in state.overrides]
        flags = {(name,): fields[name] for name in ("model", "hardware") if name in fields}
        said = {each.path: each.value for each in overrides} | flags
        for text in row["switch"]:
            change = parse_override(text)
            if change.path in said:
                assert said[change.path] == change.value
            else:
                inner = {
                    path[len(change.path) :]: each
                    for path, each in said.items()
                    if path[: len(change.path)] == change.path
                }
                assert inner == {(name,): each for name, each in change.value.items()}


def test_a_gain_is_of_the_switch_and_nothing_without_a_technique() -> None:
    gain = next(part for part in _view("techniques").parts if part.name == "gain")
    assert gain.ask(read_state("model=llama-3.1-8b")) == ()
    (question,) = gain.ask(read_state("model=llama-3.1-8b&technique=FP8 KV"))
    assert question.against == "engine.kv_cache_dtype=fp8"


@pytest.mark.parametrize("name", ["serve.sh", "kubernetes.yaml", "report.html"])
def test_no_get_of_an_export_begins_a_plan(name: str) -> None:
    status, body, desk = _get(f"/file/plan/choice/{name}", "")
    assert status == 404
    assert "start it first" in json.loads(body)["error"]
    desk.close_files()


@pytest.mark.parametrize("name", ["whatif", "plan", "techniques"])
def test_a_view_is_drawn_without_a_simulation(name: str) -> None:
    """A GET draws skeletons, buttons and what is known; work begins with a POST."""
    status, body, desk = _get(f"/{name}", "against=hardware%3Dh200-sxm&technique=FP8+KV")
    assert status == 200
    for part in _view(name).parts:
        assert (f"/ask/{name}/{part.name}?" in body) == (part.lane is not None)
    desk.close_files()


def test_a_known_plans_files_are_served_as_they_are(plan: QueryResult) -> None:
    query = "scenario=llama-3.1-8b-a100"
    (question,) = _view("plan").parts[0].ask(read_state(query))
    known = QueryResult(question, plan.data, plan.document, plan.files)
    for name, text in plan.files.items():
        status, body, desk = _get(f"/file/plan/choice/{name}", query, known)
        assert (status, body) == (200, text)
        desk.close_files()
    status, body, desk = _get("/plan", query, known)
    assert status == 200
    assert plan.data["winner"]["label"] in body
    desk.close_files()


def _view(name: str) -> Any:
    view = find_view(name)
    assert view in VIEWS
    assert view is not None
    return view


class _IdleDesk(QueryService):
    """A desk without workers, at which beginning anything is a failure."""

    def begin(self, question: CommandRequest, lane: str) -> None:
        pytest.fail(f"work began on {question.line}")

    def close_files(self) -> None:
        """Take its folder away."""
        self.uploads.close()


def _get(path: str, query: str, *known: QueryResult) -> tuple[int, str, _IdleDesk]:
    """What a GET is answered, by an application whose desk knows some answers."""
    desk = _IdleDesk()
    for shown in known:
        desk.known.keep(shown.request, shown)
    found: dict[str, Any] = {"body": b""}
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http"},
        **{"path": path, "raw_path": path.encode(), "root_path": "", "query_string": query.encode()},
        "headers": [(b"host", b"127.0.0.1:1234")],
        **{"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1234)},
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found["status"] = message["status"]
        found["body"] += message.get("body", b"")

    asyncio.run(build_app("127.0.0.1", desk)(scope, receive, send))
    return found["status"], found["body"].decode(), desk
