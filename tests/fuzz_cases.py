"""Inputs that nobody means: the project's own schemas at their extremes, single slips, damaged files of every kind.

A case is a command line and the files that it names. Scenarios, devices and traffic are drawn from what `perfmodel
schema` says they may be, and then at most one thing is spoilt; other files are good ones with a few bytes or values
changed. Work that is merely long (a million requests) is cut short: it is not what is looked for.
"""

__all__ = ["KINDS", "FuzzCase", "fuzz_cases"]

import copy
import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_draws import JUNK, damaged, draw_into, places_of, scale, spoil
from fuzz_files import FILES
from fuzz_questions import QUESTIONS
from fuzz_requests import REQUESTS
from fuzz_scenarios import DENSE, SCENARIOS, CaseMakers, FuzzCase, as_yaml, cut_short
from fuzz_ways_in import WAYS_IN
from hypothesis import strategies as st
from typer.testing import CliRunner

from perfmodel.files.yaml_loader import load_yaml
from perfmodel.specs import list_names

ROOT = Path(__file__).parents[1]
_COMMANDS = (("simulate", "--json"), ("simulate",), ("memory", "--json"), ("explain",), ("roofline", "--out", "o.html"))


# ---------------------------------------------------------------------------------------------------- the kinds


@st.composite
def _valid_scenario(draw: st.DrawFn) -> FuzzCase:
    data = copy.deepcopy(draw(st.sampled_from(SCENARIOS)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))):
        draw_into(draw, data, "scenario")
    for _ in range(draw(st.integers(0, 2))):
        data = scale(draw, data)
    command, *flags = draw(st.sampled_from(_COMMANDS))
    return FuzzCase("scenario, extreme", (command, "s.yaml", *flags), {"s.yaml": as_yaml(cut_short(data))})


@st.composite
def _spoilt_scenario(draw: st.DrawFn) -> FuzzCase:
    data = spoil(draw, copy.deepcopy(draw(st.sampled_from(SCENARIOS))))
    command, *flags = draw(st.sampled_from(_COMMANDS))
    return FuzzCase("scenario, one slip", (command, "s.yaml", *flags), {"s.yaml": as_yaml(cut_short(data))})


@st.composite
def _spoilt_text(draw: st.DrawFn) -> FuzzCase:
    raw = damaged(draw, as_yaml(draw(st.sampled_from(SCENARIOS))))
    return FuzzCase("scenario, damaged text", ("memory", "s.yaml"), {"s.yaml": raw})


@st.composite
def _override(draw: st.DrawFn) -> FuzzCase:
    places = [".".join(map(str, place)) for place in places_of(draw(st.sampled_from(SCENARIOS)))]
    hardware = ["hardware.hbm.bandwidth", "hardware.bf16", "hardware.nvlink", "hardware.price", "hardware.peak_flops"]
    path = draw(st.sampled_from([*places, *hardware, "plan.finalists", "x", "", ".", "cluster.pools.0.engine"]))
    value = draw(st.one_of(st.sampled_from(JUNK).map(str), st.sampled_from(["0x", "1e300x", "2x", "0.5x", "{", "[1"])))
    name = "s.yaml"
    text = f"{path}={value}".replace("\0", "0")
    return FuzzCase("--set", ("memory", name, "--set", text), {name: as_yaml(draw(st.sampled_from(SCENARIOS)))})


_TRACES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.99,39,9\n",
    "mooncake": '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    '{"timestamp": 300, "input_length": 90, "output_length": 7, "hash_ids": [1]}\n',
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n45,ChatGPT,1087,230\n",
    "csv": "arrival,input,output\n0.5,40,6\n1.5,90,3\n",
    "jsonl": '{"arrival_s": 0.5, "input_tokens": 40, "output_tokens": 6, "block_hashes": [3, 4], "session_id": "a"}\n'
    '{"arrival_s": 1.5, "input_tokens": 90, "output_tokens": 3, "hash_block_size": 16}\n',
}


@st.composite
def _trace(draw: st.DrawFn) -> FuzzCase:
    name = draw(st.sampled_from(sorted(_TRACES)))
    raw = _TRACES[name].encode()
    if name in ("mooncake", "jsonl") and draw(st.booleans()):
        rows = [json.loads(line) for line in raw.splitlines()]
        raw = "\n".join(json.dumps(spoil(draw, row)) for row in rows).encode()
    elif draw(st.booleans()):
        lines = raw.decode().splitlines()
        cells = lines[-1].split(",")
        cells[draw(st.integers(0, len(cells) - 1))] = str(draw(st.sampled_from(JUNK)))
        raw = "\n".join([*lines[:-1], ",".join(cells)]).encode("utf-8", "surrogateescape")
    else:
        raw = damaged(draw, raw)
    data = DENSE | {
        "traffic": {"trace": {"path": "t.txt", "format": name, "speedup": draw(st.sampled_from([1.0, 1e-12, 1e15]))}}
    }
    return FuzzCase("trace", ("simulate", "s.yaml", "--json"), {"s.yaml": as_yaml(data), "t.txt": raw})


@cache
def _configs() -> tuple[dict[str, Any], ...]:
    names = (
        "llama-3.1-8b",
        "mixtral-8x7b",
        "deepseek-v3",
        "gpt-oss-20b",
        "nemotron-h-56b",
        "qwen3.5-27b",
        "llama-3.1-70b-fp8",
    )
    return tuple(load_yaml(ROOT / f"workloads/models/{name}.yaml").data["config"] for name in names)


@st.composite
def _config(draw: st.DrawFn) -> FuzzCase:
    data = copy.deepcopy(draw(st.sampled_from(_configs())))
    for _ in range(draw(st.integers(1, 2))):
        data = draw(st.sampled_from([spoil, scale, scale]))(draw, data)
    raw = json.dumps(data).encode()
    raw = damaged(draw, raw) if draw(st.integers(0, 4)) == 0 else raw
    return FuzzCase("config.json", *_on_model(draw, "config.json", raw))


def _on_model(draw: st.DrawFn, name: str, raw: bytes) -> tuple[tuple[str, ...], dict[str, bytes]]:
    scenario = {**DENSE, "model": f"./{name}", "hardware": "b200-sxm", "engine": {"tensor_parallel_size": 8}}
    files = {name: raw, "s.yaml": as_yaml(scenario)}
    command = draw(
        st.sampled_from([("models", "show", f"./{name}"), ("memory", "s.yaml"), ("simulate", "s.yaml", "--json")])
    )
    return command, files


@st.composite
def _gguf(draw: st.DrawFn) -> FuzzCase:
    sizes = {"block_count": 4, "context_length": 4096, "embedding_length": 512, "feed_forward_length": 1408}
    heads = {"attention.head_count": 8, "attention.head_count_kv": 2}
    meta: dict[str, Any] = {f"llama.{key}": value for key, value in (sizes | heads).items()}
    for key in draw(st.lists(st.sampled_from(sorted(meta)), max_size=2)):
        meta[key] = draw(st.sampled_from([0, 1, 2, 3, 511, 2**16, 2**31, 2**32 - 1]))
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (512, 8192), "output.weight": (512, 8192)}
    shapes |= {"blk.0.attn_q.weight": (512, 512), "blk.0.ffn_down.weight": (1408, 512)}
    for name in draw(st.lists(st.sampled_from(sorted(shapes)), max_size=2)):
        shapes[name] = draw(st.sampled_from([(), (0,), (1,), (0, 0), (512, 0), (2**63, 2**63), (2**62,) * 8]))
    text = lambda name: struct.pack("<Q", len(name)) + name.encode()  # noqa: E731
    raw = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(meta) + 1)
    raw += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    for key, value in meta.items():
        depth = draw(st.sampled_from([0, 0, 0, 0, 0, 1, 2, 5, 5000]))  # of lists with one entry
        kinds = (9, *[9] * (depth - 1), 4) if depth else (4,)
        raw += text(key) + struct.pack("<I", kinds[0]) + b"".join(struct.pack("<IQ", kind, 1) for kind in kinds[1:])
        raw += struct.pack("<I", value)
    for name, shape in shapes.items():
        raw += text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, draw(st.sampled_from([0, 12, 30, 99])), 0
        )
    raw = damaged(draw, raw, 2) if draw(st.booleans()) else raw
    return FuzzCase("GGUF header", *_on_model(draw, "m.gguf", raw))


@st.composite
def _safetensors(draw: st.DrawFn) -> FuzzCase:
    shapes = {
        "model.embed_tokens.weight": [8192, 512],
        "lm_head.weight": [8192, 512],
        "model.layers.0.self_attn.q_proj.weight": [512, 512],
        "model.layers.0.self_attn.k_proj.weight": [128, 512],
        "model.layers.0.mlp.gate_proj.weight": [1408, 512],
    }
    header: Any = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 1]} for name, shape in shapes.items()}
    for _ in range(draw(st.integers(0, 2))):
        header = spoil(draw, header)
    text = json.dumps(header).encode()
    length = draw(st.sampled_from([len(text), len(text), len(text), 0, 10**9, 2**63]))
    raw = struct.pack("<Q", length) + text
    raw = damaged(draw, raw) if draw(st.integers(0, 3)) == 0 else raw
    return FuzzCase("safetensors header", *_on_model(draw, "m.safetensors", raw))


@st.composite
def _hardware(draw: st.DrawFn) -> FuzzCase:
    name = draw(st.sampled_from(list_names("hardware")))
    data = copy.deepcopy(load_yaml(ROOT / f"hardware_specs/{name}.yaml").data)
    for _ in range(draw(st.integers(0, 2))):
        draw_into(draw, data, "hardware")
    for _ in range(draw(st.integers(0, 3))):
        data = scale(draw, data)
    data = spoil(draw, data) if draw(st.integers(0, 3)) == 0 else data
    files = {"h.yaml": as_yaml(data), "s.yaml": as_yaml({**DENSE, "hardware": "./h.yaml"})}
    commands = (
        ("hardware", "show", "h.yaml"),
        ("simulate", "s.yaml", "--json"),
        ("roofline", "s.yaml", "--out", "o.html"),
    )
    return FuzzCase("hardware file", draw(st.sampled_from(commands)), files)


@cache
def _results() -> tuple[Any, ...]:
    from perfmodel.cli import app

    few = ("--json", "--set", "traffic.num_requests=10")
    commands = [("simulate", "llama-3.1-8b-a100"), ("memory", "llama-3.1-8b-a100"), ("explain", "llama-3.1-8b-a100")]
    return tuple(json.loads(CliRunner().invoke(app, [*command, *few]).stdout) for command in commands)


@st.composite
def _result(draw: st.DrawFn) -> FuzzCase:
    one = draw(st.sampled_from(_results()))
    other = draw(st.sampled_from([spoil, scale]))(draw, copy.deepcopy(one))
    raw = json.dumps(other).encode()
    raw = damaged(draw, raw) if draw(st.integers(0, 4)) == 0 else raw
    flags = draw(st.sampled_from([(), ("--json",)]))
    files = {"a.json": json.dumps(one).encode(), "b.json": raw}
    return FuzzCase("result file", ("compare", "a.json", "b.json", *flags), files)


KINDS: CaseMakers = {
    "scenario, extreme": (_valid_scenario, 6),
    "scenario, one slip": (_spoilt_scenario, 5),
    "scenario, damaged text": (_spoilt_text, 1),
    "--set": (_override, 2),
    "trace": (_trace, 2),
    "config.json": (_config, 3),
    "GGUF header": (_gguf, 1),
    "safetensors header": (_safetensors, 1),
    "hardware file": (_hardware, 3),
    "result file": (_result, 1),
    **FILES,
}
_FAMILIES = {"inputs": KINDS, "questions": QUESTIONS, "ways-in": WAYS_IN, "requests": REQUESTS}
_SHARES = {"inputs": 8, "questions": 1, "ways-in": 6, "requests": 5}  # of all: a question takes a second


def fuzz_cases(kinds: str = "all") -> st.SearchStrategy[FuzzCase]:
    """Cases of some kinds, by their weights.

    kinds: inputs (of one scenario) | questions (of many) | ways-in | requests (over HTTP) | all
    """
    if kinds == "all":
        families = [family for family, share in _SHARES.items() for _ in range(share)]
        return st.sampled_from(families).flatmap(fuzz_cases)
    makers = [make for make, weight in _FAMILIES[kinds].values() for _ in range(weight)]
    return st.sampled_from(makers).flatmap(lambda make: make())
