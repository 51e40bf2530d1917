"""The emulator answers as the real server did whose answers are recorded in measurements/surface, but for their values.

`python benchmarks/witness/surface.py` makes the recording; nothing of vLLM is needed to compare with it.
"""

import gzip
import importlib.util
import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml
from asgi_client import Client
from virtual_time import run

from perfmodel.serve import Emulator
from perfmodel.serve.http import build_app
from perfmodel.serve.metrics import Metrics
from perfmodel.serve.settings import ServerSettings
from perfmodel.specs import load_scenario

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "measurements" / "surface"


def loaded(name):
    """The module of the witness that has this name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "witness" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shapes = loaded("surface_shapes")
SMALL = (
    "engine.max_model_len=512",
    "engine.max_num_seqs=16",
    "traffic.input_tokens={distribution: fixed, value: 20}",
    "traffic.output_tokens={distribution: fixed, value: 20}",
)
RECORDED = json.loads(gzip.decompress((FOLDER / "vllm_0.30.0.json.gz").read_bytes()))
KNOWN = yaml.safe_load((FOLDER / "known_differences.yaml").read_text(encoding="utf-8"))


async def sent(client, case):
    body = case["body"]
    data = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    headers = [tuple(pair) for pair in case["headers"]]
    if body is not None and "content-type" not in dict(headers):
        headers.append(("content-type", "application/json"))
    response = await client.call(case["method"], case["path"], data, [*headers, ("content-length", str(len(data)))])
    is_head = case["method"] == "HEAD"  # whose body a server leaves out
    answer = shapes.Answer(response.status, response.headers, b"" if is_head else response.body)
    shape = shapes.shape_of_answer(answer, case["leaves_after"] is not None)
    if case["path"] == "/openapi.json" and response.status == 200:
        shape["body"] = shapes.paths_of(response.json())
    return shape


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The shapes of our answers to all recorded requests, by name, and the page of metrics after them."""

    tokenizer = loaded("surface_model").write_model(tmp_path_factory.mktemp("model")) / "tokenizer.json"
    settings = ServerSettings(served_names=("surface",), tokenizer_file=tokenizer)

    async def asked():
        emulator = Emulator(load_scenario("llama-3.1-8b-a100", SMALL))
        metrics = Metrics(emulator, "surface")
        client = Client(build_app(emulator, settings, metrics))
        emulator.start()
        found = {case["name"]: await sent(client, case) for case in RECORDED["cases"]}
        page = (await client.get("/metrics")).body.decode()
        emulator.stop()
        return found, page

    return run(asked())


def reason(kind, field, name):
    """Why `name` is known to differ; None: it is not."""
    return next((row["why"] for row in KNOWN[kind] if any(fnmatchcase(name, each) for each in row[field])), None)


def test_answers_differ_where_it_is_known_and_nowhere_else(answers):
    unknown, equal, known = [], 0, set()
    for case in RECORDED["cases"]:
        name = case["name"]
        found = list(shapes.differences(case["answer"], answers[0][name]))
        why = reason("answers", "requests", name)
        if not found:
            equal += 1
        elif why is None:
            unknown.append((name, *found[0]))
        else:
            known.add(why)
    assert unknown == [], unknown
    assert known == {row["why"] for row in KNOWN["answers"]}, "listed, but no longer different"
    assert equal >= 430


def test_metrics_have_the_families_types_labels_and_buckets_of_the_real_server(answers):
    found = shapes.differences(RECORDED["metrics"], shapes.metric_families(answers[1]))
    unknown = [pair for pair in found if reason("metrics", "families", pair[0][1:].partition(".")[0]) is None]
    assert unknown == [], unknown


def test_counters_agree_with_what_was_sent():
    """Of the real server, too, when it was recorded."""
    assert all(counted == expected for counted, expected in RECORDED["laws"].values())


def test_each_known_difference_is_in_the_page_for_readers():
    text = " ".join((ROOT / "docs" / "emulator.md").read_text(encoding="utf-8").split())
    for row in [*KNOWN["answers"], *KNOWN["metrics"]]:
        assert row["why"] in text, row["why"]


def test_a_planted_difference_is_found():
    case = RECORDED["cases"][0]["answer"]
    assert list(shapes.differences(case, {**case, "status": 418})) == [(".status", "expected 200, got 418")]
    chunk = {"events": [{"id": "str"}, "[DONE]"]}
    assert list(shapes.differences(chunk, {"events": ["[DONE]", {"id": "str"}]}))
