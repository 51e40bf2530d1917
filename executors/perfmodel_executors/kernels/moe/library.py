"""What library calls make of a mixture of experts: the kernels here are compared with them."""

__all__ = ["EXPERTS_BY_LIBRARY"]

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.moe import reference
from perfmodel_executors.kernels.swiglu.reference import activate
from perfmodel_executors.kernels.weight_formats import ExpertWeight
from perfmodel_executors.kernels.weight_formats.dense import dense_weight


def _loop(*args: Any) -> Tensor:
    """BLAS calls over the touched experts; asks the device how many rows each has."""
    return reference.grouped_experts(*_dense(args))


def _grouped(*args: Any) -> Tensor:
    """Grouped products (torch >= 2.11, bf16), for which the host need not know."""
    return _grouped_products(*_dense(args))


EXPERTS_BY_LIBRARY: Mapping[str, Callable[..., Tensor]] = MappingProxyType({"grouped_mm": _grouped, "loop": _loop})


def _dense(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Experts in fewer bits are dequantised at their first call."""
    x_TC, weights_TX, experts_TX, *matrices, activation, gated = args
    up_EFC, down_ECI = (_plain(weight, x_TC.dtype) for weight in matrices)
    return x_TC, weights_TX, experts_TX, up_EFC, down_ECI, activation, gated


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
