"""Top-k routing in one kernel: every program holds some tokens' logits in registers and takes k maxima from them.
Renormalised over the chosen, softmax over all experts is softmax over the chosen alone: no sum over the others is
needed. Other rules score all experts first, and may leave only those of the best groups to choose from
(DeepSeek-V3). Of equal scores the lowest expert id comes first (the reference leaves their order open)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.moe import MIN_SUM, PLAIN_RULE, ExpertLayer, RoutingRule
from perfmodel_executors.kernels.tiles import TileConfig
from perfmodel_executors.kernels.triton.moe_products import grouped_down, grouped_up
from perfmodel_executors.kernels.triton.moe_tiles import ExpertRows, block_rows, tile_rows

_BLOCK_ELEMENTS = 2048  # logits that a program of four warps holds


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr, weights_ptr, experts_ptr, num_tokens, num_experts, row_stride,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    is_token = token < num_tokens
    at = token.to(tl.int64)[:, None] * row_stride + expert[None, :]
    is_expert = (expert < num_experts)[None, :]
    left = tl.load(logits_ptr + at, mask=is_token[:, None] & is_expert, other=0.0).to(tl.float32)
    left = tl.where(is_expert, left, float("-inf"))
    values = tl.full([BLOCK_T, CHOICES], float("-inf"), tl.float32)
    ids = tl.zeros([BLOCK_T, CHOICES], tl.int32)
    for i in tl.static_range(TOP_K):
        value, index = tl.max(left, axis=1, return_indices=True, return_indices_tie_break_left=True)
        is_now = (choice == i)[None, :]
        values = tl.where(is_now, value[:, None], values)
        ids = tl.where(is_now, index[:, None], ids)
        left = tl.where(expert[None, :] == index[:, None], float("-inf"), left)
    shares = tl.exp(values - tl.max(values, axis=1)[:, None])
    weights = shares / tl.sum(shares, axis=1)[:, None]
    at = token[:, None] * TOP_K + choice[None, :]
    mask = is_token[:, None] & (choice < TOP_K)[None, :]
    tl.store(weights_ptr + at, weights, mask=mask)
    tl.store(experts_ptr + at, ids.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_by_rule_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, num_tokens, members, row_stride, scale,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
    TOP_K_GROUPS: tl.constexpr, SCORING: tl.constexpr, BY_TWO: tl.constexpr, RENORMALIZES: tl.constexpr,
    BLOCK_T: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    place = tl.arange(0, GROUPS * MEMBERS)
    group, member = place // MEMBERS, place % MEMBERS
    choice = tl.arange(0, CHOICES)
    is_token = token < num_tokens
    is_expert = ((group < NUM_GROUPS) & (member < members))[None, :]
    expert = group * members + member
    at = token.to(tl.int64)[:, None] * row_stride + expert[None, :]
    logits = tl.load(logits_ptr + at, mask=is_token[:, None] & is_expert, other=0.0).to(tl.float32)
    if SCORING == "softmax":
        logits = tl.where(is_expert, logits, float("-inf"))
        shares = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = shares / tl.sum(shares, axis=1)[:, None]
    else:
        scores = tl.sigmoid(logits)
    left = scores
    if bias_ptr is not None:
        left += tl.load(bias_ptr + expert, mask=(group < NUM_GROUPS) & (member < members), other=0.0)[None, :]
    left = tl.where(is_expert, left, float("-inf"))
    if NUM_GROUPS > 1:
        by_group = tl.reshape(left, (BLOCK_T, GROUPS, MEMBERS))
        best, index = tl.max(by_group, axis=2, return_indices=True, return_indices_tie_break_left=True)
        if BY_TWO:
            is_best = tl.arange(0, MEMBERS)[None, None, :] == index[:, :, None]
            best += tl.max(tl.where(is_best, float("-inf"), by_group), axis=2)
        number = tl.arange(0, GROUPS)[None, :]
        best = tl.where(number < NUM_GROUPS, best, float("-inf"))
        is_kept = tl.zeros([BLOCK_T, GROUPS], tl.int32)
        for _ in tl.static_range(TOP_K_GROUPS):
            _, index = tl.max(best, axis=1, return_indices=True, return_indices_tie_break_left=True)
            is_now = number == index[:, None]
            is_kept = tl.where(is_now, 1, is_kept)
            best = tl.where(is_now, float("-inf"), best)
        by_group = tl.where(is_kept[:, :, None] > 0, by_group, float("-inf"))
        left = tl.reshape(by_group, (BLOCK_T, GROUPS * MEMBERS))
    values = tl.zeros([BLOCK_T, CHOICES], tl.float32)
    ids = tl.zeros([BLOCK_T, CHOICES], tl.int32)
    for i in tl.static_range(TOP_K):
        _, index = tl.max(left, axis=1, return_indices=True, return_indices_tie_break_left=True)
        is_it = place[None, :] == index[:, None]
        is_now = (choice == i)[None, :]
        values = tl.where(is_now, tl.sum(tl.where(is_it, scores, 0.0), axis=1)[:, None], values)
        ids = tl.where(is_now, (index // MEMBERS * members + index % MEMBERS)[:, None], ids)
        left = tl.where(is_it, float("-inf"), left)
    if RENORMALIZES:
        values = values / (tl.sum(values, axis=1)[:, None] + LEAST)
    at = token[:, None] * TOP_K + choice[None, :]
    mask = is_token[:, None] & (choice < TOP_K)[None, :]
    tl.store(weights_ptr + at, values * scale, mask=mask)
    tl.store(experts_ptr + at, ids.to(tl.int64), mask=mask)


def route(
    logits_TE: Tensor, top_k: int, rule: RoutingRule = PLAIN_RULE, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits_TE.shape
    weights_TX = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    experts_TX = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    members = num_experts // rule.num_groups
    groups, width = triton.next_power_of_2(rule.num_groups), max(2, triton.next_power_of_2(members))
    rows = max(1, min(8, triton.next_power_of_2(num_tokens), _BLOCK_ELEMENTS // (groups * width)))
    grid, options = (triton.cdiv(num_tokens, rows),), Options(max(1, min(4, rows * groups * width // 256)), 1)
    sizes = {"TOP_K": top_k, "CHOICES": triton.next_power_of_2(top_k), "BLOCK_T": rows}
    if rule == PLAIN_RULE and bias_E is None:
        args = (logits_TE, weights_TX, experts_TX, num_tokens, num_experts, logits_TE.stride(0))
        launch(_route_kernel, grid, *args, options=options, **sizes, EXPERTS=width)
        return weights_TX, experts_TX
    launch(
        _route_by_rule_kernel, grid,
        logits_TE, bias_E, weights_TX, experts_TX, num_tokens, members, logits_TE.stride(0), float(rule.scale),
        options=options, **sizes, NUM_GROUPS=rule.num_groups, GROUPS=groups, MEMBERS=width,
        TOP_K_GROUPS=rule.top_k_groups, SCORING=rule.scoring, BY_TWO=rule.groups_by == "top2",
        RENORMALIZES=rule.renormalizes, LEAST=MIN_SUM,
    )  # fmt: skip
    return weights_TX, experts_TX


def grouped_experts(
    x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer, config: TileConfig | None = None
) -> Tensor:
    """sum over each token's experts of weight * down(act(up(x))), [T, C]; accumulated in fp32. A token's ids are
    distinct; columns of x and of the weights are contiguous."""
    (num_tokens, top_k), num_experts = experts_TX.shape, layer.up_EFC.shape[0]
    rows = config.sizes["BLOCK_M"] if config else block_rows(num_tokens, num_experts, top_k, layer.up_EFC)
    placement = ExpertRows(experts_TX, num_experts, rows)
    return grouped_down(grouped_up(x_TC, placement, layer, config), weights_TX, placement, layer, config)


def capacity_experts(x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer, num_rows: int) -> Tensor:
    """As `grouped_experts`, where every expert multiplies `num_rows` rows; what exceeds them adds nothing."""
    placement = ExpertRows(experts_TX, layer.up_EFC.shape[0], tile_rows(num_rows, layer.up_EFC), num_rows)
    return grouped_down(grouped_up(x_TC, placement, layer), weights_TX, placement, layer)
