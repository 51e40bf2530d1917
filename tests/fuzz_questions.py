"""Inputs that nobody means of commands that ask many scenarios: plans, what-ifs, studies; and of measurements.

A question is small by itself (some requests, one finalist, few values), so that what takes long or ends in anything but
an answer or a sentence does so because of what was drawn.
"""

__all__ = ["QUESTIONS"]

import copy
import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fuzz_draws import JUNK, damaged, draw_into, places_of, scale, spoil
from fuzz_scenarios import SCENARIOS, CaseMakers, FuzzCase, as_yaml, cut_short
from hypothesis import strategies as st

from perfmodel.files.yaml_loader import load_yaml

ROOT = Path(__file__).parents[1]
_SLO = {"ttft_ms": 2000, "tpot_ms": 100}
_SPACE = {"max_num_seqs": [8], "max_num_batched_tokens": [2048]}
_PLAN = {"finalists": 1, "seeds": 1, "num_requests": 20, "space": _SPACE}
_MAX_FINALISTS, _MAX_SEEDS, _MAX_REQUESTS, _MAX_VALUES = 2, 2, 40, 6


# ------------------------------------------------------------------------------------------------------ questions


def _smaller(plan: Any) -> Any:
    """A plan's block without work that is only long; what is refused for its size stays."""
    if isinstance(plan, dict):
        for name, most in (("finalists", _MAX_FINALISTS), ("seeds", _MAX_SEEDS), ("num_requests", _MAX_REQUESTS)):
            value = plan.get(name)
            if isinstance(value, str) or (isinstance(value, int | float) and most < value <= 10_000):
                plan[name] = most
    return plan


@st.composite
def _plan(draw: st.DrawFn) -> FuzzCase:
    data = copy.deepcopy(draw(st.sampled_from(SCENARIOS)))
    data |= {"slo": dict(_SLO), "plan": copy.deepcopy(_PLAN)}
    if data["traffic"].get("arrivals", {}).get("process") == "burst":
        data["plan"]["objective"] = draw(st.sampled_from(["cheapest_job", "shortest_job"]))
    for _ in range(draw(st.integers(0, 2))):
        draw_into(draw, data["plan"], "scenario", ("plan",))
    slip = draw(st.integers(0, 5))
    if slip == 0:
        data["plan"] = spoil(draw, data["plan"])
    elif slip == 1:
        data = scale(draw, data)
    elif slip == 2:
        draw_into(draw, data, "scenario")
    if isinstance(data, dict):
        data["plan"] = _smaller(data.get("plan"))
    flags = draw(st.sampled_from([(), ("--json",), ("--report", "p.md"), ("--export", "out")]))
    args = ("plan", "s.yaml", "--store", "points.sqlite", *flags)
    return FuzzCase("plan", args, {"s.yaml": as_yaml(cut_short(data))})


_METRICS = ("output_throughput", "mean_tpot_ms", "step_ms", "usd_total", "nothing")
_RESOURCES = ("hardware.hbm.bandwidth", "hardware.bf16", "hardware.power_cap_w", "engine.tensor_parallel_size")
_RANGES = ("0.5x..2x", "0.5x..2x:3", "1..8", "8..1", "1..1", "0..1", "-1..1:3", "1..1e300", "1k..2k:3", "1,2,4", "a,b")
_ASKED = ("engine.max_num_seqs=4,8", "hardware.hbm.bandwidth=0.5x..2x:3", "traffic.arrivals.rate=1,4", "seed=1,2")
_ALTERNATIVES = ("engine.quantization=fp8", "engine.max_num_seqs=2 seed=1", "x=1", "'", "hardware=l40s", "cluster={}")


@st.composite
def _whatif(draw: st.DrawFn) -> FuzzCase:
    data = copy.deepcopy(draw(st.sampled_from(SCENARIOS)))
    data["traffic"]["num_requests"] = 6
    places = [".".join(map(str, place)) for place in places_of(data)]
    args = ["whatif", "s.yaml", "--metric", draw(st.sampled_from(_METRICS))]
    values = st.lists(st.sampled_from(JUNK).map(str), min_size=1, max_size=_MAX_VALUES).map(",".join)
    args += ["--vary", draw(st.sampled_from(_ASKED))]
    for _ in range(draw(st.integers(0, 1))):
        path = draw(st.sampled_from([*places, *_RESOURCES, "hardware", "model", "step.batch", "step.context", ""]))
        args += ["--vary", f"{path}={draw(st.one_of(st.sampled_from(_RANGES), values))}".replace("\0", "0")]
    if draw(st.integers(0, 3)) == 0:
        args += ["--against", draw(st.sampled_from(_ALTERNATIVES))]
    args += draw(st.sampled_from([[], ["--json"], ["--grid"], ["--set", "step.batch=4"], ["--report", "w.html"]]))
    return FuzzCase("whatif", tuple(args), {"s.yaml": as_yaml(cut_short(data))})


@st.composite
def _study(draw: st.DrawFn) -> FuzzCase:
    small = {**copy.deepcopy(draw(st.sampled_from(SCENARIOS))), "name": "small"}
    small["traffic"]["num_requests"] = 6
    study: dict[str, Any] = {
        "study": "small",
        "question": "Does it end?",
        "base": small,
        "variants": {"as it is": {}, "few": {"engine.max_num_seqs": 2}},
        "baseline": "as it is",
        "axes": {"rate": {"field": "traffic.arrivals.rate", "values": [1, 4]}},
        "metrics": ["mean_tpot_ms", "output_throughput"],
        "plots": [{"kind": "lines", "metric": "mean_tpot_ms"}, {"kind": "bars", "metric": "output_throughput"}],
    }
    for _ in range(draw(st.integers(0, 2))):
        draw_into(draw, study, "study")
    study = draw(st.sampled_from([lambda _, data: data, spoil, scale]))(draw, study)
    if isinstance(study, dict) and isinstance(study.get("base"), dict):
        study["base"] = cut_short(study["base"])
    args = ("study", "s.yaml", *draw(st.sampled_from([("--json",), ("--quick",), ("--report", "s.md")])))
    return FuzzCase("study", args, {"s.yaml": as_yaml(study)})


# --------------------------------------------------------------------------------------------------- measurements


@cache
def _examples(kind: str, language: str) -> tuple[str, ...]:
    """The examples of docs/measurements.md."""
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page.split(f"\n## {kind}\n")[1], flags=re.MULTILINE)[0]
    return tuple(re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL))


def _spoilt_csv(draw: st.DrawFn, text: str) -> bytes:
    """A table with one cell replaced, one column misspelt, or some bytes changed."""
    lines = [line.split(",") for line in text.splitlines()]
    what = draw(st.integers(0, 3))
    if what == 0:
        return damaged(draw, text.encode())
    row = 0 if what == 1 else draw(st.integers(1, len(lines) - 1))
    lines[row][draw(st.integers(0, len(lines[row]) - 1))] = str(draw(st.sampled_from(JUNK)))
    return "\n".join(map(",".join, lines)).encode("utf-8", "surrogateescape")


def _spoilt_json(draw: st.DrawFn, text: str) -> bytes:
    data = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        data = draw(st.sampled_from([spoil, spoil, scale]))(draw, data)
    raw = json.dumps(data).encode()
    return damaged(draw, raw) if draw(st.integers(0, 4)) == 0 else raw


@st.composite
def _recorded(draw: st.DrawFn) -> FuzzCase:
    kind = draw(st.sampled_from(["serving", "steady-state", "throughput", "per-request"]))
    args = ("validate", kind, *draw(st.sampled_from([(), ("--json",)])))
    if kind == "serving":
        files = {"r.json": _spoilt_json(draw, draw(st.sampled_from(_examples(kind, "json"))))}
    elif kind == "per-request":
        meta, rows = _examples(kind, "json")[0], _examples(kind, "csv")[0]
        which = draw(st.booleans())
        files = {
            "rtx4090-any/e2e/meta.json": _spoilt_json(draw, meta) if which else meta.encode(),
            "rtx4090-any/e2e/requests.csv": rows.encode() if which else _spoilt_csv(draw, rows),
        }
    else:
        files = {"r.csv": _spoilt_csv(draw, draw(st.sampled_from(_examples(kind, "csv"))))}
    place = next(iter(files)).partition("/")[0]
    return FuzzCase("recorded runs", (*args, place), files)


@cache
def _published() -> tuple[dict[str, Any], ...]:
    folder = ROOT / "workloads/scenarios/published"
    return tuple(load_yaml(path).data for path in sorted(folder.glob("*.yaml"))[::8])


@st.composite
def _figure(draw: st.DrawFn) -> FuzzCase:
    data = copy.deepcopy(draw(st.sampled_from(_published())))
    for _ in range(draw(st.integers(0, 2))):
        draw_into(draw, data, "scenario")
    data = draw(st.sampled_from([spoil, scale]))(draw, data)
    args = ("validate", "published", *draw(st.sampled_from([(), ("--json",)])), "f.yaml")
    return FuzzCase("published figure", args, {"f.yaml": as_yaml(cut_short(data) if isinstance(data, dict) else data)})


_COLUMNS: dict[str, dict[str, Any]] = {
    "gemm": {"m": 64, "n": 4096, "k": 4096, "gemm_dtype": "bfloat16"},
    "generation_attention": {"batch_size": 8, "isl": 1, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                             "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "step": 1000, "window_size": 0},
    "moe": {"moe_dtype": "bfloat16", "num_tokens": 64, "hidden_size": 2048, "inter_size": 768, "topk": 8,
            "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 1, "distribution": "power_law_1.2"},
    "nccl": {"nccl_dtype": "half", "num_gpus": 8, "message_size": 1048576, "op_name": "all_reduce"},
    "x": {},
}  # fmt: skip


def _parquet(columns: dict[str, Any], codec: str) -> bytes:
    import pyarrow
    import pyarrow.parquet

    target = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), target, compression=codec)
    return target.getvalue()


@st.composite
def _tables(draw: st.DrawFn) -> FuzzCase:
    op = draw(st.sampled_from(sorted(_COLUMNS)))
    row = {**_COLUMNS[op], "kernel_source": "any", "engine_version": "vllm 0.14", "latency_ms": 0.05}
    columns = {name: [value] * 12 for name, value in row.items()}
    columns["latency_ms"] = list(np.linspace(0.05, 0.2, 12))
    slip = draw(st.integers(0, 4))
    name = draw(st.sampled_from(sorted(columns)))
    if slip == 0:
        del columns[name]
    elif slip in (1, 2):
        value = draw(st.sampled_from([0, -1, 2**62, float("nan"), float("inf"), 1e300, "x", "", None, True, [1]]))
        columns[name] = [value] * 12
    raw = _parquet(columns, draw(st.sampled_from(["none", "snappy", "zstd"])))
    raw = damaged(draw, raw) if slip > 3 else raw
    system = draw(st.sampled_from(["h100_sxm", "a100_sxm", "nothing"]))
    command = draw(st.sampled_from([("validate", "operators", "ops"), ("calibrate", "--from", "ops", "--out", "c")]))
    return FuzzCase("kernel table", (*command, "--json"), {f"ops/{system}/{op}.parquet": raw})


@st.composite
def _spoilt_question(draw: st.DrawFn) -> FuzzCase:
    """A study's or a figure's text with some bytes changed."""
    study = draw(st.booleans())
    text = yaml.safe_dump(draw(st.sampled_from(_published())))
    args = ("study", "q.yaml", "--quick") if study else ("validate", "published", "q.yaml")
    return FuzzCase("question, damaged text", args, {"q.yaml": damaged(draw, text.encode())})


QUESTIONS: CaseMakers = {
    "plan": (_plan, 4),
    "whatif": (_whatif, 4),
    "study": (_study, 3),
    "recorded runs": (_recorded, 4),
    "published figure": (_figure, 3),
    "kernel table": (_tables, 2),
    "question, damaged text": (_spoilt_question, 1),
}
