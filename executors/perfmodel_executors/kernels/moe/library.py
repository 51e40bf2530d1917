"""What library calls make of a mixture of experts: the kernels here are compared with them."""

__all__ = ["EXPERTS_BY_LIBRARY"]

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.moe import reference
from perfmodel_executors.kernels.moe.layer import ExpertLayer
from perfmodel_executors.kernels.swiglu.reference import activate
from perfmodel_executors.kernels.weight_formats import ExpertWeight
from perfmodel_executors.kernels.weight_formats.dense import dense_weight


def _loop(x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer) -> Tensor:
    """BLAS calls over the touched experts; asks the device how many rows each has."""
    return reference.grouped_experts(x_TC, weights_TX, experts_TX, _dense(layer, x_TC.dtype))


def _grouped(x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer) -> Tensor:
    """Grouped products (torch >= 2.11, bf16, experts without biases), for which the host need not know."""
    return _grouped_products(x_TC, weights_TX, experts_TX, _dense(layer, x_TC.dtype))


EXPERTS_BY_LIBRARY: Mapping[str, Callable[..., Tensor]] = MappingProxyType({"grouped_mm": _grouped, "loop": _loop})


def _dense(layer: ExpertLayer, dtype: torch.dtype) -> ExpertLayer:
    """Experts in fewer bits are dequantised at their first call."""
    return replace(layer, up_EFC=_plain(layer.up_EFC, dtype), down_ECI=_plain(layer.down_ECI, dtype))


def _plain(weight: Tensor | ExpertWeight, dtype: torch.dtype) -> Tensor:
    return dense_weight(weight.stacked, dtype).view(weight.shape) if isinstance(weight, ExpertWeight) else weight


def _grouped_products(x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer) -> Tensor:
    up_EFC, down_ECI = layer.up_EFC, layer.down_ECI
    assert isinstance(up_EFC, Tensor)
    assert isinstance(down_ECI, Tensor)
    num_tokens, top_k = experts_TX.shape
    ids, order = torch.sort(experts_TX.flatten(), stable=True)
    experts = torch.arange(up_EFC.shape[0], device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    rows = x_TC[torch.div(order, top_k, rounding_mode="floor")]
    hidden = activate(functional.grouped_mm(rows, up_EFC.transpose(1, 2), offs=ends), layer.activation, layer.gated)
    y_sorted = functional.grouped_mm(hidden, down_ECI.transpose(1, 2), offs=ends)
    y_AC = torch.empty_like(y_sorted).index_copy_(0, order, y_sorted).view(num_tokens, top_k, -1)
    return torch.bmm(weights_TX.to(y_AC.dtype)[:, None], y_AC)[:, 0]
