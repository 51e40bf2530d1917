"""Attention of prompts to chosen keys: a call, a time for each thread block, and one for each key.

t = c + t0 n ceil(H / 64) / units + 4 h H keys / (share x peak)        n queries, H heads, keys of h elements
"""

from math import ceil

import pytest

from perfmodel.cost import OperatorTimer, load_calibration
from perfmodel.cost.calibrations.for_all import SparseAttentionFits
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import load_fitted
from perfmodel.ops import BatchShape, build_graph
from perfmodel.ops.attention.compressed import compressed_prefill
from perfmodel.ops.attention.prefill import Heads
from perfmodel.specs import EngineSpec, load_hardware, load_model

FITS = load_fitted(SparseAttentionFits, data_dir("calibrations") / "sparse_attention.yaml").kernels
# Of one prompt of DeepSeek-V4-Flash's HCA under vLLM 0.24: (new tokens, cached tokens), microseconds.
# Source: ai-dynamo/aiconfigurator, dsv4_hca_attn_module (Apache-2.0)
MEASURED = {
    ("b200-sxm", 4096, 0): 252.7,
    ("b200-sxm", 8192, 131_072): 1390.9,
    ("b300-sxm", 4096, 0): 242.6,
    ("b300-sxm", 8192, 131_072): 1334.2,
    ("h200-sxm", 4096, 0): 367.6,
    ("h200-sxm", 8192, 131_072): 2330.5,
}


def hca(prefills, num_heads=64):
    """HCA of DeepSeek-V4-Flash."""
    mixers = (layer.mixer for layer, _ in load_model("deepseek-v4-flash").layers)
    mixer = next(mixer for mixer in mixers if getattr(mixer, "ratio", 0) == 128)
    return compressed_prefill(prefills, mixer, Heads(num_heads, 1, 512, 512, "bf16", 2, 584 / 512), 584)


def seconds(work, device="b200-sxm", engine="vllm"):
    hardware = load_hardware(device)
    return OperatorTimer(hardware, load_calibration(hardware, engine)).time(work).duration_s


@pytest.mark.parametrize(("device", "engine", "kernels"), [
    ("b200-sxm", "vllm", "blackwell/vllm"),
    ("b200-sxm", "sglang", "blackwell/sglang"),
    ("gb200", "trtllm", "blackwell/vllm"),
    ("h100-sxm-80gb", "sglang", "hopper/vllm"),
    ("rtx-pro-6000", "vllm", "hopper/vllm"),
])  # fmt: skip
def test_a_prompt_takes_a_call_its_blocks_and_its_keys(device, engine, kernels):
    """Closed form on the architecture's own fit or the nearest's, for as many compute units as the device has."""
    fit, facts = FITS[kernels], DeviceFacts.of(load_hardware(device))
    tokens, cached, heads = 3000, 50_000, 128
    keys = sum(128 + (cached + i) / 128 for i in range(1, tokens + 1))
    blocks_s = fit.overhead_per_item_s * tokens * ceil(heads / 64) / facts.compute_units
    expected = fit.overhead_s + blocks_s + 4 * 512 * heads * keys / (fit.compute_fraction * facts.peak("bf16"))
    assert seconds(hca(((tokens, cached),), heads), device, engine) == pytest.approx(expected, rel=1e-9)


def test_twice_the_queries_at_equal_keys_cost_as_many_blocks_more():
    """4,096 queries at 592 keys have about the FLOPs of 2,048 at 1,160: 2,048 blocks tell them apart."""
    few, many = hca(((2048, 131_072),)), hca(((4096, 57_344),))
    slope = 1 / (FITS["blackwell/vllm"].compute_fraction * DeviceFacts.of(load_hardware("b200-sxm")).peak("bf16"))
    gap = seconds(many) - seconds(few) - (many.flops - few.flops) * slope
    assert gap == pytest.approx(2048 * FITS["blackwell/vllm"].overhead_per_item_s / 148, rel=1e-6)
    assert many.flops < 1.03 * few.flops
    assert seconds(many) > 1.2 * seconds(few)


@pytest.mark.parametrize(("heads", "blocks"), [(8, 1), (64, 1), (65, 2), (128, 2)])
def test_a_query_has_a_thread_block_for_each_64_heads(heads, blocks):
    assert hca(((10, 0), (7, 300)), heads).problem.num_items == 17 * blocks


@pytest.mark.parametrize("device", ["h200-sxm", "b200-sxm"])
def test_a_rank_with_fewer_heads_computes_64(device):
    """16 of V4-Pro's 128 heads: one block a query, and the FLOPs of 64 heads on Blackwell, too."""
    engine = EngineSpec(profile="vllm", tensor_parallel_size=8, kv_cache_dtype="fp8")
    graph = build_graph(load_model("deepseek-v4-pro"), engine, hardware=load_hardware(device))
    node = next(node for node in graph.nodes if node.name.split("@")[0] == "attention_prefill")
    work = node.work(BatchShape(100, 1, ((100, 0),)))
    assert work.problem.num_items == 100
    assert work.flops == pytest.approx(4 * 512 * 64 * work.problem.pairs)


@pytest.mark.parametrize(("device", "new", "cached"), MEASURED)
def test_measured_prompts_are_met(device, new, cached):
    assert seconds(hca(((new, cached),)), device) * 1e6 == pytest.approx(MEASURED[device, new, cached], rel=0.06)
