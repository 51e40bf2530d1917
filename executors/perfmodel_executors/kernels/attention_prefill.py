"""Causal attention of prompt chunks over paged keys and values, the chunk's own included (written before the call).

    s = q k^T / sqrt(H);  capped: c tanh(s / c) (Gemma 2);  weights = exp(s) / (exp(sink) + sum exp(s)) (gpt-oss)

Queries go in tiles, and each tile reads only the keys that some query of it sees.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.errors import PerfmodelError
from perfmodel.ops.attention.prefill import Heads, flash_prefill
from perfmodel_executors.kernels import kv_pages
from perfmodel_executors.kernels.problem import Inputs, Problem, by_backend

QUERY_TILE = 128  # 64 to 256 measured equal within 15 % at chunks of 128 to 1024
# Above, torch's attention with a mask measured slower than two products, below faster, up to twice.
FEW_QUERIES = 16


class AttentionRule(NamedTuple):
    """What queries see, and terms of the softmax.

    window:  a query sees only the last `window` tokens, itself included
    chunk:   a query sees only tokens of its own chunk of this length (chunked attention of Llama 4)
    cap:     scores become cap * tanh(score / cap); None: they stay
    sinks_N: a logit of each query head that takes its part of the softmax; None: it is over keys alone
    """

    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    sinks_N: Tensor | None = None

    @property
    def has_terms(self) -> bool:
        return self.cap is not None or self.sinks_N is not None


PLAIN = AttentionRule()


def attention_prefill(
    q_TNH: Tensor, pages: kv_pages.KVPages, chunks: kv_pages.Chunks, rule: AttentionRule = PLAIN
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v for each chunk, [T, N, H_v], softmax in fp32. Raises PerfmodelError for a tree with a
    window or chunk."""
    check_tree(chunks, rule)
    block_size = pages.block_size
    nodes: list[int] | None = None if chunks.nodes_G is None else chunks.nodes_G.tolist()
    out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], pages.v_dim)
    for row, (begin, end, prefix) in enumerate(chunks.spans()):
        base = first_visible(prefix, rule) // block_size
        num_keys = prefix + (end - begin if nodes is None else nodes[row])
        blocks = chunks.tables_GM[row, base : -(-num_keys // block_size)]
        k_KLH, v_KLH = (rows.transpose(0, 1) for rows in pages.gathered(blocks, q_TNH.dtype))
        for tile in range(begin, end, QUERY_TILE):
            stop = min(tile + QUERY_TILE, end)
            first, last = prefix + tile - begin, prefix + stop - begin  # positions of the tile's queries
            low = first_visible(first, rule)
            if chunks.ancestors_T is None:
                keys = slice(low - base * block_size, last - base * block_size)
                q_pos, k_pos = (torch.arange(p, last, device=q_TNH.device) for p in (first, low))
                mask_TL = visible(q_pos, k_pos, rule)
            else:  # the whole prefix, and the chunk's tokens whose bit is set
                keys = slice(0, num_keys)
                bits_TL = chunks.ancestors_T[tile:stop, None] >> torch.arange(num_keys - prefix, device=q_TNH.device)
                mask_TL = functional.pad((bits_TL & 1).bool(), (prefix, 0), value=True)
            out_TNH[tile:stop] = attend(q_TNH[tile:stop], k_KLH[:, keys], v_KLH[:, keys], mask_TL, rule)
    return out_TNH


attention_softmax_prefill = attention_prefill  # the name under which calls with a cap or sinks are measured


def check_tree(chunks: kv_pages.Chunks, rule: AttentionRule) -> None:
    """Raises PerfmodelError for a tree in a layer with a span: a node's place in the text is not its slot."""
    if chunks.ancestors_T is not None and (rule.window is not None or rule.chunk is not None):
        raise PerfmodelError(
            f"a tree of drafted tokens is not verified with window={rule.window}, chunk={rule.chunk}; draft a chain "
            f"instead."
        )


def first_visible(position: int, rule: AttentionRule) -> int:
    first = 0 if rule.window is None else max(0, position - rule.window + 1)
    return first if rule.chunk is None else max(first, position // rule.chunk * rule.chunk)


def visible(q_pos_T: Tensor, k_pos_L: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
    """Which keys each query sees: bool [T, L], causal and within the span."""
    q_pos = q_pos_T[:, None]
    mask_TL = k_pos_L <= q_pos
    if rule.window is not None:
        mask_TL &= k_pos_L > q_pos - rule.window
    if rule.chunk is not None:
        mask_TL &= k_pos_L >= torch.div(q_pos, rule.chunk, rounding_mode="floor") * rule.chunk
    return mask_TL


def attend(q_TNH: Tensor, k_KLH: Tensor, v_KLH: Tensor, mask_TL: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
    """softmax(q k^T / sqrt(H)) v over the keys that `mask` lets each query see, [T, N, H_v], as is fastest."""
    if len(q_TNH) > FEW_QUERIES or rule.has_terms:
        return attend_masked(q_TNH, k_KLH, v_KLH, mask_TL, rule)
    num_queries, num_heads, head_dim = q_TNH.shape
    group = num_heads // len(k_KLH)  # of query heads, which act as the rows of one query, as in decodes
    q_KRH = q_TNH.view(num_queries, -1, group, head_dim).transpose(0, 1).flatten(1, 2)
    mask_RL = mask_TL.repeat_interleave(group, 0)
    out_KRH = functional.scaled_dot_product_attention(q_KRH[None], k_KLH[None], v_KLH[None], attn_mask=mask_RL)
    out_TKGH = out_KRH[0].view(len(k_KLH), num_queries, group, -1).transpose(0, 1)
    return out_TKGH.reshape(num_queries, num_heads, -1)


def attend_masked(q_TNH: Tensor, k_KLH: Tensor, v_KLH: Tensor, mask_TL: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
    """The same by two products and a softmax in fp32."""
    num_queries, num_heads, head_dim = q_TNH.shape
    kv_heads, group = len(k_KLH), num_heads // len(k_KLH)
    q_KRH = q_TNH.view(num_queries, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = torch.bmm(q_KRH, k_KLH.transpose(1, 2)).float().mul_(1 / math.sqrt(head_dim))
    scores_KGTL = scores.view(kv_heads, group, num_queries, -1)
    if rule.cap is not None:
        scores_KGTL = rule.cap * torch.tanh(scores_KGTL / rule.cap)
    scores_KGTL.masked_fill_(~mask_TL, -math.inf)
    if rule.sinks_N is None:
        weights = torch.softmax(scores_KGTL, dim=-1)
    else:
        sinks = rule.sinks_N.float().view(kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
        weights = torch.softmax(torch.cat((scores_KGTL, sinks), dim=-1), dim=-1)[..., :-1]
    out_KRH = torch.bmm(weights.to(q_TNH.dtype).flatten(1, 2), v_KLH)
    return out_KRH.view(kv_heads, group, num_queries, -1).permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1)


# A tree of drafted tokens as bits of what each sees: 0 - 1 - 3 and 0 - 2 - 4, 2 - 5.
_TREE = [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100101]


def tiny(dtype: torch.dtype) -> list[Problem]:
    plain = [
        _problem([(9, 0), (2, 30), (40, 5)], (4, 2), (16, 24), dtype, dtype),
        _problem([(70, 3)], (3, 1), (20, 20), dtype, dtype, AttentionRule(window=21)),
        _problem([(50, 20)], (2, 2), (16, 16), dtype, dtype, AttentionRule(chunk=24)),
    ]
    others = [
        _problem([(33, 70)], (2, 1), (32, 16), dtype, kv_pages.FP8, page=32),
        _problem([(33, 70)], (2, 1), (16, 16), dtype, torch.int8),
        _problem([(6, 75), (6, 0)], (2, 1), (16, 16), dtype, dtype, tree=_TREE),
        _problem([(3, 75), (3, 0)], (2, 1), (16, 16), dtype, dtype, tree=_TREE[3:], num_above=3),
    ]
    return [*plain, *others, *tiny_with_terms(plain)]


def tiny_with_terms(plain: list[Problem]) -> list[Problem]:
    """Three problems, one with a cap, one with sinks, one with both."""
    return [with_terms(p, *terms) for p, terms in zip(plain, ((5.0, False), (None, True), (3.0, True)), strict=True)]


def serving() -> list[Problem]:
    bf16 = torch.bfloat16
    llama, wide = (32, 8), (64, 8)
    spans = [([(4096, 0)] * 4, llama), ([(8192, 0)], llama), ([(16384, 0)], llama), ([(1024, 0)] * 16, wide)]
    chunks = [([(2048, 14336)], llama), ([(512, 4096)] * 4, llama)]
    plain = [_problem(span, heads, (128, 128), bf16, bf16) for span, heads in spans + chunks]
    plain += [
        _problem([(8192, 0)], llama, (128, 128), bf16, bf16, AttentionRule(window=4096)),
        _problem([(8192, 0)], llama, (64, 64), bf16, bf16),
        _problem([(8192, 0)], (16, 8), (256, 256), bf16, bf16),
    ]
    quantised = [_problem(*chunks[0], (128, 128), bf16, kv) for kv in (kv_pages.FP8, torch.int8)]
    tree = _problem([(6, 8192)] * 32, llama, (128, 128), bf16, bf16, tree=_TREE)
    return [*plain, *quantised, tree, *(with_terms(problem, 50.0, False) for problem in plain[-4:])]


def with_terms(problem: Problem, cap: float | None, has_sinks: bool) -> Problem:
    """A plain problem of a decode or a prompt with a cap or sinks."""
    kind = problem.operator.removeprefix("attention_")

    def make(inputs: Inputs) -> tuple[Any, ...]:
        q, *others, rule = problem.make(inputs)
        sinks = inputs.normal(q.shape[1], dtype=q.dtype, scale=2.0) if has_sinks else None
        return q, *others, rule._replace(cap=cap, sinks_N=sinks)

    sizes = {**problem.sizes, "cap": cap or 0, "sinks": "yes" if has_sinks else "no"}
    return replace(problem, operator=f"attention_softmax_{kind}", sizes=sizes, make=make, baselines={})


def _problem(
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    rule: AttentionRule = PLAIN,
    page: int = 16,
    tree: list[int] | None = None,
    num_above: int = 0,
) -> Problem:
    """spans: (new tokens, computed before) of each chunk; tree: bits of its nodes, behind `num_above` others"""
    width = -(-max(new + done + num_above for new, done in spans) // page)
    starts = [sum(new for new, _ in spans[:i]) for i in range(len(spans) + 1)]

    def make(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs.normal(starts[-1], heads[0], dims[0], dtype=dtype)
        pages = kv_pages.random_pages(inputs, width * len(spans) + 1, page, heads[1], dims, dtype, kv_dtype)
        tables = kv_pages.shuffled_tables(inputs, len(spans), width)
        bits = inputs.of(tree * len(spans), torch.int64) if tree else None
        rows = (inputs.of(starts, torch.int64), inputs.of([done for _, done in spans], torch.int64))
        nodes = inputs.of([new + num_above for new, _ in spans], torch.int64) if num_above else None
        return q, pages, kv_pages.Chunks(tables, *rows, bits, nodes), rule

    size = Heads(*heads, *dims, kv_pages.NAMES[dtype], dtype.itemsize, kv_dtype.itemsize, *rule[:2])
    is_plain = kv_dtype == dtype and rule == PLAIN and tree is None and len(set(spans)) == 1
    return Problem(
        "attention_prefill",
        {"batch_size": len(spans), "isl": max(new for new, _ in spans), "step": max(done for _, done in spans),
         "num_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": dims[0], "v_head_dim": dims[1],
         "window_size": rule.window or 0, "chunk": rule.chunk or 0, "block_size": page, "tree": "yes" if tree else "no",
         "attn_dtype": kv_pages.NAMES[dtype], "kv_cache_dtype": kv_pages.NAMES[kv_dtype]},
        make,
        flash_prefill(list(spans), size),
        kv_pages.TOLERANCE[dtype],
        by_backend(_torch_attention) if is_plain else {},
    )  # fmt: skip


def _torch_attention(q_TNH: Tensor, pages: kv_pages.KVPages, chunks: kv_pages.Chunks, *_: object) -> Tensor:
    length = chunks.tables_GM.shape[1] * pages.block_size
    k_GKLH, v_GKLH = kv_pages.contiguous_kv(pages, chunks.tables_GM, length)
    q_GNTH = q_TNH.view(len(chunks.computed_G), -1, *q_TNH.shape[1:]).transpose(1, 2)
    how: dict[str, Any] = {"is_causal": True}
    if q_GNTH.shape[2] != length:
        from torch.nn.attention.bias import causal_lower_right

        how = {"attn_mask": causal_lower_right(q_GNTH.shape[2], length)}
    out = functional.scaled_dot_product_attention(q_GNTH, k_GKLH, v_GKLH, enable_gqa=True, **how)
    return out.transpose(1, 2).flatten(0, 1)
