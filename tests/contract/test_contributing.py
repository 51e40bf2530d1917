"""CONTRIBUTING.md's table, one small example each: what is promised to be enough is enough."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from pydantic import Field

from perfmodel.cost import OperatorTimer, estimate_step, load_calibration, save_calibration
from perfmodel.cost.kernel_models.device import OperatorTime
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.registry import KERNEL_MODELS, KernelModel
from perfmodel.engine import POLICIES, KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop
from perfmodel.errors import SpecError
from perfmodel.files.base import Spec
from perfmodel.ops import build_graph, decode_shape
from perfmodel.ops.node import on_tokens
from perfmodel.ops.work import Work
from perfmodel.sim import simulate
from perfmodel.specs import load_hardware, load_model, load_scenario

ROOT = Path(__file__).parents[2]

DEVICE = """
name: my-accelerator
kind: npu
declared:
  source: "its datasheet"
  compute_units: 64
  clock_hz: 1.5 GHz
  peak_flops_per_s: {bf16: 200 TFLOPS}
  memory:
    - {level: hbm, capacity_bytes: 64 GB, bandwidth_bytes_per_s: 1600 GB/s}
  tdp_w: 250
price: {source: "a quote", date: 2026-11-01, usd_per_hour: 1.5}
"""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
SCENARIO = """
model: llama-3.1-8b
hardware: ./my-accelerator.yaml
traffic:
  arrivals: {process: poisson, rate: 2.0}
  num_requests: 30
  input_tokens: {distribution: fixed, value: 200}
  output_tokens: {distribution: fixed, value: 50}
"""


def test_a_device_is_one_file(tmp_path):
    (tmp_path / "my-accelerator.yaml").write_text(DEVICE)
    scenario = load_scenario(
        "llama-3.1-8b-a100", [f"hardware={tmp_path}/my-accelerator.yaml", "traffic.num_requests=30"]
    )
    summary = simulate(scenario).summary
    assert scenario.hardware.name == "my-accelerator"
    assert summary["completed"] == 30
    # At least the 15 GB of weights that one token reads, at 1600 GB/s.
    assert summary["mean_tpot_ms"] > 15e9 / 1600e9 * 1e3
    assert summary["gpu_hours"] * 1.5 * 1e6 / summary["total_output_tokens"] == pytest.approx(
        summary["usd_per_million_output_tokens"]
    )


def test_a_scenario_is_one_file_and_its_paths_are_relative_to_it(tmp_path):
    (tmp_path / "my-accelerator.yaml").write_text(DEVICE)
    (tmp_path / "mine.yaml").write_text(SCENARIO)
    scenario = load_scenario(tmp_path / "mine.yaml")
    assert (scenario.name, scenario.hardware.name) == ("mine", "my-accelerator")
    assert simulate(scenario).summary["total_output_tokens"] == 1500


def test_a_model_is_its_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    scenario = load_scenario(
        "llama-3.1-8b-a100", [f"model={path}", "engine.max_model_len=4096", "traffic.num_requests=30"]
    )
    assert scenario.model.num_layers == 12
    assert simulate(scenario).summary["completed"] == 30


ENGINE = """
name: mine
title: Mine
source: its own documents
facts:
  batching: {prefill_exclusive: true}
  budgets: [{max_num_batched_tokens: 4096, max_num_seqs: 64}]
versions:
  1.0: {source: its release notes}
  1.10: {source: its release notes, defaults: {gpu_memory_utilization: 0.8}}
"""


def test_an_engine_is_one_file_and_a_version_a_section_of_it(tmp_path):
    (tmp_path / "mine.yaml").write_text(ENGINE)
    text = SCENARIO.replace("./my-accelerator.yaml", "h100-sxm-80gb") + "engine: {profile: ./mine.yaml}\n"
    (tmp_path / "served.yaml").write_text(text)
    new, old = (load_scenario(tmp_path / "served.yaml", more) for more in ([], ["engine.version=1.0"]))
    assert (new.engine.max_num_seqs, new.engine.max_num_batched_tokens) == (64, 4096)
    assert (new.engine.gpu_memory_utilization, old.engine.gpu_memory_utilization) == (0.8, 0.9)
    result = simulate(new)
    assert result.summary["total_output_tokens"] == 1500
    assert any("mine 1.10" in note for note in result.notes)
    # A step computes prompts or decodes: in none that has a chunk of a prompt does anything decode.
    steps = result.steps
    assert (steps.num_chunks > 0).any()
    assert not ((steps.num_chunks > 0) & (steps.num_decodes > 0)).any()


def test_a_policy_is_one_function(monkeypatch):
    monkeypatch.setitem(POLICIES, "longest-first", lambda request: (-request.num_prompt_tokens, request.request_id))
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=4096, scheduling_policy="longest-first")
    loop = ServeLoop(Scheduler(config, KVBlockManager(1000, 16)), async_scheduling=False)
    for number, prompt in enumerate((100, 300, 200)):
        loop.add(Request(number, 0, prompt, 1))
    served, now = [], 0
    while loop.has_requests:
        plan = loop.start_step(now)
        finished, _ = loop.finish_step(plan, now, now + 1)
        served += [request.request_id for request in finished]
        now += 1
    assert served == [1, 2, 0]


def embed_again(num_tokens):
    """A made-up operator: 4 kB read and written per token."""
    return Work("embed_again", "elementwise", activation_bytes=8192.0 * num_tokens)


def test_an_operator_is_a_function_and_a_line_in_the_graph():
    timer, shape = OperatorTimer(load_hardware("a100-sxm-80gb")), decode_shape(8, 1000)
    graph = build_graph(load_model("llama-3.1-8b"))
    longer = replace(graph, nodes=(*graph.nodes, on_tokens("embed_again", embed_again)))
    before, after = estimate_step(graph, timer, shape), estimate_step(longer, timer, shape)
    row = after.rows[-1]
    assert (row.name, row.hbm_bytes) == ("embed_again", 65536.0)
    assert after.duration_s == pytest.approx(before.duration_s + row.duration_s)
    assert "embed_again" in str(after)


class TableSize(NamedTuple):
    """What the form of table lookups depends on: lookups one after the other, each after the one before."""

    num_lookups: float
    traits: None = None


def table_lookup(num_tokens):
    """Place one: the operator. Four lookups a token, 64 B each."""
    return Work("lookup", "lookup", weight_bytes=256.0 * num_tokens, problem=TableSize(4 * num_tokens))


class LookupFit(Spec):
    """Place two: the form. A lookup waits for the memory's latency, of so many that are under way at once."""

    form: Literal["table_lookup"] = "table_lookup"
    latency_s: float = Field(default=6e-7, ge=1e-7, le=1e-5)
    at_once: float = Field(default=64.0, ge=1, le=1e6)
    residuals: Residuals = Residuals()


def lookup_time(work, fit, device):
    """Two as well: t = latency lookups / at once, no less than the bytes take."""
    memory_s = work.hbm_bytes / device.bandwidth
    latency_s = fit.latency_s * work.problem.num_lookups / fit.at_once
    return OperatorTime(max(memory_s, latency_s), 0.0, memory_s, 0.0, max(0.0, latency_s - memory_s), "overhead")


def test_an_operator_with_a_form_of_its_own_touches_four_places(monkeypatch, tmp_path):
    monkeypatch.setitem(KERNEL_MODELS, "table_lookup", KernelModel(LookupFit, lookup_time))  # three: its row
    graph = build_graph(load_model("llama-3.1-8b"))
    longer = replace(graph, nodes=(*graph.nodes, on_tokens("lookup", table_lookup)))  # four: its line in the layer

    # A calibration holds its fit like any other's, and is refused for what the form does not allow.
    hardware, file = load_hardware("a100-sxm-80gb"), tmp_path / "mine.yaml"
    written = "device: a100-sxm-80gb\nengine: mine\nfamilies:\n  lookup: {form: table_lookup, at_once: 32}\n"
    file.write_text(written)
    timer = OperatorTimer(hardware, load_calibration(hardware, path=file))
    row = estimate_step(longer, timer, decode_shape(800, 1000)).rows[-1]
    assert (row.name, row.duration_s) == ("lookup", pytest.approx(6e-7 * 4 * 800 / 32))
    assert (
        load_calibration(hardware, path=save_calibration(timer.calibration, tmp_path / "again.yaml"))
        == timer.calibration
    )
    for wrong, said in (("at_once: 0.5", "mine.yaml:4: families.lookup.at_once"), ("at_once_: 3", "mean 'at_once'")):
        file.write_text(written.replace("at_once: 32", wrong))
        with pytest.raises(SpecError, match=said):
            load_calibration(hardware, path=file)


def test_an_optimisation_that_changes_work_acts_in_the_operators_alone():
    """Keys and values in 8 bits: half the KV bytes in decode attention, nothing else knows of it."""
    timer, shape = OperatorTimer(load_hardware("a100-sxm-80gb")), decode_shape(64, 4000)

    def halved(node):
        if node.name != "attention_decode":
            return node
        return replace(node, work=lambda s: replace(node.work(s), kv_bytes=node.work(s).kv_bytes / 2))

    graph = build_graph(load_model("llama-3.1-8b"))
    eight_bits = replace(graph, nodes=tuple(halved(node) for node in graph.nodes))
    before, after = estimate_step(graph, timer, shape), estimate_step(eight_bits, timer, shape)
    saved = 64 * 4000 * 131072 / 2  # tokens x bytes per token / 2
    assert before.hbm_bytes - after.hbm_bytes == pytest.approx(saved, rel=0.01)
    assert before.duration_s - after.duration_s == pytest.approx(saved / 2039e9, rel=0.05)


def test_an_optimisation_that_changes_plans_acts_in_the_engine_alone():
    """Prefix caching: equal prompts are computed once; the operators never hear of it."""
    shared = ["traffic.prefix={num_groups: 1, shared_tokens: 512}", "traffic.num_requests=60"]
    off = simulate(load_scenario("llama-3.1-8b-a100", [*shared, "engine.enable_prefix_caching=false"])).summary
    on = simulate(load_scenario("llama-3.1-8b-a100", shared)).summary
    assert on["prefix_cache_hit_rate"] > 0.2
    assert not off["prefix_cache_hit_rate"]
    assert on["mean_ttft_ms"] < off["mean_ttft_ms"]


def test_every_benchmark_is_run_or_named_where_benchmarks_are_run() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    scripts = sorted(path.name for path in (ROOT / "benchmarks").iterdir() if not path.name.startswith("_"))
    assert [name for name in scripts if name not in makefile] == []
    recipe = makefile.partition("\nbench:")[2].partition("\n\n")[0]
    assert "benchmarks/*" not in recipe
