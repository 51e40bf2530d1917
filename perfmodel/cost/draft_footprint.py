"""What a drafter holds on a device beside the model: its weights, and its KV cache.

draft_model     all of its weights; a KV cache of its own
self_quantized  the quantized weights; embedding, head, norms and the KV cache are the model's
eagle           a projection of 2 d^2 and one layer; the KV of that layer
medusa          k (d^2 + d V)
self_skip, ngram, lookahead  nothing
"""

__all__ = ["DraftFootprint", "draft_footprint"]

from typing import NamedTuple

from perfmodel.cost.footprint import kv_bytes_per_token, weights
from perfmodel.models.formats.quantization import bytes_per_weight
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import linear_format, served_model
from perfmodel.ops.graphs.drafting import draft_engine, draft_model_of, medusa_weights
from perfmodel.ops.sharding import Sharding
from perfmodel.specs.engine.spec import EngineSpec


class DraftFootprint(NamedTuple):
    """Bytes of weights, and of KV cache per token, on one device."""

    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0


def draft_footprint(model: ModelSpec, engine: EngineSpec) -> DraftFootprint:
    """Memory of the drafter that `engine.speculative_config` asks for, beside `model`; nothing without one."""
    config = engine.speculative_config
    if config is None or config.method in ("self_skip", "ngram", "lookahead"):
        return DraftFootprint()
    shard = Sharding.of(engine)
    if config.method == "medusa":
        per_weight = linear_format(served_model(model, engine), "lm_head").weight_bytes
        return DraftFootprint(per_weight * medusa_weights(model, shard, config.depth))
    drafter = served_model(draft_model_of(model, config), draft_engine(engine, config))
    layers = list(drafter.iter_layers())
    is_own = config.method == "draft_model"
    held = weights(drafter, shard, layers, is_first=is_own, is_last=is_own)
    if config.method == "self_quantized":
        shared = drafter.quantization.kept | {"norms", "other"}
        return DraftFootprint(sum(size for component, size in held.items() if component not in shared))
    size = sum(held.values())
    if config.method == "eagle":
        size += 2 * drafter.hidden_size**2 * bytes_per_weight(drafter.dtype)
    return DraftFootprint(size, kv_bytes_per_token(drafter, shard, layers))
