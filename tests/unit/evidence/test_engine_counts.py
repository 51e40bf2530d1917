"""What vLLM counts from a model's configuration, recorded, vs. what we do: KV blocks, groups, FLOPs and bytes."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location("engine_counts", ROOT / "benchmarks/witness/engine_counts.py")
assert _spec is not None
assert _spec.loader is not None
counts = importlib.util.module_from_spec(_spec)
sys.modules["engine_counts"] = counts
_spec.loader.exec_module(counts)

# Cards whose blocks differ from vLLM's, as docs/engines.md says.
UNEQUAL_PAGES = {"mimo-v2-flash"}  # vLLM gives layers of fewer heads blocks of more tokens
# Cards that vLLM was not asked for: they came after the recording.
NEWER = {
    *("bge-m3", "bge-reranker-v2-m3", "qwen3-embedding-0.6b", "qwen3-embedding-8b", "snowflake-arctic-embed-m-v1.5"),
    *("deepseek-v4-flash", "deepseek-v4-pro", "gemma-4-26b-a4b", "gemma-4-31b", "glm-4.7-flash", "glm-5.2"),
    *("glm-5.2-fp8", "kimi-k3", "kimi-linear-48b-a3b", "minimax-m3", "qwen3.5-9b", "step3"),
}
WHOLE_WINDOWS = {"ministral-8b"}  # a window as long as the context is full attention for us: equal blocks
BLOCKS, STEPS = counts.recorded("blocks"), counts.recorded("steps")
GATED = ["llama-3.1-8b", "gemma-3-27b", "qwen3-32b", "mistral-7b-v0.3", "olmo-2-7b", "gemma-2-9b"]


@pytest.mark.parametrize("name", sorted(set(BLOCKS["rows"]) - UNEQUAL_PAGES - WHOLE_WINDOWS))
def test_blocks_and_groups_are_those_of_vllm(name: str) -> None:
    row = BLOCKS["rows"][name]
    theirs = counts.vllm_layout(row)
    has_states = any(kind == "state" for kind, _, _ in theirs.groups)
    ours = counts.layout_of(counts.model_of(name), BLOCKS["block_size"] if has_states else theirs.num_tokens)
    assert ours == theirs
    assert int(BLOCKS["available_bytes"] // ours.block_bytes) == row["num_blocks"]


def test_almost_all_cards_are_compared() -> None:
    assert len(BLOCKS["rows"]) >= 110
    cards = {file.stem for file in (ROOT / "workloads/models").glob("*")}
    assert cards - set(BLOCKS["rows"]) - set(BLOCKS["refused"]) == NEWER


@pytest.mark.parametrize("name", sorted(WHOLE_WINDOWS))
def test_a_window_of_the_whole_context_takes_as_many_bytes(name: str) -> None:
    theirs = counts.vllm_layout(BLOCKS["rows"][name])
    assert counts.layout_of(counts.model_of(name), theirs.num_tokens).block_bytes == theirs.block_bytes


def test_each_difference_of_a_step_has_a_reason_and_each_reason_a_difference() -> None:
    found = counts.differences()
    assert found
    assert [row for row in found if not row.reasons] == []
    assert {letter for row in found for letter in row.reasons} == set(counts.REASONS)


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("load", ["decode_32x1000", "decode_1x8000"])
def test_decodes_of_dense_models_count_alike(name: str, load: str) -> None:
    """Beside products vLLM counts neither norms, RoPE nor sampling: below 0.2 % of the FLOPs, 1.1 % of bytes."""
    model, shape = counts.model_of(name), counts.shape_of(counts.model_of(name), STEPS["loads"][load])
    theirs = STEPS["rows"][name][load]
    ours = counts.our_flops(model, shape)
    for part, flops in counts.vllm_flops(theirs["flops"]).items():
        if flops:
            assert ours[part] == pytest.approx(flops, rel=1e-3), part
    assert sum(ours.values()) == pytest.approx(sum(theirs["flops"].values()), rel=2e-3)
    (weights, total), (their_weights, their_total) = counts.our_bytes(model, shape), counts.vllm_bytes(theirs)
    assert weights == pytest.approx(their_weights, rel=1e-3)
    assert total == pytest.approx(their_total, rel=0.011)


def test_prompts_differ_by_causality_alone() -> None:
    """Of T new tokens, query i sees i: T (T + 1) / 2 pairs where vLLM counts T^2."""
    model, load = counts.model_of("llama-3.1-8b"), STEPS["loads"]["prompt_2048"]
    ours = counts.our_flops(model, counts.shape_of(model, load))
    theirs = counts.vllm_flops(STEPS["rows"]["llama-3.1-8b"]["prompt_2048"]["flops"])
    assert ours["attention"] / theirs["attention"] == pytest.approx(2049 / 4096, rel=1e-3)
    assert ours["LM head"] == theirs["LM head"]  # the last token's logits alone
    for part in ("projections of attention", "feed-forward"):
        assert ours[part] == theirs[part]


def test_latent_attention_multiplies_latents_in_decodes() -> None:
    """A head's product with a cached token: 2 x 512 + 64 multiply-adds of latents; vLLM counts 128 + 64 + 128."""
    model, load = counts.model_of("deepseek-v3"), STEPS["loads"]["decode_32x1000"]
    ours = counts.our_flops(model, counts.shape_of(model, load))
    theirs = counts.vllm_flops(STEPS["rows"]["deepseek-v3"]["decode_32x1000"]["flops"])
    assert ours["attention"] / theirs["attention"] == pytest.approx((2 * 512 + 64) / (128 + 64 + 128), rel=1e-3)
    assert ours["projections of attention"] == pytest.approx(theirs["projections of attention"], rel=1e-3)
