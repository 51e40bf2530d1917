"""Mixtures of experts from one decoding token to a prefill chunk: Mixtral, Qwen3-30B-A3B, and one of fine experts."""

__all__ = ["serving", "tiny"]

from collections import Counter

import torch
from torch import Tensor

from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.moe import experts as experts_work
from perfmodel.ops.moe import route as route_work
from perfmodel.ops.routing import TILE_ROWS, ExpertLoad
from perfmodel.specs.model.architecture import MoEFFN
from perfmodel.specs.model.cards import load_model
from perfmodel_executors.kernels.moe.library import grouped_experts as library_experts
from perfmodel_executors.kernels.moe.library import route as library_route
from perfmodel_executors.kernels.problem import Inputs, Problem

_Choices = list[list[int]]  # each token's experts

_BF16 = LinearFormat("bf16", 2.0, 2.0, 2.0)
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # the reference rounds every product
_MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite")
_TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Odd sizes: one token, a few in one tile each, and more than the tile that needs no sorting."""
    shapes = ((1, MoEFFN(4, 2, 24)), (5, MoEFFN(9, 3, 20, gated=False, activation="relu2")), (19, MoEFFN(3, 1, 33)))
    routes = [_route(*size, dtype) for size in ((1, 4, 2), (5, 60, 4), (3, 512, 10))]
    return [*routes, *(_experts(tokens, 40, ffn, dtype) for tokens, ffn in shapes)]


def serving() -> list[Problem]:
    """Decode batches, whose time is the weights of the experts they touch, and chunks."""
    blocks = [_block(name) for name in _MODELS]
    products = [
        _experts(tokens, width, ffn, torch.bfloat16, _balanced(tokens, ffn.num_experts, ffn.top_k))
        for width, ffn in blocks
        for tokens in _TOKENS
    ]
    # Routers' logits are fp32 as the cost model counts them.
    routes = [_route(t, ffn.num_experts, ffn.top_k, torch.float32) for _, ffn in blocks for t in (1, 64, 4096)]
    return [*products, *routes]


def _block(model: str) -> tuple[int, MoEFFN]:
    """Width and feed-forward block of a model's MoE layers."""
    spec = load_model(model)
    return spec.hidden_size, next(layer.ffn for layer, _ in spec.layers if isinstance(layer.ffn, MoEFFN))


def _logits(inputs: Inputs, tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """No two of a row alike, in any dtype: which of equals is taken first is left open. Spread over 8."""
    order = inputs.normal(tokens, num_experts, dtype=torch.float32).argsort(dim=-1)
    return (order * (8.0 / num_experts)).to(dtype)


def _route(tokens: int, num_experts: int, top_k: int, dtype: torch.dtype) -> Problem:
    def make(inputs: Inputs) -> tuple[Tensor | int, ...]:
        return _logits(inputs, tokens, num_experts, dtype), top_k

    sizes = {"num_tokens": tokens, "num_experts": num_experts, "topk": top_k}
    work = route_work(tokens, num_experts, top_k)
    return Problem("route", sizes, make, work, 1e-5, library_route)


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
    tokens: int, width: int, ffn: MoEFFN, dtype: torch.dtype, chosen: list[list[int]] | None = None
) -> Problem:
    """With the experts `chosen`, else at random (and no work counted)."""
    inner, rows = ffn.intermediate_size, ffn.intermediate_size * (2 if ffn.gated else 1)

    def make(inputs: Inputs) -> tuple[Tensor | str | bool, ...]:
        weights, experts = library_route(_logits(inputs, tokens, ffn.num_experts, torch.float32), ffn.top_k)
        return (
            inputs.normal(tokens, width, dtype=dtype),
            weights,
            inputs.of(chosen, torch.int64) if chosen else experts,
            inputs.normal(ffn.num_experts, rows, width, dtype=dtype, scale=width**-0.5),
            inputs.normal(ffn.num_experts, width, inner, dtype=dtype, scale=inner**-0.5),
            ffn.activation,
            ffn.gated,
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
        "moe_dtype": str(dtype).removeprefix("torch."),
    }
    work = experts_work(tokens, ffn, _load(chosen), _BF16, width=width, intermediate=inner) if chosen else None
    return Problem("grouped_experts", sizes, make, work, _TOLERANCE[dtype], library_experts)
