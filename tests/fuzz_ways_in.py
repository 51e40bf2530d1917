"""Inputs that nobody means of what people come with: results of load tests, command lines, conversations, checkpoints.

Files are those of tests/data, which the tools wrote, and vLLM's recipes, with a value, a word or some bytes changed.
"""

__all__ = ["WAYS_IN", "command_lines"]

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from fuzz_draws import JUNK, damaged, scale, spoil
from fuzz_scenarios import DENSE, CaseMakers, FuzzCase, as_yaml
from hypothesis import strategies as st

from perfmodel.files.yaml_loader import load_yaml

ROOT = Path(__file__).parents[1]
_BENCH = ROOT / "tests/data/bench"
_GIVEN = ("--hardware", "h100-sxm-80gb")


# ----------------------------------------------------------------------------------------------- results of load tools


@cache
def _results() -> dict[str, bytes]:
    """The files of load tools, the long ones with few of their requests."""
    files = {each.name: each.read_bytes() for each in sorted(_BENCH.rglob("*")) if each.suffix in _READ}
    report = json.loads(files["guidellm.json"])
    for benchmark in report["benchmarks"]:
        benchmark["requests"]["successful"] = benchmark["requests"]["successful"][:3]
    files["guidellm.json"] = json.dumps(report).encode()
    return files


_READ = (".json", ".jsonl", ".csv", ".txt")
# Of a log's line or a table's cell: what tools write where something went wrong; NaN so that an answer may quote it.
_WORDS = ("", "nAN", "-inf", "None", "null", "-1", "0", "1e400", "9" * 40, "x", ":", "::::", '"')


@st.composite
def _spoilt_result(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from(sorted(_results())))
    raw = _results()[name]
    what = draw(st.integers(0, 5))
    if what == 0:
        return name, damaged(draw, raw)
    if what == 1:
        return name, raw[: draw(st.integers(0, len(raw)))]
    if name.endswith((".csv", ".txt")):
        separator = b"," if name.endswith(".csv") else b":"
        lines = [line.split(separator) for line in raw.splitlines()]
        cells = lines[draw(st.integers(0, len(lines) - 1))]
        cells[draw(st.integers(0, len(cells) - 1))] = draw(st.sampled_from(_WORDS)).encode()
        return name, b"\n".join(separator.join(line) for line in lines)
    rows = [json.loads(line) for line in raw.splitlines()] if name.endswith(".jsonl") else [json.loads(raw)]
    at = draw(st.integers(0, len(rows) - 1))
    for _ in range(draw(st.integers(1, 2))):
        rows[at] = draw(st.sampled_from([spoil, spoil, _unequal, scale]))(draw, rows[at])
    return name, "\n".join(map(json.dumps, rows)).encode("utf-8", "surrogatepass")


def _unequal(draw: st.DrawFn, data: Any) -> Any:
    """One list of a result cut short, in another order, or with one entry in place of another."""
    lists = [each for each in _lists(data) if len(each) > 1]
    if lists:
        chosen = draw(st.sampled_from(lists))
        change: Callable[[], object] = draw(st.sampled_from([chosen.pop, chosen.reverse, chosen.clear]))
        change()
    return data


def _lists(data: Any) -> list[list[Any]]:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return ([data] if isinstance(data, list) else []) + [found for each in inner for found in _lists(each)]


@st.composite
def _load_test(draw: st.DrawFn) -> FuzzCase:
    files = dict([draw(_spoilt_result()) for _ in range(draw(st.sampled_from([1, 1, 1, 2])))])
    model = draw(st.sampled_from([(), ("--model", "llama-3.1-8b", "--traffic", "chat")]))
    flags = draw(st.sampled_from([(), ("--json",), ("--report", "b.html")]))
    return FuzzCase("load test", ("validate", "bench", *files, *_GIVEN, *model, *flags), files)


@st.composite
def _own_server(draw: st.DrawFn) -> FuzzCase:
    name, raw = draw(_spoilt_result())
    args = ("calibrate", "--from", name, "--engine", "vllm", "--name", "mine", *_GIVEN, "--model", "llama-3.1-8b")
    return FuzzCase("load test of one's own", args, {name: raw})


# ------------------------------------------------------------------------------------------------------ command lines


@cache
def _lines() -> tuple[str, ...]:
    found = load_yaml(ROOT / "tests/unit/specs/commands/recipes.yaml").data["recipes"]
    others = (
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --tp 2 --mem-fraction-static 0.8",
        "trtllm-serve meta-llama/Llama-3.1-8B-Instruct --tp_size 2 --extra_llm_api_options o.yaml",
        "vllm serve meta-llama/Llama-3.1-8B-Instruct\nguidellm benchmark --target http://x --rate-type constant "
        "--rate 4 --data prompt_tokens=256,output_tokens=128 --max-requests 40",
        "vllm serve meta-llama/Llama-3.1-8B-Instruct\naiperf profile --model x --streaming --concurrency 4 "
        "--request-count 14 --synthetic-input-tokens-mean 200 --output-tokens-mean 40",
        "vllm serve meta-llama/Llama-3.1-8B-Instruct\nvllm bench serve --dataset-name random --random-input-len 200 "
        "--random-output-len 40 --request-rate 10 --num-prompts 20",
    )
    return (*(each["text"] for each in found), *others)


_PUT_IN = (
    *("$(whoami)", "`id`", '"$X"', "${A:-b}", "${A", "$", "'", '"', "\\", "\\\n", "|", "&&", ";", ">out", "<<EOF", "&"),
    *("$((1+1))", "$((1/0))", "{a,b}", "*", "~", "#", "!", "A=1", "export A=$A", "-", "--", "=", "--=", "---", "-O3"),
    *("--tensor-parallel-size=0", "--tensor-parallel-size", "--tensor-parallel-size 2", "--max-num-seqs=-1", "-tp=2"),
    *("--max-model-len=1e999", "--max-model-len nan", "--max-num-seqs " + "9" * 40, "--gpu-memory-utilization 7"),
    *(
        "--kv-cache-dtype fp9",
        "--quantization=",
        "--compilation-config '{\"a\": '",
        "--speculative-config []",
        "--nope",
    ),
    *(
        "--speculative-config '{}'",
        "--hf-overrides '[[[[['",
        "--config c.yaml",
        "--request-rate 0",
        "--request-rate inf",
    ),
    *("--rate -1", "--num-prompts 0", "--model", "--model x/y/z", "\0", "é\u202e", "x" * 5000, "[" * 3000, "{" * 3000),
)


@st.composite
def command_lines(draw: st.DrawFn) -> str:
    """A server's command line with up to three mistakes, sometimes with variables that grow exponentially."""
    words = draw(st.sampled_from(_lines())).split(" ")
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(words) - 1))
        slip = draw(st.integers(0, 5))
        if slip < 2:
            words.insert(at, draw(st.sampled_from(_PUT_IN)))
        elif slip == 2:
            words[at] = draw(st.sampled_from(_PUT_IN))
        elif slip == 3:
            words.insert(draw(st.integers(0, len(words))), words[at])
        elif slip == 4 and len(words) > 1:
            del words[at]
        else:
            words[at : at + 2] = ["=".join(words[at : at + 2])]
    if draw(st.integers(0, 9)) == 0:
        doubling = "A=x\n" + "A=$A$A\n" * draw(st.sampled_from([1, 5, 60])) + "B=$A$A$A$A\n"
        return doubling + " ".join([*words, draw(st.sampled_from(["$A", "$B$B", "--model $A", "$((A+1))"]))])
    return " ".join(words)


@st.composite
def _command_line(draw: st.DrawFn) -> FuzzCase:
    line = draw(command_lines())
    flags = draw(st.sampled_from([(), ("--strict",), ("--rate", "2"), ("--traffic", "chat-sharegpt", "--rate", "2")]))
    files: dict[str, bytes] = {"o.yaml": b"max_batch_size: 8\n", "c.yaml": b"tensor-parallel-size: 2\n"}
    options = {"max_batch_size": 8, "kv_cache_config": {"free_gpu_memory_fraction": 0.8, "dtype": "fp8"}}
    files["o.yaml"] = as_yaml(spoil(draw, options)) if draw(st.booleans()) else as_yaml(options)
    form = draw(st.integers(0, 3))
    if form == 0:
        return FuzzCase("command line", ("new", line.replace("\0", ""), *_GIVEN, *flags), files)
    if form == 1:
        content = line.encode("utf-8", "surrogatepass")
        files["l.sh"] = damaged(draw, content) if draw(st.booleans()) else content
        return FuzzCase("command line, script", ("new", "l.sh", *_GIVEN, *flags), files)
    container = {"image": "vllm/vllm-openai:v0.30.0", "command": line.split(), "environment": {"A": "1", "B": None}}
    manifest: Any = {"services": {"server": container}}
    if form == 3:
        pod = {"containers": [{"image": "vllm/vllm-openai", "command": ["sh", "-c"], "args": [line]}]}
        manifest = {"apiVersion": "apps/v1", "kind": "Deployment"}
        manifest["spec"] = {"replicas": draw(st.sampled_from([2, *JUNK])), "template": {"spec": pod}}
    manifest = spoil(draw, manifest) if draw(st.booleans()) else manifest
    files["m.yaml"] = as_yaml(manifest)
    return FuzzCase("command line, manifest", ("new", "m.yaml", *_GIVEN, *flags), files)


# ------------------------------------------------------------------------------------------------------ conversations

_CONVERSATIONS = {
    "conversations": '{"arrival_s": 0, "system_tokens": 51, "turns": [{"input_tokens": 80, "output_tokens": 20, '
    '"pause_s": 4}, {"input_tokens": 8, "output_tokens": 9}]}\n'
    '{"arrival_s": 2, "turns": [{"input_tokens": 8, "output_tokens": 2}]}\n',
    "sharegpt": '{"conversations": [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]}\n',
    "aiperf": '{"session_id": "a", "turns": [{"text": "one", "output_length": 20, "delay": 4}, {"text": "more"}]}\n',
    "guidellm": '{"system_prompt": "be", "prompt_0": "one", "output_tokens_count_0": 20, "prompt_1": "two"}\n',
}


@st.composite
def _recorded_conversations(draw: st.DrawFn) -> FuzzCase:
    kind = draw(st.sampled_from(sorted(_CONVERSATIONS)))
    raw = _CONVERSATIONS[kind].encode()
    if draw(st.integers(0, 3)):
        rows = [json.loads(line) for line in raw.splitlines()]
        at = draw(st.integers(0, len(rows) - 1))
        rows[at] = draw(st.sampled_from([spoil, spoil, scale, _unequal]))(draw, rows[at])
        as_list = draw(st.booleans())
        raw = json.dumps(rows).encode() if as_list else "\n".join(map(json.dumps, rows)).encode()
    else:
        raw = damaged(draw, raw)
    traffic: dict[str, Any] = {"trace": {"path": "t.txt", "format": kind}}
    if kind != "conversations":
        traffic |= {
            "arrivals": {"rate": 2.0},
            "output_tokens": {"distribution": "fixed", "value": 16},
            "conversations": {"think_time": {"mean_s": 1}},
        }
    return FuzzCase(
        "conversations",
        ("simulate", "s.yaml", "--json"),
        {"s.yaml": as_yaml(DENSE | {"traffic": traffic}), "t.txt": raw},
    )


# -------------------------------------------------------------------------------------------------------- checkpoints

_MODELOPT: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.33"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
_FORMATS: tuple[dict[str, Any], ...] = (
    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "awq", "bits": 4, "group_size": 128},
    {"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*"], "config_groups": {"group_0": {
        "weights": {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}, "input_activations": None}}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": {
        "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}},
)  # fmt: skip


_IGNORED = (
    "(a+)+$",
    "(a|aa)*$",
    "(.|..)" * 60 + "!",
    ".*.*.*.*.*!",
    "(?:a?){9}",
    "(",
    "[",
    "\\\\",
    "(?=a)*",
    "a" * 501,
)


@st.composite
def _checkpoint(draw: st.DrawFn) -> FuzzCase:
    """A folder as a checkpoint has it: its configuration, its number formats there or beside it."""
    config = copy.deepcopy(load_yaml(ROOT / "workloads/models/llama-3.1-8b.yaml").data["config"])
    beside: Any = copy.deepcopy(_MODELOPT)
    if draw(st.booleans()):
        config["quantization_config"] = copy.deepcopy(draw(st.sampled_from(_FORMATS)))
        if draw(st.integers(0, 2)) == 0:
            words = st.one_of(st.sampled_from(_IGNORED), st.text("a.*+?()[]|{}^$\\\\d01,:", max_size=30))
            config["quantization_config"]["ignore"] = [f"re:{draw(words)}", draw(words)] * draw(
                st.sampled_from([1, 99])
            )
        else:
            config["quantization_config"] = spoil(draw, config["quantization_config"])
        files = {}
    else:
        beside = draw(st.sampled_from([spoil, scale]))(draw, beside)
        raw = json.dumps(beside).encode()
        files = {"m/hf_quant_config.json": damaged(draw, raw) if draw(st.booleans()) else raw}
    if draw(st.integers(0, 4)) == 0:
        files["m/generation_config.json"] = json.dumps(
            {"do_sample": True, "top_p": draw(st.sampled_from(JUNK))}
        ).encode()
    files["m/config.json"] = json.dumps(config).encode()
    files["s.yaml"] = yaml.safe_dump({**DENSE, "model": "./m", "hardware": "b200-sxm"}).encode()
    command = draw(st.sampled_from([("models", "show", "./m"), ("memory", "s.yaml"), ("simulate", "s.yaml", "--json")]))
    return FuzzCase("checkpoint", command, files)


WAYS_IN: CaseMakers = {
    "load test": (_load_test, 6),
    "load test of one's own": (_own_server, 1),
    "command line": (_command_line, 5),
    "conversations": (_recorded_conversations, 3),
    "checkpoint": (_checkpoint, 2),
}
