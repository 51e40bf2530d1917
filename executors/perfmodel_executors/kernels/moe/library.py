"""The best that library calls make of a mixture of experts: what the kernels here are compared with."""

__all__ = ["grouped_experts", "route"]

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.moe import reference
from perfmodel_executors.kernels.moe.reference import route
from perfmodel_executors.kernels.swiglu.reference import activate
from perfmodel_executors.kernels.weight_formats import ExpertWeight
from perfmodel_executors.kernels.weight_formats.dense import dense_weight

_faster: dict[Hashable, Callable[..., Tensor]] = {}


def grouped_experts(*args: Any) -> Tensor:
    """The faster of a loop of BLAS calls over the touched experts and of grouped products, as found at a first call.

    Experts in fewer bits are dequantised at their first call. The loop asks the device how many rows each expert has;
    grouped products (torch >= 2.11) do not.
    """
    x_TC, weights_TX, experts_TX, *matrices, activation, gated = args
    up_EFC, down_ECI = (_plain(weight, x_TC.dtype) for weight in matrices)
    args = (x_TC, weights_TX, experts_TX, up_EFC, down_ECI, activation, gated)
    if x_TC.device.type != "cuda" or x_TC.dtype != torch.bfloat16:
        return reference.grouped_experts(*args)
    key = (x_TC.shape, up_EFC.shape, down_ECI.shape)
    if key not in _faster:
        _faster[key] = min((reference.grouped_experts, _grouped_products), key=lambda way: _milliseconds(way, args))
    return _faster[key](*args)


def _plain(weight: Tensor | ExpertWeight, dtype: torch.dtype) -> Tensor:
    return dense_weight(weight.stacked, dtype).view(weight.shape) if isinstance(weight, ExpertWeight) else weight


def _grouped_products(
    x_TC: Tensor,
    weights_TX: Tensor,
    experts_TX: Tensor,
    up_EFC: Tensor,
    down_ECI: Tensor,
    activation: str,
    gated: bool,
) -> Tensor:
    num_tokens, top_k = experts_TX.shape
    ids, order = torch.sort(experts_TX.flatten(), stable=True)
    experts = torch.arange(up_EFC.shape[0], device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    rows = x_TC[torch.div(order, top_k, rounding_mode="floor")]
    hidden = activate(functional.grouped_mm(rows, up_EFC.transpose(1, 2), offs=ends), activation, gated)
    y_sorted = functional.grouped_mm(hidden, down_ECI.transpose(1, 2), offs=ends)
    y_AC = torch.empty_like(y_sorted).index_copy_(0, order, y_sorted).view(num_tokens, top_k, -1)
    return torch.bmm(weights_TX.to(y_AC.dtype)[:, None], y_AC)[:, 0]


def _milliseconds(way: Callable[..., Tensor], args: tuple[Any, ...]) -> float:
    from triton.testing import do_bench

    try:
        return float(do_bench(lambda: way(*args), warmup=5, rep=20, return_mode="median"))
    except (AttributeError, RuntimeError):  # this torch, or this device, has no grouped products
        return float("inf")
