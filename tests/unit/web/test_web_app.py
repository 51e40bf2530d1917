"""The page's server: what it answers to whom, and what it does not do."""

import asyncio
import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from asgi_client import Client
from typer.testing import CliRunner
from web_site import HOST, Page, say_nothing_of_here

from perfmodel.cli import app
from perfmodel.commands.runs import MemoryRequest, SimulateRequest
from perfmodel.specs import load_scenario
from perfmodel.web.app import _MAX_LINE_BYTES, _STATIC, HEADERS
from perfmodel.web.results import MAX_BYTES
from perfmodel.web.state import read_state, request_of
from perfmodel.web.views import VIEWS

BENCH = Path(__file__).parents[2] / "data" / "bench"
HTML = ("accept", "text/html")
PARTS = [(view, part) for view in VIEWS for part in view.parts]
HOSTILE = "<img src=x onerror=alert(1)>\"'{{97*983}}${97*983}"


def sentence(response, status):
    assert response.status == status, response.body[:300]
    say_nothing_of_here(response)
    (said,) = response.json().values()
    assert "\n" not in said
    return said


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_each_view_is_a_page_that_loads_from_here_alone(view, site, nobody_works):
    response = site.get(f"/{view.name}?model=llama-3.1-8b&hardware=h100&rate=2", HTML)
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/html")
    for name, value in HEADERS.items():
        assert response.headers[name] == value
    assert response.headers["cache-control"] == "no-store"
    say_nothing_of_here(response)
    page = Page(response.body.decode())
    assert not page.refusals
    for tag, given in page.tags:
        assert not [name for name in given if name.startswith("on")], (tag, given)  # no inline handler
        for name in ("src", "href", "hx-get", "hx-post", "action"):
            assert re.match(r"[/#]", given.get(name, "/")), (tag, given)
        assert tag != "script" or given.get("src", "").startswith("/static/")
    ids = [given["id"] for _, given in page.tags if "id" in given]
    assert len(ids) == len(set(ids))
    named = [given for tag, given in page.tags if tag in ("input", "select") and "name" in given]
    labels = {given.get("for") for tag, given in page.tags if tag == "label"}
    assert all(given["id"] in labels or "aria-label" in given for given in named if given.get("type") != "hidden")


@pytest.mark.parametrize(("view", "part"), PARTS, ids=lambda each: each.name)
def test_to_look_never_begins_work(view, part, site, nobody_works):
    for path in (f"/part/{view.name}/{part.name}", f"/data/{view.name}/{part.name}"):
        response = site.get(f"{path}?model=llama-3.1-8b&hardware=h100&rate=7.7")
        assert response.status in (200, 404)
        say_nothing_of_here(response)
    for path in (f"/ask/{view.name}/{part.name}", f"/stop/{view.name}/{part.name}"):
        assert site.get(path).status == 405


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/nothing", 404, "there is no page '/nothing'"),
        ("/a/b/c", 404, "there is no page '/a/b/c'"),
        ("/" + "x" * 5000, 404, "there is no page"),
        ("/static/../app.py", 404, "no such file"),
        ("/static/..%2fapp.py", 404, "no such file"),
        ("/static//etc/passwd", 404, "no such file"),
        ("/static/app.py", 404, "no such file"),
        ("/static/", 404, "no such file"),
        ("/static/vendor/../app.css", 404, "no such file"),
        ("/part/step/nothing", 422, "no such part"),
        ("/part/nothing/x", 422, "no such part"),
        ("/step?model=%00", 422, "printable"),
        ("/step?model=" + "a" * 20_000, 422, "16,000"),
        ("/serve-line?model=nothing", 422, "nothing"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(path, status, said, site):
    assert said in sentence(site.get(path), status)
    page = site.get(path, HTML)
    assert page.status == status
    assert Page(page.body.decode()).refusals or "static" in path
    say_nothing_of_here(page)


def test_methods_that_a_page_does_not_take(site):
    assert "no page" in sentence(site.post("/deployment"), 405)
    assert asyncio.run(site.send("HEAD", "/deployment", b"")).status == 200


def test_home_leads_to_a_view_of_this_server_only(site):
    response = site.get("/?model=llama-3.1-8b")
    assert (response.status, response.headers["location"]) == (307, "/deployment?model=llama-3.1-8b")
    for path in ("//evil.example/", "//evil.example", "/\\evil.example/", "/deployment/"):
        location = site.get(path).headers.get("location", "/")
        assert location.startswith(("/deployment", "http://127.0.0.1:8080/")) or location == "/", (path, location)


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "-3", "0", "1e-400", "many"])
@pytest.mark.parametrize("key", ["low", "high"])
def test_rates_that_are_none_are_said_or_left_to_the_command(key, value, site, nobody_works):
    assert site.get(f"/traffic?{key}={value}&rate=4").status in (200, 422)
    assert site.get(f"/part/traffic/curve?{key}={value}").status in (200, 422)


def test_a_metric_that_pictures_are_not_of_is_refused_in_its_field(site, nobody_works):
    page = Page(site.get("/whatif?metric=foo&against=hardware=h200", HTML).body.decode())
    assert len(page.refusals) == 2
    assert all("metric: got 'foo'; expected mean_ttft_ms" in said for said in page.refusals)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
@pytest.mark.parametrize("key", ["model", "hardware", "engine.max_num_seqs", "traffic", "ttft", "batch", "scenario"])
def test_html_in_a_value_is_text(view, key, site, nobody_works):
    response = site.get(f"/{view.name}?{key}={quote(HOSTILE)}", HTML)
    text = response.body.decode()
    assert "<img src=x" not in text
    assert str(97 * 983) not in text
    page = Page(text)
    assert not [given for tag, given in page.tags if "onerror" in given]
    say_nothing_of_here(response)


def test_html_in_a_file_s_model_is_text(site):
    config = json.loads((Path(__file__).parents[2] / "data" / "web_config.json").read_text(encoding="utf-8"))
    config["_name_or_path"] = config["architectures"][0] + HOSTILE
    config["torch_dtype"] = "bfloat16"
    mark = site.post(f"/drop?name={quote('<b>.json')}", json.dumps(config).encode()).json()["mark"]
    for view in VIEWS:
        response = site.get(f"/{view.name}?model={mark}", HTML)
        assert response.status == 200
        assert "<img src=x" not in response.body.decode()
        say_nothing_of_here(response)


PATHS = [
    "model=/etc/passwd",
    "model=../../etc/passwd",
    "model=~root/x",
    "model=file:///etc/passwd",
    "model=https://evil.example/x",
    "hardware=~root/x",
    "hardware=/etc/passwd",
    "hardware=/proc/self/environ",
    "traffic=/etc/passwd",
    "engine.profile=../x",
    "engine.profile=/etc/passwd",
    "traffic.trace.path=/etc/passwd",
    "traffic.trace=/etc/passwd",
    "traffic=%7Btrace%3A%20%7Bpath%3A%20/etc/passwd%7D%7D",
    "engine.speculative_config.model=/etc/passwd",
    "model_changes.base=/etc/passwd",
    "hardware.base=/etc/passwd",
    "engine.quantization=/etc/passwd",
    "model=drop:0123456789abcdef/../../x",
    "model=C:\\Windows\\x",
    "model=\\\\server\\share",
]


@pytest.mark.parametrize("query", PATHS)
def test_an_address_opens_no_file(query, site, monkeypatch):
    import builtins
    import io
    import os

    touched = []

    def watched(real):
        def call(path, *more, **kind):
            touched.append(str(path))
            return real(path, *more, **kind)

        return call

    for module, name in ((builtins, "open"), (io, "open"), (os, "stat"), (os, "open"), (os, "scandir")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    for view in VIEWS:
        response = site.get(f"/{view.name}?{query}", HTML)
        assert response.status in (200, 422)
        say_nothing_of_here(response)
    serve = site.get(f"/serve-line?{query}")
    assert serve.status == 422
    elsewhere = [
        path for path in touched if not path.startswith(str(Path(__file__).parents[3])) and "site-packages" not in path
    ]
    assert not [path for path in elsewhere if re.search(r"passwd|environ|evil|root|server|^\.\.", path)]


def test_what_changes_state_needs_the_page_s_token(site):
    for path in ("/drop?name=a.json", "/line", "/ask/step/decode", "/stop/step/decode"):
        assert "load it again" in sentence(asyncio.run(site.send("POST", path, b"{}")), 403)
        assert "another page" in sentence(site.post(path, b"{}", ("origin", "http://evil.example")), 403)
        assert "open the page by" in sentence(site.post(path, b"{}", ("host", "evil.example")), 400)
    assert "open the page by" in sentence(site.get("/deployment", ("host", "evil.example:8080")), 400)


async def stream(app, path, chunks, headers):
    """Send chunks as they are asked for; returns the response and how many were taken."""
    taken, sent = 0, []

    async def receive():
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": next(chunks), "more_body": True}

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers]
    path, _, query = path.partition("?")
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": query.encode()}
    await asyncio.wait_for(app({**scope, "root_path": "", "headers": raw, "http_version": "1.1"}, receive, send), 20)
    return sent, taken


@pytest.mark.parametrize(("path", "most"), [("/drop?name=a.json", MAX_BYTES), ("/line", _MAX_LINE_BYTES)])
def test_a_body_that_is_too_large_is_refused_before_it_is_read_whole(path, most, site):
    chunk = bytes(max(most // 10, 1))
    headers = [HOST, ("x-perfmodel-token", site.token)]

    def endless():
        while True:
            yield chunk

    for length, fewest, limit in ((None, 10, 13), (100_000_000, 0, 1)):
        more = [] if length is None else [("content-length", str(length))]
        sent, taken = asyncio.run(stream(site.app, path, endless(), [*headers, *more]))
        assert sent[0]["status"] == 422
        assert f"expected at most {most:,}" in json.loads(sent[1]["body"])["error"]
        assert fewest <= taken <= limit
    sent, taken = asyncio.run(stream(site.app, path, endless(), [HOST]))
    assert (sent[0]["status"], taken) == (403, 0)  # not a byte is read of what may not be sent


def test_a_bug_is_a_sentence_and_its_trace_is_in_the_log(site, monkeypatch, caplog):
    def broken(*_):
        raise ValueError("secret of /home/somebody")

    monkeypatch.setattr(site.desk, "look", broken)
    said = sentence(site.get("/data/step/decode"), 500)
    assert "secret" not in said
    assert "secret" in caplog.text


def test_static_files_are_kept_by_their_tags(site):
    for path in _STATIC:
        response = site.get(f"/static/{path}")
        assert response.status == 200
        assert response.headers["x-content-type-options"] == "nosniff"
        again = site.get(f"/static/{path}", ("if-none-match", response.headers["etag"]))
        assert (again.status, again.body) == (304, b"")


def test_nothing_on_the_page_asks_another_server(site):
    """What the page's own script and style say; plotly's asks nobody unless maps are drawn, and the policy forbids."""
    for path in (each for each in _STATIC if each.endswith((".css", ".js")) and not each.startswith("vendor/")):
        text = site.get(f"/static/{path}").body.decode()
        assert not re.findall(r"https?://", text), path
        assert not re.findall(r"\beval\(|new Function|insertAdjacentHTML|document\.write|\.innerHTML\s*=", text), path


def test_data_is_what_the_command_prints(site):
    site.get("/step?batch=3")
    found = site.get("/data/step/decode?batch=3")
    asked = ["--model", "llama-3.1-8b", "--hardware", "h100-sxm-80gb", "--batch", "3", "--json"]
    assert found.json() == json.loads(CliRunner().invoke(app, ["explain", *asked]).stdout)
    assert "attachment" in found.headers["content-disposition"]
    site.get("/deployment?batch=3")
    both = site.get("/data/deployment/glance?batch=3").json()
    assert [each["command"].split()[1] for each in both] == ["memory", "explain"]


def test_a_long_state_is_shared_by_a_short_link_that_opens_it(site):
    query = "model=llama-3.1-8b&hardware=h100-sxm-80gb&" + "&".join(f"engine.field_{n}=1" for n in range(60))
    link = site.get(f"/share?{query}").json()["query"]
    assert len(link) < 0.5 * len(query)
    response = site.get(f"/step?{link}")
    assert (response.status, response.headers["location"]) == (307, f"/step?{query}")
    assert site.get("/share?rate=3").json() == {"query": "rate=3"}
    assert "cut off or changed" in sentence(site.get(f"/step?{link[:-5]}"), 422)


@pytest.mark.parametrize(
    "query",
    [
        "model=llama-3.1-70b&hardware=h200&engine.tensor_parallel_size=4&rate=3&ttft=1s&traffic=chat&cluster.replicas=2",
        "scenario=llama-3.1-8b-a100&rate=9&engine.quantization=fp8&traffic.input_tokens.max=4000&seed=7",
        "model=qwen3-0.6b&hardware=l40s&traffic.arrivals=%7Bprocess%3A+closed_loop%2C+concurrency%3A+8%7D",
        "scenario=kimi-k2.5-b200-agents&price.usd_per_gpu_hour=3",
    ],
)
def test_the_scenario_as_a_file_is_the_deployment_that_is_shown(site, query, tmp_path):
    response = site.get(f"/scenario?{query}")
    name = re.search('filename="(.+)"', response.headers["content-disposition"])[1]
    (tmp_path / name).write_bytes(response.body)
    shown = request_of(SimulateRequest, read_state(query)).load()
    file = load_scenario(tmp_path / name)
    hidden = {"traffic": {"name", "aliases", "source"}}
    assert file.model_dump(exclude=hidden) == shown.model_dump(exclude=hidden)


def test_a_changed_device_is_no_scenario_file(site):
    assert "copy the device's file" in sentence(site.get("/scenario?hardware=h100&hardware.hbm.bandwidth=2x"), 422)


def test_each_preset_is_a_scenario_of_the_list_and_opens(site):
    listed = json.loads(CliRunner().invoke(app, ["scenarios", "list", "--json"]).stdout)["scenarios"]
    html = site.get("/deployment").body.decode()
    names = re.findall(r'href="/deployment\?scenario=([^"]+)"', html)
    assert {"llama-3.1-70b-h100-tp4", "deepseek-v3-h200"} <= set(names) <= {row["name"] for row in listed}
    for name in names:
        memory = request_of(MemoryRequest, read_state(f"scenario={name}"))
        assert site.desk.answer(memory).shown is not None, name
    chosen = site.get("/deployment?scenario=deepseek-v3-h200").body.decode()
    assert re.search(r'scenario=deepseek-v3-h200"[^>]*aria-current="true"', chosen)


def test_a_load_tools_result_is_taken_for_one(site):
    def dropped(name, content):
        return site.post(f"/drop?name={name}&size={len(content)}", content).json()

    for name in ("vllm.json", "sglang.jsonl", "llama_bench.csv"):
        assert dropped(name, (BENCH / name).read_bytes())["field"] == "results", name
    assert dropped("config.json", b'{"model_type": "llama", "hidden_size": 64}')["field"] == "model"


def test_a_line_comes_in_and_goes_out(site):
    answer = site.post("/line?hardware=mi300x", b"vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 2").json()
    assert "hardware=mi300x" in answer["query"]
    lines = site.get(f"/serve-line?{answer['query']}").json()["lines"]
    assert "--tensor-parallel-size 2" in lines[-1]
    assert "unrecognized command" in sentence(site.post("/line", b"\xff\xfe"), 422)


def test_requests_that_are_no_http_that_a_page_sends(site):
    async def call(**more):
        return await Client(site.app).call("GET", "/deployment", **more)

    assert asyncio.run(call(headers=[("host", "localhost:[")])).status == 400
    assert asyncio.run(call(headers=[])).status == 400
    assert site.get("/deployment", ("accept", "\xff"), ("hx-target", "\xff" * 100)).status == 200
    assert site.get("/%FF%FE").status == 404
    assert site.get("/deployment?%FF").status == 422


def test_a_page_keeps_what_it_knows_of_an_address_and_names_the_rest(site):
    page = site.get("/step?model=llama-3.1-70b&hardwar=h200", HTML)
    assert page.status == 200
    text = page.body.decode()
    assert "The address has the unknown key &#39;hardwar&#39;, which is left out." in text
    assert "llama-3.1-70b" in text
