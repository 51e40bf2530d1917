"""Attention of one new token per sequence over its paged keys and values. Sequence by sequence, so that the time is a
sum over sequences of (a constant + a part linear in the context): no padding to the longest context, whose cost would
depend on which sequences meet in a batch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.attention.decode import attention_decode as decode_work
from perfmodel.ops.attention.prefill import Heads
from perfmodel_executors.kernels import attention_prefill as prompts
from perfmodel_executors.kernels import kv_pages
from perfmodel_executors.kernels.attention_prefill import PLAIN, AttentionRule, attend_masked
from perfmodel_executors.kernels.problem import Inputs, Problem, by_backend


def attend_one(q_NH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v, [N, H_v], of the N query heads of one token. The query heads of a group act as the
    rows of one query: 4-10 times faster on a CPU than enable_gqa. A group of one head is taken twice: torch multiplies
    a single 16-bit row by a kernel that takes 3-5 times as long as for two rows."""
    num_heads, head_dim = q_NH.shape
    num_kv_heads = k_LKH.shape[1]
    group = num_heads // num_kv_heads
    q_KGH = q_NH.view(1, num_kv_heads, group, head_dim)
    if group == 1:
        q_KGH = q_KGH.expand(-1, -1, 2, -1)
    k_KLH, v_KLH = k_LKH.transpose(0, 1), v_LKH.transpose(0, 1)
    out_KGH = functional.scaled_dot_product_attention(q_KGH, k_KLH[None], v_KLH[None])
    return out_KGH[:, :, :group].reshape(num_heads, -1)


def attention_decode(
    q_DNH: Tensor, pages: kv_pages.KVPages, block_tables_DM: Tensor, context_lens_D: Tensor, rule: AttentionRule = PLAIN
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v for each sequence, [D, N, H_v]. block_tables: of each sequence, padded with anything
    up to the longest; context_lens: tokens in the KV cache, the new one included."""
    block_size = pages.block_size
    out_DNH = q_DNH.new_empty(*q_DNH.shape[:2], pages.v_dim)
    for row, context in enumerate(context_lens_D.tolist()):
        first = prompts.first_visible(context - 1, rule)
        block = first // block_size
        blocks = block_tables_DM[row, block : -(-context // block_size)]
        seen = slice(first - block * block_size, context - block * block_size)
        k_LKH, v_LKH = (part[seen] for part in pages.gathered(blocks, q_DNH.dtype))
        if not rule.has_terms:
            out_DNH[row] = attend_one(q_DNH[row], k_LKH, v_LKH)
        else:
            mask_TL = torch.ones(1, len(k_LKH), dtype=torch.bool, device=q_DNH.device)
            keys = (k_LKH.transpose(0, 1), v_LKH.transpose(0, 1))
            out_DNH[row : row + 1] = attend_masked(q_DNH[row : row + 1], *keys, mask_TL, rule)
    return out_DNH


attention_softmax_decode = attention_decode  # the name under which calls with a cap or sinks are measured


def tiny(dtype: torch.dtype) -> list[Problem]:
    short, long = [1, 17, 40], [70, 33]
    plain = [
        _problem(short, (4, 2), (16, 24), dtype, dtype),
        _problem(long, (3, 1), (20, 20), dtype, dtype, AttentionRule(window=21)),
        _problem(long, (2, 2), (16, 16), dtype, dtype, AttentionRule(chunk=24)),
    ]
    others = [
        _problem(short, (6, 2), (32, 16), dtype, kv_pages.FP8),
        _problem(long, (2, 1), (16, 16), dtype, torch.int8, page=32),
    ]
    return [*plain, *others, *prompts.tiny_with_terms(plain)]


def serving() -> list[Problem]:
    bf16, llama, dims = torch.bfloat16, (32, 8), (128, 128)
    shapes = [(64, 4096), (32, 8192), (256, 2048), (1, 32768)]
    plain = [_problem([n] * size, llama, dims, bf16, bf16) for size, n in shapes]
    plain += [
        _problem([16384] * 8, (64, 8), dims, bf16, bf16),
        _problem([8192] * 64, llama, dims, bf16, bf16, AttentionRule(4096)),
        _problem([1024] * 128, (32, 32), dims, bf16, bf16),
    ]
    formats = (kv_pages.FP8, torch.int8)
    quantised = [_problem([n] * size, llama, dims, bf16, kv) for kv in formats for size, n in shapes if size != 256]
    narrow = _problem([4096] * 64, llama, (64, 64), bf16, bf16)
    return [*plain, *quantised, narrow, *(prompts.with_terms(problem, None, True) for problem in plain[:4])]


def _problem(
    contexts: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    rule: AttentionRule = PLAIN,
    page: int = 16,
) -> Problem:
    width = -(-max(contexts) // page)

    def make(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs.normal(len(contexts), heads[0], dims[0], dtype=dtype)
        pages = kv_pages.random_pages(inputs, width * len(contexts) + 1, page, heads[1], dims, dtype, kv_dtype)
        tables = kv_pages.shuffled_tables(inputs, len(contexts), width)
        return q, pages, tables, inputs.of(contexts, torch.int64), rule

    window, chunk, *_ = rule
    visible = sum(min(c, window or c, (c - 1) % chunk + 1 if chunk else c) for c in contexts)
    size = Heads(*heads, *dims, kv_pages.NAMES[dtype], dtype.itemsize, kv_dtype.itemsize, window, chunk)
    return Problem(
        "attention_decode",
        {"batch_size": len(contexts), "step": max(contexts) - 1, "num_heads": heads[0],
         "num_key_value_heads": heads[1], "head_dim": dims[0], "v_head_dim": dims[1], "window_size": window or 0,
         "chunk": chunk or 0, "block_size": page, "attn_dtype": kv_pages.NAMES[dtype],
         "kv_cache_dtype": kv_pages.NAMES[kv_dtype]},
        make,
        decode_work(len(contexts), visible, size),
        kv_pages.TOLERANCE[dtype],
        by_backend(_torch_attention) if kv_dtype == dtype and rule == PLAIN else {},
    )  # fmt: skip


def _torch_attention(
    q_DNH: Tensor, pages: kv_pages.KVPages, tables_DM: Tensor, contexts_D: Tensor, *_: object
) -> Tensor:
    k_DKLH, v_DKLH = kv_pages.contiguous_kv(pages, tables_DM, tables_DM.shape[1] * pages.block_size)
    q_DKGH = q_DNH.view(len(contexts_D), pages.num_kv_heads, -1, q_DNH.shape[2])
    return functional.scaled_dot_product_attention(q_DKGH, k_DKLH, v_DKLH).flatten(1, 2)
