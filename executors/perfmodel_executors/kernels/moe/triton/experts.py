"""All experts' feed-forward blocks in two grouped products and a sum, without the host knowing who goes where.

    hidden[pair] = act(x[token] gate^T) * (x[token] up^T)     `up`
    out[token]   = sum over its pairs of weight[pair] * (hidden[pair] down^T)     `down`

A pair is (token, choice): token * top_k + choice. A program computes one tile, some rows of one expert by some columns
(`tile`). Launches: 2 for one token, 3 for a few, else 4 (the first sorts); experts in 8 or 4 bits (`stored`) take 3
even for one token, and 2 more where activations are quantised for them. No atomics: equal inputs give equal results.
"""

__all__ = ["grouped_experts"]

from torch import Tensor

from perfmodel_executors.kernels.moe.layer import ExpertLayer
from perfmodel_executors.kernels.moe.triton import stored, stored_tiling
from perfmodel_executors.kernels.moe.triton.down import grouped_down
from perfmodel_executors.kernels.moe.triton.tile import ExpertRows
from perfmodel_executors.kernels.moe.triton.tiling import block_rows
from perfmodel_executors.kernels.moe.triton.up import grouped_up
from perfmodel_executors.kernels.tiles import TileConfig
from perfmodel_executors.kernels.weight_formats.experts import ExpertWeight


def grouped_experts(
    x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer, config: TileConfig | None = None
) -> Tensor:
    """sum over each token's experts of weight * down(act(up(x))), [T, C]; accumulated in fp32.

    The ids of a token's experts are distinct, as `route` gives them; columns of x and of the weights are contiguous.
    config: tiles of both products, instead of the ones that fit the problem
    """
    num_tokens, top_k = experts_TX.shape
    num_experts, is_stored = layer.up_EFC.shape[0], isinstance(layer.up_EFC, ExpertWeight)
    if config is not None:
        rows = config.sizes["BLOCK_M"]
    elif isinstance(layer.up_EFC, ExpertWeight):
        rows = stored_tiling.block_rows(num_tokens, num_experts, top_k, layer.up_EFC)
    else:
        rows = block_rows(num_tokens, num_experts, top_k)
    placement = ExpertRows.of(experts_TX, num_experts, rows)
    up, down = (stored.grouped_up, stored.grouped_down) if is_stored else (grouped_up, grouped_down)
    return down(up(x_TC, placement, layer, config), weights_TX, placement, layer, config)
