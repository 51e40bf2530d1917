"""Mixtures of experts from one decoding token to a prefill chunk: Mixtral, Qwen3-30B-A3B, and one of fine experts."""

__all__ = ["serving", "tiny"]

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from perfmodel.models.architecture import MoEFFN
from perfmodel.models.cards import load_model
from perfmodel.ops.feedforward import experts as experts_work
from perfmodel.ops.feedforward import route as route_work
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.routing import TILE_ROWS, ExpertLoad
from perfmodel_executors.kernels.moe.layer import ExpertLayer
from perfmodel_executors.kernels.moe.library import EXPERTS_BY_LIBRARY
from perfmodel_executors.kernels.moe.reference import route as reference_route
from perfmodel_executors.kernels.moe.rule import PLAIN_RULE, RoutingRule
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.weight_formats import ExpertWeight
from perfmodel_executors.kernels.weight_formats.samples import FORMATS

_GROUPED = RoutingRule("sigmoid", scale=2.5, num_groups=8, top_k_groups=4, groups_by="top2")  # DeepSeek-V3

_Choices = list[list[int]]  # each token's experts

_BF16 = LinearFormat("bf16", 2.0, 2.0, 2.0)
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # the reference rounds every product
# Where activations are quantised: of a value on the edge, either code may be taken, before each product.
_TOLERANCE_8_BITS = {torch.float32: 1e-2, torch.float16: 4e-2, torch.bfloat16: 4e-2}
_MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite")
_TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
_STORED_FORMATS = ("int8_wo", "int4_wo", "fp8", "fp8_block", "w4a16_mxfp4")
_STORED_TOKENS = (1, 4, 16, 64, 1024)


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Odd sizes: one token, a few in one tile each, and more than the tile that needs no sorting."""
    shapes = ((1, MoEFFN(4, 2, 24)), (5, MoEFFN(9, 3, 20, gated=False, activation="relu2")), (19, MoEFFN(3, 1, 33)))
    grouped = _GROUPED._replace(num_groups=3, top_k_groups=2)  # of a number that is no power of two
    rules = (grouped, grouped._replace(groups_by="max", scoring="softmax"), RoutingRule(renormalizes=False))
    routes = [_route(*size, dtype) for size in ((1, 4, 2), (5, 60, 4), (3, 512, 10))]
    routes += [_route(9, 60, 6, dtype, rule, bool(n % 2)) for n, rule in enumerate(rules)]
    biased = [(tokens, replace(ffn, bias=True, activation="swiglu_oai", gated=True)) for tokens, ffn in shapes]
    plain = [_experts(tokens, 40, ffn, dtype) for tokens, ffn in (*shapes, *biased)]
    stored = [
        _experts(tokens, width, ffn, dtype, form=form)
        for form, tokens, width, ffn in (
            ("int8_wo", 1, 40, shapes[0][1]),
            ("int8_wo", 5, 40, shapes[1][1]),
            ("int4_wo_32", 5, 64, MoEFFN(9, 3, 32)),
            ("int4_wo_zeros", 19, 64, MoEFFN(3, 1, 64, gated=False, activation="gelu")),
            ("fp8_wo", 19, 40, shapes[2][1]),
            ("fp8", 5, 40, shapes[0][1]),
            ("int8", 19, 40, shapes[2][1]),
            ("int8_wo", 5, 40, biased[1][1]),
            ("w4a16_mxfp4", 5, 64, MoEFFN(4, 2, 64, activation="swiglu_oai", bias=True)),
            ("w4a16_nvfp4", 19, 64, MoEFFN(3, 1, 64)),
            ("fp8_block", 5, 128, MoEFFN(4, 2, 128)),
        )
    ]
    return [*routes, *plain, *stored]


def serving() -> list[Problem]:
    """Decode batches, whose time is the weights of the experts they touch, and chunks."""
    blocks = [_block(name) for name in _MODELS]
    products = [
        _experts(tokens, width, ffn, torch.bfloat16, _balanced(tokens, ffn.num_experts, ffn.top_k))
        for width, ffn in blocks
        for tokens in _TOKENS
    ]
    stored = [
        _experts(tokens, width, ffn, torch.bfloat16, _balanced(tokens, ffn.num_experts, ffn.top_k), form)
        for tokens in _STORED_TOKENS
        for width, ffn in blocks
        for form in _STORED_FORMATS
    ]
    # Routers' logits are fp32 as the cost model counts them.
    routes = [_route(t, ffn.num_experts, ffn.top_k, torch.float32) for _, ffn in blocks for t in (1, 64, 4096)]
    routes += [_route(t, 256, 8, torch.float32, _GROUPED, has_bias=True) for t in (1, 64, 4096)]
    return [*products, *stored, *routes]


def _block(model: str) -> tuple[int, MoEFFN]:
    """Width and feed-forward block of a model's MoE layers."""
    spec = load_model(model)
    return spec.hidden_size, next(layer.ffn for layer, _ in spec.layers if isinstance(layer.ffn, MoEFFN))


def _logits(inputs: Inputs, tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """No two of a row alike, in any dtype: which of equals is taken first is left open. Spread over 8."""
    order = inputs.normal(tokens, num_experts, dtype=torch.float32).argsort(dim=-1)
    return ((order - num_experts // 2) * (8.0 / num_experts)).to(dtype)  # all different in bf16, too


def _route(
    tokens: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    rule: RoutingRule = PLAIN_RULE,
    has_bias: bool = False,
) -> Problem:
    def make(inputs: Inputs) -> tuple[Tensor | int | RoutingRule | None, ...]:
        logits = _logits(inputs, tokens, num_experts, dtype)
        bias = inputs.normal(num_experts, dtype=torch.float32, scale=0.05) if has_bias else None
        return logits, top_k, rule, bias

    sizes: dict[str, int | float | str] = {"num_tokens": tokens, "num_experts": num_experts, "topk": top_k}
    if rule != PLAIN_RULE:
        sizes |= {"num_groups": rule.num_groups, "scoring": rule.scoring, "renormalizes": int(rule.renormalizes)}
    work = route_work(tokens, num_experts, top_k)
    return Problem("route", sizes, make, work, 1e-5, {"torch": reference_route})


def _balanced(tokens: int, num_experts: int, top_k: int) -> _Choices:
    """Each token's experts, as tables of measured kernels have them under "balanced" (`calibrate.expert_load`)."""
    stride = -(-num_experts // top_k)
    first = [token if tokens >= stride else token * stride // tokens for token in range(tokens)]
    return [[(begin + choice * stride) % num_experts for choice in range(top_k)] for begin in first]


def _load(chosen: _Choices) -> ExpertLoad:
    rows = Counter(expert for token in chosen for expert in token).values()
    tiles = tuple(float(sum(-(-count // size) for count in rows)) for size in TILE_ROWS)
    return ExpertLoad(len(rows), sum(rows), tiles)


def _experts(
    tokens: int,
    width: int,
    ffn: MoEFFN,
    dtype: torch.dtype,
    chosen: _Choices | None = None,
    form: str | None = None,
) -> Problem:
    """A problem with the experts `chosen`, else random (and no work counted); form: format of weights, None plain."""
    inner, rows = ffn.intermediate_size, ffn.intermediate_size * (2 if ffn.gated else 1)

    def matrices(inputs: Inputs, n: int, k: int) -> Tensor | ExpertWeight:
        if form is None:
            return inputs.normal(ffn.num_experts, n, k, dtype=dtype, scale=k**-0.5)
        return ExpertWeight(FORMATS[form].make(inputs, ffn.num_experts * n, k, dtype), ffn.num_experts)

    def bias(inputs: Inputs, n: int) -> Tensor | None:
        return inputs.normal(ffn.num_experts, n, dtype=dtype) if ffn.bias else None

    def make(inputs: Inputs) -> tuple[Tensor | ExpertLayer, ...]:
        weights, experts = reference_route(_logits(inputs, tokens, ffn.num_experts, torch.float32), ffn.top_k)
        return (
            inputs.normal(tokens, width, dtype=dtype),
            weights,
            inputs.of(chosen, torch.int64) if chosen else experts,
            ExpertLayer(
                matrices(inputs, rows, width),
                matrices(inputs, width, inner),
                ffn.activation,
                ffn.gated,
                bias(inputs, rows),
                bias(inputs, width),
            ),
        )

    sizes = {
        "num_tokens": tokens,
        "hidden_size": width,
        "inter_size": inner,
        "topk": ffn.top_k,
        "num_experts": ffn.num_experts,
        "moe_tp_size": 1,
        "moe_ep_size": 1,
        "distribution": "balanced" if chosen else "random",
        "moe_dtype": form or str(dtype).removeprefix("torch."),
        "dtype": str(dtype).removeprefix("torch."),
    }
    counted = FORMATS[form].form if form else _BF16
    work = experts_work(tokens, ffn, _load(chosen), counted, width=width, intermediate=inner) if chosen else None
    tolerance = (_TOLERANCE_8_BITS if counted.quantizes_input else _TOLERANCE)[dtype]
    return Problem("grouped_experts", sizes, make, work, tolerance, EXPERTS_BY_LIBRARY)
