"""Which kernel computes prompts over latents: on Blackwell trtllm-gen's, which SGLang and TensorRT-LLM share."""

import pytest

from perfmodel.cost import step_costs
from perfmodel.cost.steps.explain import OperatorEstimate
from perfmodel.ops.work import BatchShape
from perfmodel.specs import load_scenario

TOKENS = 7000


def attention(
    hardware: str, profile: str, version: str | None = None, kv: str = "fp8", heads: int = 16
) -> OperatorEstimate:
    """Of one prompt's attention in all layers, on one of 128 / `heads` devices."""
    overrides = ["model=deepseek-v3", f"hardware={hardware}", f"engine.profile={profile}"]
    overrides += [f"engine.tensor_parallel_size={128 // heads}", f"engine.kv_cache_dtype={kv}"]
    overrides += [] if version is None else [f"engine.version={version}"]
    shape = BatchShape(num_tokens=TOKENS, num_samples=1, prefills=((TOKENS, 0),))
    rows = step_costs(load_scenario("llama-3.1-8b-h100-2048-256", overrides)).estimate(shape).rows
    return next(row for row in rows if row.name == "attention_prefill")


def test_engines_with_the_same_kernel_take_the_same_time() -> None:
    """FlashInfer's trtllm_ragged_attention_deepseek is TensorRT-LLM's own kernel. SGLang's tables for heads of 192,
    which Triton multiplied, are some six times as slow and of other models."""
    ours, theirs = attention("b200-sxm", "sglang", "0.5.8"), attention("b200-sxm", "trtllm")
    assert ours.duration_s == pytest.approx(theirs.duration_s, rel=0.4)


def test_prompts_are_multiplied_in_fp8_from_the_version_that_quantizes_them_on() -> None:
    """SGLang 0.5.7, _quantize_fp8_qkv, with an FP8 cache alone. FP8 units are at most twice as fast."""
    old, new = attention("b200-sxm", "sglang", "0.5.6"), attention("b200-sxm", "sglang", "0.5.7")
    assert 1.05 < old.duration_s / new.duration_s < 2.0
    wide = [attention("b200-sxm", "sglang", version, kv="bf16") for version in ("0.5.6", "0.5.7")]
    assert wide[0].duration_s == wide[1].duration_s == old.duration_s


def test_no_kernel_is_faster_than_its_units() -> None:
    """2 (192 + 128) FLOPs a head and pair: at most 4.5 dense FP8 PFLOP/s of a B200."""
    time = attention("b200-sxm", "sglang", "0.5.8").duration_s
    flops = 61 * 2 * 320 * 16 * TOKENS * (TOKENS + 1) / 2
    assert 0.1 < flops / time / 4.5e15 < 1


def test_hopper_runs_the_kernel_of_heads_of_their_size() -> None:
    """FlashAttention-3 over expanded heads, whatever the cache's format: SGLang's tables of latents there are absorbed
    attention, with 3.4 times the FLOPs."""
    narrow, wide = (attention("h200-sxm", "sglang", "0.5.8", kv=kv) for kv in ("fp8", "bf16"))
    assert narrow.work.family == wide.work.family == "attention_prefill"
    assert narrow.duration_s == wide.duration_s


def test_devices_without_a_table_of_latents_have_that_of_heads() -> None:
    """A Blackwell device under an engine that has no fit of latents, as vLLM's are of whole modules."""
    assert attention("b200-sxm", "vllm").work.family == "attention_prefill"
    assert attention("b200-sxm", "datasheet").duration_s > 0
