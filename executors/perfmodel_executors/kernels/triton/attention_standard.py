"""Causal attention in three kernels, the scores S and the weights P in memory between them.

    HBM bytes = b (Q + K + V + O) + 4 b N T L      S written and read, P written and read (in place of S)

The masked half is computed and thrown away. Source: Dao et al. 2022, algorithm 0.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import TileConfig, padded, pick, pipelined_bytes

_TILES = ((128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3), (32, 32, 4, 1))  # rows, keys, warps, stages
_CANDIDATES = [TileConfig({"ROWS": rows, "KEYS": keys}, Options(*options)) for rows, keys, *options in _TILES]


@triton.jit
def _scores_kernel(
    q_ptr, k_ptr, scores_ptr, num_queries, num_keys, scale, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    H_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, H_PAD)
    is_row, is_key, is_column = row < num_queries, key < num_keys, column < H
    q_pointers = q_ptr + (row.to(tl.int64) * (N * H) + head * H)[:, None] + column[None, :]
    q = tl.load(q_pointers, mask=is_row[:, None] & is_column[None, :], other=0.0)
    k_pointers = k_ptr + (key.to(tl.int64) * (K * H) + head // (N // K) * H)[:, None] + column[None, :]
    k = tl.load(k_pointers, mask=is_key[:, None] & is_column[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(key[None, :] <= row[:, None] + (num_keys - num_queries), scores, -float("inf"))
    target = scores_ptr + (head.to(tl.int64) * num_queries + row)[:, None] * num_keys + key[None, :]
    tl.store(target, scores.to(scores_ptr.dtype.element_ty), mask=is_row[:, None] & is_key[None, :])


@triton.jit
def _softmax_kernel(scores_ptr, num_keys, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    pointers = scores_ptr + tl.program_id(0).to(tl.int64) * num_keys + column
    x = tl.load(pointers, mask=column < num_keys, other=-float("inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    tl.store(pointers, weights.to(scores_ptr.dtype.element_ty), mask=column < num_keys)


@triton.jit
def _values_kernel(
    weights_ptr, v_ptr, out_ptr, num_queries, num_keys, N: tl.constexpr, K: tl.constexpr, HV: tl.constexpr,
    V_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_queries
    column = tl.arange(0, V_PAD)
    is_column = column < HV
    weights_row = weights_ptr + (head.to(tl.int64) * num_queries + row)[:, None] * num_keys
    acc = tl.zeros([ROWS, V_PAD], tl.float32)
    for start in range(0, num_keys, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < num_keys
        weights = tl.load(weights_row + key[None, :], mask=is_row[:, None] & is_key[None, :], other=0.0)
        v_pointers = v_ptr + (key.to(tl.int64) * (K * HV) + head // (N // K) * HV)[:, None] + column[None, :]
        v = tl.load(v_pointers, mask=is_key[:, None] & is_column[None, :], other=0.0)
        acc = tl.dot(weights, v, acc, input_precision="ieee")
    target = out_ptr + (row.to(tl.int64) * (N * HV) + head * HV)[:, None] + column[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def attention_standard(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, *, config: TileConfig | None = None) -> Tensor:
    (num_queries, num_heads, head_dim), (num_keys, kv_heads, v_dim) = q_TNH.shape, v_LKH.shape
    q_TNH, k_LKH, v_LKH = q_TNH.contiguous(), k_LKH.contiguous(), v_LKH.contiguous()
    scores_NTL = q_TNH.new_empty(num_heads, num_queries, num_keys)
    out_TNH = q_TNH.new_empty(num_queries, num_heads, v_dim)
    heads = {"N": num_heads, "K": kv_heads}
    block = triton.next_power_of_2(num_keys)

    def run(config: TileConfig) -> None:
        rows, keys = (triton.cdiv(n, config.sizes[name]) for n, name in ((num_queries, "ROWS"), (num_keys, "KEYS")))
        sizes = (num_queries, num_keys)
        launch(
            _scores_kernel, (keys, rows, num_heads), q_TNH, k_LKH, scores_NTL, *sizes, 1 / math.sqrt(head_dim),
            options=config.options, **heads, H=head_dim, H_PAD=padded(head_dim), **config.sizes,
        )  # fmt: skip
        options = Options(num_warps=max(1, min(16, block // 512)), num_stages=1)
        launch(_softmax_kernel, (num_heads * num_queries,), scores_NTL, num_keys, options=options, BLOCK=block)
        launch(
            _values_kernel, (rows, num_heads), scores_NTL, v_LKH, out_TNH, *sizes,
            options=config.options, **heads, HV=v_dim, V_PAD=padded(v_dim), **config.sizes,
        )  # fmt: skip

    widths = (padded(head_dim), padded(v_dim))

    def needed(config: TileConfig, capability: int) -> int:
        rows, keys = config.sizes["ROWS"], config.sizes["KEYS"]
        pipeline = pipelined_bytes(keys * (rows + widths[1]) * q_TNH.dtype.itemsize, config, capability)
        return max((rows + keys) * widths[0] * q_TNH.dtype.itemsize, pipeline) + 4096

    problem = (*(n.bit_length() for n in (num_queries, num_keys)), *heads.values(), *widths, q_TNH.dtype)
    run(config or pick("attention_standard", problem, lambda: _CANDIDATES, needed, run, q_TNH.device))
    return out_TNH
