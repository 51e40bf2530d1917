"""Mixture of experts: routing, then each touched expert on its own tokens, by its format's linear layer. The time of
the grouped experts is a sum over distinct experts of (a constant + their weights), plus the tokens."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.models.architecture import MoEFFN
from perfmodel.models.cards import load_model
from perfmodel.ops.feedforward import experts as experts_work
from perfmodel.ops.feedforward import route as route_work
from perfmodel.ops.routing import TILE_ROWS, ExpertLoad
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.dispatch import load_kernels
from perfmodel_executors.kernels.linear import BF16, FORMATS, dense_weight
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.stored_rows import ExpertWeight
from perfmodel_executors.kernels.swiglu import activate

MIN_SUM = 1e-20  # of scores, before weights are divided by it (DeepSeek-V3)


class RoutingRule(NamedTuple):
    """scoring: softmax over all experts, or the sigmoid of each; renormalizes: weights of the chosen are divided by
    their sum, then multiplied by `scale`. A token's experts are in the best `top_k_groups` of `num_groups` neighbours,
    by their best expert (groups_by max) or the sum of their best two (top2)."""

    scoring: str = "softmax"
    renormalizes: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    groups_by: str = "max"


PLAIN_RULE = RoutingRule()


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """down(act(up(x))) for each expert, in the activations of a `Kernels.activate`. up_EFC: [gate | up] if gated, where
    the activated half multiplies the other; biases: added behind either product (gpt-oss); None: without."""

    up_EFC: Tensor | ExpertWeight
    down_ECI: Tensor | ExpertWeight
    activation: str = "silu"
    gated: bool = True
    up_bias_EF: Tensor | None = None
    down_bias_EC: Tensor | None = None


_torch_kernels = cache(load_kernels)


def route(
    logits_TE: Tensor, top_k: int, rule: RoutingRule = PLAIN_RULE, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights, expert ids), both [T, top_k], by the model's rule; bias_E is added to the scores for the choice."""
    logits_TE = logits_TE.float()
    scores_TE = torch.softmax(logits_TE, dim=-1) if rule.scoring == "softmax" else torch.sigmoid(logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.num_groups > 1:  # experts of other groups than the best are not chosen
        members_TGM = choice_TE.view(len(choice_TE), rule.num_groups, -1)
        num_best = 1 if rule.groups_by == "max" else 2
        groups_TG = members_TGM.topk(num_best, dim=-1).values.sum(dim=-1)
        best = torch.topk(groups_TG, rule.top_k_groups, dim=-1).indices
        is_best_TG = torch.zeros_like(groups_TG, dtype=torch.bool).scatter_(1, best, True)
        choice_TE = members_TGM.masked_fill(~is_best_TG[..., None], -math.inf).flatten(1)
    experts_TX = torch.topk(choice_TE, top_k, dim=-1).indices
    weights_TX = scores_TE.gather(1, experts_TX)
    if rule.renormalizes:
        weights_TX = weights_TX / (weights_TX.sum(dim=-1, keepdim=True) + MIN_SUM)
    return weights_TX * rule.scale, experts_TX


def grouped_experts(x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer) -> Tensor:
    """sum over each token's experts of weight * down(act(up(x))), [T, C]; accumulated in x's dtype."""
    top_k = experts_TX.shape[1]
    order = torch.argsort(experts_TX.flatten(), stable=True)
    tokens = torch.div(order, top_k, rounding_mode="floor")
    counts: list[int] = torch.bincount(experts_TX.flatten(), minlength=layer.up_EFC.shape[0]).tolist()
    x_sorted = x_TC[tokens]
    y_sorted = torch.empty_like(x_sorted)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(begin, begin + count)
            y_sorted[rows] = _expert(x_sorted[rows], layer, expert)
            begin += count
    y_sorted *= weights_TX.flatten()[order, None].to(y_sorted.dtype)
    return torch.zeros_like(x_TC).index_add_(0, tokens, y_sorted)


def _expert(x_RC: Tensor, layer: ExpertLayer, expert: int) -> Tensor:
    up_bias_F, down_bias_C = (b if b is None else b[expert] for b in (layer.up_bias_EF, layer.down_bias_EC))
    up = apply_linear(_torch_kernels(), x_RC, layer.up_EFC[expert], up_bias_F)
    hidden = activate(up, layer.activation, layer.gated)
    return apply_linear(_torch_kernels(), hidden, layer.down_ECI[expert], down_bias_C)


def capacity_experts(x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer, num_rows: int) -> Tensor:
    """As `grouped_experts`, where every expert multiplies `num_rows` rows: padded with zeros; what exceeds them adds
    nothing, first choices first. Source: Lepikhin et al. 2020 (GShard), algorithm 1."""
    num_experts = layer.up_EFC.shape[0]
    experts_A = experts_TX.T.flatten()
    order_A = torch.argsort(experts_A, stable=True)
    sorted_A = experts_A[order_A]
    starts_E = torch.bincount(experts_A, minlength=num_experts).cumsum(0).roll(1)
    starts_E[0] = 0
    places_A = torch.arange(len(order_A), device=order_A.device) - starts_E[sorted_A]
    has_room_A = places_A < num_rows
    last = num_experts * num_rows  # a row behind the buffers, for what has no room
    slots_A = torch.where(has_room_A, sorted_A * num_rows + places_A, last)
    tokens_A = order_A % len(x_TC)
    buffers_RC = x_TC.new_zeros(last + 1, x_TC.shape[1])
    buffers_RC[slots_A] = x_TC[tokens_A]
    outputs_RC = torch.zeros_like(buffers_RC)
    for expert in range(num_experts):
        rows = slice(expert * num_rows, (expert + 1) * num_rows)
        outputs_RC[rows] = _expert(buffers_RC[rows], layer, expert)
    shares_A = torch.where(has_room_A, weights_TX.T.flatten()[order_A], 0.0)
    parts_AC = outputs_RC[slots_A] * shares_A[:, None].to(x_TC.dtype)
    return torch.zeros_like(x_TC).index_add_(0, tokens_A, parts_AC)


def _loop(x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer) -> Tensor:
    """BLAS calls over the touched experts; asks the device how many rows each has."""
    up_EFC, down_ECI = _dense(layer, x_TC.dtype)
    return grouped_experts(x_TC, weights_TX, experts_TX, replace(layer, up_EFC=up_EFC, down_ECI=down_ECI))


def _grouped(x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer) -> Tensor:
    """Grouped products (torch >= 2.11, bf16, experts without biases), for which the host need not know."""
    up_EFC, down_ECI = _dense(layer, x_TC.dtype)
    num_tokens, top_k = experts_TX.shape
    ids, order = torch.sort(experts_TX.flatten(), stable=True)
    experts = torch.arange(up_EFC.shape[0], device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    rows = x_TC[torch.div(order, top_k, rounding_mode="floor")]
    hidden = activate(functional.grouped_mm(rows, up_EFC.transpose(1, 2), offs=ends), layer.activation, layer.gated)
    y_sorted = functional.grouped_mm(hidden, down_ECI.transpose(1, 2), offs=ends)
    y_AC = torch.empty_like(y_sorted).index_copy_(0, order, y_sorted).view(num_tokens, top_k, -1)
    return torch.bmm(weights_TX.to(y_AC.dtype)[:, None], y_AC)[:, 0]


EXPERTS_BY_LIBRARY: Mapping[str, Callable[..., Tensor]] = {"grouped_mm": _grouped, "loop": _loop}


def _dense(layer: ExpertLayer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Matrices of both products; experts in fewer bits are dequantised at their first call."""
    up, down = (
        dense_weight(weight.stacked, dtype).view(weight.shape) if isinstance(weight, ExpertWeight) else weight
        for weight in (layer.up_EFC, layer.down_ECI)
    )
    return up, down


_GROUPED = RoutingRule("sigmoid", scale=2.5, num_groups=8, top_k_groups=4, groups_by="top2")  # DeepSeek-V3

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # the reference rounds every product
# Where activations are quantised: of a value on the edge, either code may be taken, before each product.
_TOLERANCE_8_BITS = {torch.float32: 1e-2, torch.float16: 4e-2, torch.bfloat16: 4e-2}
_MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite")
_TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
_STORED_FORMATS = ("int8_wo", "int4_wo", "fp8", "fp8_block", "w4a16_mxfp4")
_STORED_TOKENS = (1, 4, 16, 64, 1024)


def tiny(dtype: torch.dtype) -> list[Problem]:
    shapes = ((1, MoEFFN(4, 2, 24)), (5, MoEFFN(9, 3, 20, gated=False, activation="relu2")), (19, MoEFFN(3, 1, 33)))
    grouped = _GROUPED._replace(num_groups=3, top_k_groups=2)  # of a number that is no power of two
    rules = (grouped, grouped._replace(groups_by="max", scoring="softmax"), RoutingRule(renormalizes=False))
    routes = [_route(*size, dtype) for size in ((1, 4, 2), (5, 60, 4), (3, 512, 10))]
    routes += [_route(9, 60, 6, dtype, rule, bool(n % 2)) for n, rule in enumerate(rules)]
    biased = [(tokens, replace(ffn, bias=True, activation="swiglu_oai", gated=True)) for tokens, ffn in shapes]
    plain = [_experts(tokens, 40, ffn, dtype) for tokens, ffn in (*shapes, *biased)]
    small, wide = shapes[0][1], MoEFFN(3, 1, 64)
    stored = (
        ("int8_wo", 1, 40, small),
        ("int8_wo", 5, 40, shapes[1][1]),
        ("int4_wo_32", 5, 64, MoEFFN(9, 3, 32)),
        ("int4_wo_zeros", 19, 64, replace(wide, gated=False, activation="gelu")),
        ("fp8_wo", 19, 40, shapes[2][1]),
        ("fp8", 5, 40, small),
        ("int8", 19, 40, shapes[2][1]),
        ("int8_wo", 5, 40, biased[1][1]),
        ("w4a16_mxfp4", 5, 64, MoEFFN(4, 2, 64, activation="swiglu_oai", bias=True)),
        ("w4a16_nvfp4", 19, 64, wide),
        ("fp8_block", 5, 128, MoEFFN(4, 2, 128)),
    )
    kept = [_capped(plain[number], rows) for number, rows in ((0, 1), (1, 1), (2, 5), (4, 2), (5, 20))]
    in_formats = [_experts(tokens, width, ffn, dtype, form) for form, tokens, width, ffn in stored]
    return [*routes, *plain, *kept, *in_formats]


def serving() -> list[Problem]:
    blocks = [
        (model.hidden_size, next(layer.ffn for layer, _ in model.layers if isinstance(layer.ffn, MoEFFN)))
        for model in map(load_model, _MODELS)
    ]
    bf16, stored = torch.bfloat16, product(_STORED_TOKENS, blocks, _STORED_FORMATS)
    products = [_experts(tokens, *block, bf16, is_balanced=True) for block in blocks for tokens in _TOKENS]
    products += [_experts(tokens, *block, bf16, form, is_balanced=True) for tokens, block, form in stored]
    # Routers' logits are fp32 as the cost model counts them.
    routes = [_route(t, ffn.num_experts, ffn.top_k, torch.float32) for _, ffn in blocks for t in (1, 64, 4096)]
    routes += [_route(t, 256, 8, torch.float32, _GROUPED, has_bias=True) for t in (1, 64, 4096)]
    # A quarter more rows than balanced experts have, of 1,024 tokens.
    return [*products, *routes, _capped(products[_TOKENS.index(1024)], 80)]


def _logits(inputs: Inputs, tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """No two of a row alike, in any dtype: which of equals is taken first is left open. Spread over 8."""
    order = inputs.normal(tokens, num_experts, dtype=torch.float32).argsort(dim=-1)
    return ((order - num_experts // 2) * (8.0 / num_experts)).to(dtype)  # all different in bf16, too


def _route(
    rows: int, num_experts: int, top_k: int, dtype: torch.dtype, rule: RoutingRule = PLAIN_RULE, has_bias: bool = False
) -> Problem:
    def make(inputs: Inputs) -> tuple[Tensor | int | RoutingRule | None, ...]:
        logits = _logits(inputs, rows, num_experts, dtype)
        bias = inputs.normal(num_experts, dtype=torch.float32, scale=0.05) if has_bias else None
        return logits, top_k, rule, bias

    sizes: dict[str, int | float | str] = {"num_tokens": rows, "num_experts": num_experts, "topk": top_k}
    if rule != PLAIN_RULE:
        sizes |= {"num_groups": rule.num_groups, "scoring": rule.scoring, "renormalizes": int(rule.renormalizes)}
    work = route_work(rows, num_experts, top_k)
    return Problem("route", sizes, make, work, 1e-5, {"torch": route})


def _balanced(tokens: int, num_experts: int, top_k: int) -> list[list[int]]:
    """Each token's experts, as tables of measured kernels have them under "balanced" (`calibrate.expert_load`)."""
    stride = -(-num_experts // top_k)
    first = [token if tokens >= stride else token * stride // tokens for token in range(tokens)]
    return [[(begin + choice * stride) % num_experts for choice in range(top_k)] for begin in first]


def _capped(problem: Problem, num_rows: int) -> Problem:
    """The same tokens, where each expert multiplies `num_rows` rows; no work counted."""
    sizes = {**problem.sizes, "rows": num_rows}
    make = lambda inputs: (*problem.make(inputs), num_rows)  # noqa: E731
    return Problem("capacity_experts", sizes, make, tolerance=problem.tolerance)


def _experts(
    tokens: int, width: int, ffn: MoEFFN, dtype: torch.dtype, form: str | None = None, is_balanced: bool = False
) -> Problem:
    """A problem with balanced experts, else random ones (and no work counted); form: of weights, None: plain."""
    chosen = _balanced(tokens, ffn.num_experts, ffn.top_k) if is_balanced else None
    inner, rows = ffn.intermediate_size, ffn.intermediate_size * (2 if ffn.gated else 1)

    def matrices(inputs: Inputs, n: int, k: int) -> Tensor | ExpertWeight:
        if form is None:
            return inputs.normal(ffn.num_experts, n, k, dtype=dtype, scale=k**-0.5)
        return ExpertWeight(FORMATS[form].make(inputs, ffn.num_experts * n, k, dtype), ffn.num_experts)

    def bias(inputs: Inputs, n: int) -> Tensor | None:
        return inputs.normal(ffn.num_experts, n, dtype=dtype) if ffn.bias else None

    def make(inputs: Inputs) -> tuple[Tensor | ExpertLayer, ...]:
        weights, experts = route(_logits(inputs, tokens, ffn.num_experts, torch.float32), ffn.top_k)
        x = inputs.normal(tokens, width, dtype=dtype)
        experts = inputs.of(chosen, torch.int64) if chosen else experts
        up, down = matrices(inputs, rows, width), matrices(inputs, width, inner)
        biases = (bias(inputs, rows), bias(inputs, width))
        return x, weights, experts, ExpertLayer(up, down, ffn.activation, ffn.gated, *biases)

    name = str(dtype).removeprefix("torch.")
    sizes = {"num_tokens": tokens, "hidden_size": width, "inter_size": inner, "topk": ffn.top_k,
             "num_experts": ffn.num_experts, "moe_tp_size": 1, "moe_ep_size": 1,
             "distribution": "balanced" if chosen else "random", "moe_dtype": form or name, "dtype": name}  # fmt: skip
    counted, work = FORMATS[form].form if form else BF16, None
    if chosen:
        counts = Counter(expert for token in chosen for expert in token).values()
        tiles = tuple(float(sum(-(-count // size) for count in counts)) for size in TILE_ROWS)
        load = ExpertLoad(len(counts), sum(counts), tiles)
        work = experts_work(tokens, ffn, load, counted, width=width, intermediate=inner)
    tolerance = (_TOLERANCE_8_BITS if counted.quantizes_input else _TOLERANCE)[dtype]
    return Problem("grouped_experts", sizes, make, work, tolerance, EXPERTS_BY_LIBRARY)
