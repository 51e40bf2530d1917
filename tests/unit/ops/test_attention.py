"""Attention operators: flash against standard, decode against prefill, splits, latents."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.models.architecture import Indexer, LatentAttention
from perfmodel.models.cards import load_model
from perfmodel.models.number_formats import Surplus
from perfmodel.ops import BatchShape, build_graph
from perfmodel.ops.attention.decode import attention_decode
from perfmodel.ops.attention.indexer import index_decode, index_prefill
from perfmodel.ops.attention.latent import absorb, expanded_heads, latent_decode, latent_heads, sparse_prefill
from perfmodel.ops.attention.prefill import Heads, flash_prefill, standard_prefill
from perfmodel.specs.engine.spec import EngineSpec

HEADS = Heads(32, 8, 128, 128, "bf16", 2.0, 2.0)
DEEPSEEK = LatentAttention(128, 1536, 512, 128, 64, 128)
PREFILLS = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=5).map(tuple)


@given(PREFILLS)
def test_flash_moves_fewer_bytes_than_standard(prefills):
    flash, standard = flash_prefill(prefills, HEADS), standard_prefill(prefills, HEADS)
    assert flash.hbm_bytes < standard.hbm_bytes
    assert flash.flops <= standard.flops


def test_standard_attention_moves_four_passes_over_the_scores():
    """T = 2048, no cache: scores 32 heads x 2048^2; written, read by softmax, written, read: 4 x 2 B each."""
    scores = 32 * 2048 * 2048
    work = standard_prefill([(2048, 0)], HEADS)
    inputs = 2048 * 32 * 256 * 2 + 2048 * 8 * 256 * 2
    assert work.hbm_bytes == 4 * 2 * scores + inputs
    assert work.flops == 4 * 128 * scores


def test_unfused_standard_attention_masks_and_copies_kv_heads_in_kernels_of_their_own():
    """T = 2048: the mask reads and writes 32 x 2048^2 scores of 2 B; K and V of 8 heads become those of 32, 2048 x 32 x
    256 elements of 2 B, written and read. One token over 2048: the copies, no mask.
    """
    fused, unfused = (standard_prefill([(2048, 0)], HEADS, is_fused=fused) for fused in (True, False))
    copies = 2 * 2048 * 32 * 256 * 2
    assert unfused.hbm_bytes - fused.hbm_bytes == 2 * 2 * 32 * 2048**2 + copies
    assert unfused.flops == fused.flops
    fused, unfused = (attention_decode(1, 2048, HEADS, is_flash=False, is_fused=fused) for fused in (True, False))
    assert unfused.hbm_bytes - fused.hbm_bytes == copies


def test_heads_without_groups_are_not_copied():
    heads = replace(HEADS, num_kv_heads=32)
    fused, unfused = (attention_decode(4, 2048, heads, is_flash=False, is_fused=fused) for fused in (True, False))
    assert fused == unfused


@given(PREFILLS)
def test_flash_rereads_keys_in_sram_not_in_hbm(prefills):
    work = flash_prefill(prefills, HEADS)
    assert work.sram_bytes >= work.hbm_bytes


@given(st.integers(0, 10_000), st.sampled_from([None, 100, 4096]))
def test_a_decode_is_a_prefill_of_one_token(cached, window):
    heads = replace(HEADS, window=window)
    visible = min(cached + 1, window) if window else cached + 1
    decode, prefill = attention_decode(1, visible, heads), flash_prefill([(1, cached)], heads)
    assert decode.flops == prefill.flops
    assert decode.hbm_bytes == prefill.hbm_bytes


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.sampled_from([None, 64, 1000]))
def test_chunked_prefill_has_the_flops_of_the_whole(chunks, window):
    heads = replace(HEADS, window=window)
    cached, total = 0, 0.0
    for chunk in chunks:
        total += flash_prefill([(chunk, cached)], heads).flops
        cached += chunk
    assert total == flash_prefill([(cached, 0)], heads).flops


def test_chunked_prefill_reads_the_cache_again():
    """Chunks of c re-read what came before: sum of i c keys for i = 1 .. T/c, instead of T."""
    whole = flash_prefill([(2048, 0)], HEADS).kv_bytes
    chunks = sum(flash_prefill([(512, 512 * i)], HEADS).kv_bytes for i in range(4))
    assert chunks == pytest.approx(whole * (1 + 2 + 3 + 4) / 4)


def test_prompts_of_a_step_share_a_launch():
    assert flash_prefill([(100, 7), (900, 0)], HEADS).num_kernels == 1


def test_splits_fill_the_machine_only_when_asked():
    """Flash-decoding's example: one sequence of 64k tokens, 16 heads in 2 groups: 16 thread blocks, or 2 x 256."""
    heads = Heads(16, 2, 128, 128, "bf16", 2.0, 2.0)
    split, whole = attention_decode(1, 65536, heads), attention_decode(1, 65536, heads, splits_kv=False)
    assert (whole.problem.thread_blocks, split.problem.thread_blocks) == (16, 2 * 256)
    assert (whole.num_kernels, split.num_kernels) == (1, 2)
    assert whole.hbm_bytes == split.hbm_bytes


def test_nothing_to_do_launches_nothing():
    heads = latent_heads(DEEPSEEK, 128, "bf16", 2.0, 2.0)
    indexer = Indexer(64, 128, 2048)
    works = [
        flash_prefill((), HEADS),
        standard_prefill((), HEADS),
        attention_decode(0, 0, HEADS),
        latent_decode(0, 0, heads),
        sparse_prefill((), heads, 2048),
        index_prefill((), indexer),
        index_decode(0, 0, indexer),
        absorb("absorb_query", 0, 128, 512, 128, "bf16", 2.0),
    ]
    assert all(work.num_kernels == 0 and work.flops == 0 and work.hbm_bytes == 0 for work in works)


def test_latent_decode_by_hand():
    """DeepSeek-V3, C = 1000 tokens in all: 2 C 128 (2 x 512 + 64) FLOPs; C x 576 x 2 B, whatever the heads."""
    work = latent_decode(4, 1000, latent_heads(DEEPSEEK, 128, "bf16", 2.0, 2.0))
    assert work.flops == 2 * 1000 * 128 * (2 * 512 + 64)
    assert work.kv_bytes == 1000 * 576 * 2
    fewer_heads = latent_decode(4, 1000, latent_heads(DEEPSEEK, 16, "bf16", 2.0, 2.0))
    assert fewer_heads.kv_bytes == work.kv_bytes
    assert fewer_heads.flops == work.flops / 8


@pytest.mark.parametrize(("new_tokens", "absorbed_is_cheaper"), [(1, True), (128, True), (256, False), (2048, False)])
def test_absorbed_and_expanded_attention_cross_over(new_tokens, absorbed_is_cheaper):
    """Per head and cached token, expanding costs r_kv (n + v) once and n + r + v per query; absorbed attention
    2 r_kv + r per query: equal at 512 x 256 / (1088 - 320) = 171 new tokens over a long context.
    """
    cached, heads = 200_000, 128
    expand = 2 * (cached + new_tokens) * 512 * heads * (128 + 128)
    expanded = expand + flash_prefill([(new_tokens, cached)], expanded_heads(DEEPSEEK, heads, "bf16", 2.0)).flops
    absorbing = 2 * absorb("", new_tokens, heads, 512, 128, "bf16", 2.0).flops
    latent = latent_heads(DEEPSEEK, heads, "bf16", 2.0, 2.0)
    absorbed = absorbing + flash_prefill([(new_tokens, cached)], latent).flops
    assert (absorbed < expanded) is absorbed_is_cheaper


def test_sparse_prefill_is_dense_up_to_top_k_and_linear_beyond():
    heads = latent_heads(DEEPSEEK, 128, "bf16", 2.0, 2.0)
    assert sparse_prefill([(2048, 0)], heads, 2048).flops == flash_prefill([(2048, 0)], heads).flops
    step = [sparse_prefill([(1000, p)], heads, 2048).flops for p in (10_000, 20_000)]
    assert step[0] == step[1] == 1000 * 2048 * 2 * 128 * 1088


def test_index_scores_by_hand():
    """One prefill of 3 tokens: 1 + 2 + 3 pairs, 64 heads of 128, 2 FLOPs each."""
    assert index_prefill([(3, 0)], Indexer(64, 128, 2048)).flops == 2 * 6 * 64 * 128
    assert index_decode(2, 50, Indexer(64, 128, 2048)).flops == 2 * 50 * 64 * 128


def test_index_scores_are_written_and_read_in_fp32():
    """By hand: 6 pairs of 8 bytes, queries of 64 heads of 128 in FP8, 3 keys of 128 in FP8."""
    indexer = Indexer(64, 128, 2048)
    prompt, decode = index_prefill([(3, 0)], indexer), index_decode(2, 50, indexer)
    assert (prompt.activation_bytes, prompt.kv_bytes) == (6 * (4 + 4) + 3 * 64 * 128, 3 * 128)
    assert (decode.activation_bytes, decode.kv_bytes) == (50 * (4 + 4) + 2 * 64 * 128, 50 * 128)


def test_absorbed_weights_are_read_once_whatever_the_tokens():
    """W_UK of DeepSeek-V3: 128 heads of 128 x 512 weights, whatever the tokens."""
    one, many = (absorb("absorb_query", tokens, 128, 512, 128, "bf16", 2.0) for tokens in (1, 64))
    assert one.weight_bytes == many.weight_bytes == 2 * 128 * 512 * 128
    assert many.flops == 64 * 2 * 128 * 512 * 128


def test_latents_in_the_cache_are_expanded_again_for_every_chunk():
    """Two chunks of 100 tokens: keys and values of 100 tokens, then of 200; a whole prompt expands 200."""
    graph = build_graph(load_model("deepseek-v2-lite"))
    expand = next(node for node in graph.nodes if node.name == "kv_b_proj")
    rows = [expand.work(BatchShape(100, 1, ((100, cached),))).problem.m for cached in (0, 100)]
    assert rows == [100, 200]


def test_queries_and_keys_are_rotated_and_values_are_not():
    """Llama-3.1-8B: 32 + 8 heads of 128, read and written in 16 bits. DeepSeek-V2-Lite: the 64 rotary elements of
    16 query heads and of the one shared key."""
    for name, elements in (("llama-3.1-8b", (32 + 8) * 128), ("deepseek-v2-lite", (16 + 1) * 64)):
        rope = next(node for node in build_graph(load_model(name)).nodes if node.name == "rope")
        assert rope.work(BatchShape(10, 0)).hbm_bytes == 10 * elements * 2 * 2


def test_a_qk_norm_over_all_heads_all_reduces_its_sums_of_squares():
    """OLMo-2: two sums in fp32 a token."""
    graph = build_graph(load_model("olmo-2-7b"), EngineSpec(tensor_parallel_size=2))
    message = next(node for node in graph.nodes if node.name == "qk_norm_all_reduce").work(BatchShape(10, 0)).message
    assert (message.bytes_, message.num_ranks) == (10 * 2 * 4, 2)


def test_written_bytes_include_requantization_of_older_tokens():
    """A new token is written in 16 bits; one older token is requantized from 16 to 8 bits and one from 8 to 4."""
    heads = replace(HEADS, kv_element_bytes=0.5, surplus=(Surplus(64, 1.0, 0.0), Surplus(192, 0.5, 0.0)))
    assert heads.written_bytes == 2 + (2 + 1) + (1 + 0.5)
    assert HEADS.written_bytes == 2


@given(st.integers(1, 100_000), st.integers(1, 64), st.floats(0.05, 1.0), st.sampled_from([1, 16, 64, 128]))
def test_sparse_heads_read_their_fraction_in_whole_blocks_within_the_context(context, seqs, fraction, block):
    visible = replace(HEADS, fraction=fraction, block=block).visible(context * seqs, seqs)
    assert fraction * context * seqs <= visible * (1 + 1e-9)
    assert visible <= min(context * seqs, fraction * context * seqs + seqs * block)


def test_half_of_the_keys_have_half_of_the_bytes():
    """Plus half a block per sequence for rounding to blocks."""
    dense = attention_decode(4, 4 * 10_000, HEADS)
    half = attention_decode(4, 4 * 10_000, replace(HEADS, fraction=0.5, block=64))
    assert half.kv_bytes == dense.kv_bytes * (5000 + 32) / 10_000
    assert half.flops == dense.flops * (5000 + 32) / 10_000


@given(PREFILLS)
def test_only_cached_tokens_are_unpacked(prefills):
    """A packed cache: two operations for 8 x 256 elements of every cached token; new tokens are not packed yet. The
    second chunk of a prompt unpacks the first."""
    packed = replace(HEADS, kv_element_bytes=0.5, unpack_ops=2.0)
    assert flash_prefill(prefills, packed).vector_ops == 2 * 8 * 256 * sum(cached for _, cached in prefills)
    assert flash_prefill(prefills, HEADS).vector_ops == 0
