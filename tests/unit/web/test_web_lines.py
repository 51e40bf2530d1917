"""Command lines in and out."""

import json
import shlex

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.commands.runs import SimulateRequest
from perfmodel.errors import SpecError
from perfmodel.web.service import read_line, serve_line
from perfmodel.web.state import PageState, read_state, request_of

SERVE = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
LINES = [
    SERVE,
    f"{SERVE} --tensor-parallel-size 4 --max-num-seqs 64 --kv-cache-dtype fp8 --gpu-memory-utilization 0.85",
    f"{SERVE} -tp 2 --no-enable-prefix-caching --max-model-len 32k --enforce-eager --quantization fp8",
    f"{SERVE} --speculative-config '"
    + json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3})
    + "'",
    "vllm serve Qwen/Qwen3-30B-A3B --enable-expert-parallel --data-parallel-size 2",
    f"{SERVE}\nvllm bench serve --dataset-name random --random-input-len 512 --random-output-len 64 --request-rate 4 "
    "--num-prompts 100 --seed 7",
]


def scenario_of(state):
    question = request_of(SimulateRequest, state)
    return question.load()


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_goes_out_and_comes_in_is_the_same_deployment(line, tmp_path):
    state = read_line(line, read_state("hardware=a100-sxm4-80gb"), tmp_path)[0]
    assert read_state(state.query) == state
    first = scenario_of(state)
    (*_, out) = serve_line(state, tmp_path)
    second = scenario_of(read_line(out, read_state("hardware=a100-sxm4-80gb"), tmp_path)[0])
    assert first.engine.model_dump() == second.engine.model_dump()
    assert first.model.name == second.model.name
    assert shlex.split(out)[:2] == ["vllm", "serve"]


def test_a_load_test_comes_with_its_seed_and_rate(tmp_path):
    scenario = scenario_of(read_line(LINES[-1], read_state("hardware=h100"), tmp_path)[0])
    assert scenario.traffic.arrivals.rate == 4
    assert scenario.seed == 7


@pytest.mark.parametrize("word", ["true", "8", "1e5", "null", "[1, 2]", "a: b", "- x", "#", "'"])
def test_texts_that_read_like_something_else_stay_texts(word):
    from perfmodel.files.yaml_loader import parse_value
    from perfmodel.web.service import _text

    assert parse_value(_text(word), "here") == word


def test_the_device_is_the_page_s_own(tmp_path):
    assert read_line(SERVE, read_state("hardware=mi300x"), tmp_path)[0].get("hardware") == "mi300x"
    assert read_line(SERVE, PageState(), tmp_path)[0].get("hardware") == "h100-sxm-80gb"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "unrecognized command"),
        ("rm -rf /", "unrecognized command"),
        (f"{SERVE} --max-nun-seqs 8", "max-num-seqs"),
        (f"{SERVE} --config /etc/passwd", "names a file"),
        (f"{SERVE} --config ~/x.yaml", "no such file"),
        (f"{SERVE} --config ../x.yaml", "names a file"),
        ("vllm serve /etc/passwd", "path"),
        ("vllm serve $(cat /etc/passwd)", "output of a command"),
        (f"{SERVE}\nvllm bench serve --dataset-name sharegpt --dataset-path /etc/passwd", ""),
    ],
)
def test_a_line_that_cannot_be_is_answered_in_one_sentence(line, said, tmp_path, monkeypatch):
    import builtins

    opened, real = [], builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda path, *more, **kind: opened.append(str(path)) or real(path, *more, **kind)
    )
    try:
        read_line(line, PageState(), tmp_path)
    except SpecError as error:
        answer = str(error)
    else:
        answer = ""
    assert said in answer
    assert "\n" not in answer
    assert "root:" not in answer
    assert not [path for path in opened if path.startswith("/etc")]
