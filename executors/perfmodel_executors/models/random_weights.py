"""Weights of a decoder, random by seed.

Each matrix is normal with variance 1 / fan-in, so that activations keep their scale and logits stay finite at any
depth. Drawn in fp32 on the device that will hold them, then rounded to the dtype or quantised: on CPUs, equal seeds
make equal weights on every machine; a GPU draws others, which are its own, in seconds where a CPU takes minutes. Under
tensor parallelism every rank draws the whole model, matrix by matrix, and keeps its part.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perfmodel.models.architecture import (
    Attention,
    DenseFFN,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    LinearAttention,
    Mamba,
    Mixer,
    MoEFFN,
)
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.traffic import ExpertRouting
from perfmodel_executors.kernels.weight_formats import LowRankWeight, Weight
from perfmodel_executors.models.popularity import TRAINED, with_popularity
from perfmodel_executors.models.quantized import layer_quantizer, table_quantizer
from perfmodel_executors.models.support import CPU
from perfmodel_executors.models.weights import (
    AttentionWeights,
    DecoderWeights,
    DeltaWeights,
    FFNWeights,
    LatentWeights,
    LayerWeights,
    LinearAttentionWeights,
    MambaWeights,
    MixerWeights,
    MoEWeights,
    used_in_turn,
)
from perfmodel_executors.parallel.group import ALONE, TensorGroup
from perfmodel_executors.parallel.sharding import shard_layer_weights, shard_rows, stage_weights

# Of the norms of a few columns, in all layers the same ones, where outliers are multiplied apart: activations of 20
# beside others of 1, as trained models of some billion parameters have them (Dettmers et al. 2022, section 4).
_OUTLIER = 20.0


class _Draw:
    def __init__(self, dtype: torch.dtype, seed: int, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        # Tensors without memory are not drawn.
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device)
        return values.div_(math.sqrt(shape[-1])).to(self.dtype)

    def linear(self, num_out: int, num_in: int, rank: int | None) -> Weight:
        if rank is None:
            return self.matrix(num_out, num_in)
        return LowRankWeight(self.matrix(rank, num_in), self.matrix(num_out, rank))

    def features(self, num_heads: int, num_rows: int, size: int) -> Tensor:
        """Rows like standard normal ones, of which each `size` are orthogonal (Choromanski et al. 2020, 3.2)."""
        blocks = -(-num_rows // size)
        normal = torch.randn(num_heads, blocks, size, size, generator=self.generator, device=self.device)
        if self.device.type == "meta":
            return normal.flatten(1, 2)[:, :num_rows].to(self.dtype)
        directions = torch.linalg.qr(normal).Q.mT.flatten(1, 2)[:, :num_rows]
        lengths = torch.randn(num_heads, num_rows, size, generator=self.generator, device=self.device).norm(dim=-1)
        rows: Tensor = (directions * lengths[..., None]).to(self.dtype)
        return rows

    def bias(self, wanted: bool, *size: int) -> Tensor | None:
        if not wanted:
            return None
        return torch.randn(*size, generator=self.generator, device=self.device).mul_(0.02).to(self.dtype)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)


def random_weights(
    model: ModelSpec,
    dtype: torch.dtype,
    seed: int,
    device: torch.device = CPU,
    group: TensorGroup = ALONE,
    routing: ExpertRouting = TRAINED,
) -> DecoderWeights:
    """Weights of the whole model, or of this rank's part; equal for equal (model, dtype, seed, kind of device).

    routing: which experts the routers prefer
    """
    draw = _Draw(dtype, seed, device)
    table = table_quantizer(model)
    embedding = table(shard_rows(draw.matrix(model.vocab_size, model.hidden_size), group), "embedding")
    head = embedding
    if not model.tie_word_embeddings:
        head = table(shard_rows(draw.matrix(model.vocab_size, model.hidden_size), group), "lm_head")
    quantize = layer_quantizer(model)  # layer by layer, so that only one is held in full
    layers = [
        quantize(shard_layer_weights(_layer(draw, model, layer), layer, group, index), layer, index)
        for index, layer in enumerate(list(model.iter_layers())[: model.num_distinct_layers])
    ]
    layers = with_popularity(layers, list(model.iter_layers())[: model.num_distinct_layers], routing)
    used = used_in_turn(layers, model.num_layers)
    return stage_weights(DecoderWeights(embedding, head, draw.ones(model.hidden_size), used), group.stage)


def random_layers(model: ModelSpec, dtype: torch.dtype, seed: int, device: torch.device = CPU) -> list[LayerWeights]:
    """Weights of the layers of a small `model` alone, in its dtype."""
    draw = _Draw(dtype, seed, device)
    return [_layer(draw, model, layer) for layer in model.iter_layers()]


def random_matrix(num_out: int, num_in: int, dtype: torch.dtype, seed: int, device: torch.device = CPU) -> Tensor:
    """A matrix as those of layers, [out, in]."""
    return _Draw(dtype, seed, device).matrix(num_out, num_in)


def _layer(draw: _Draw, model: ModelSpec, layer: Layer) -> LayerWeights:
    hidden = model.hidden_size

    def norm(wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        weights_C = draw.ones(hidden)
        if model.quantization.outlier_share:
            weights_C[: math.ceil(model.quantization.outlier_share * hidden)] = _OUTLIER
        return weights_C

    pre, post = model.pre_norms, model.post_norms
    weights = LayerWeights(norm(pre), norm(pre), mixer_post_norm=norm(post), ffn_post_norm=norm(post))
    if layer.mixer is not None:
        weights.mixer = _MIXERS[type(layer.mixer)](draw, hidden, layer.mixer)
    if isinstance(layer.ffn, DenseFFN):
        width, ranks = layer.ffn.intermediate_size, (layer.ffn.up_rank, layer.ffn.down_rank)
        weights.ffn = _dense(draw, hidden, width, layer.ffn.gated, layer.ffn.bias, ranks)
    elif isinstance(layer.ffn, MoEFFN):
        weights.ffn = _moe(draw, hidden, layer.ffn)
    return weights


def _attention(draw: _Draw, hidden: int, mixer: Attention) -> AttentionWeights:
    rows = (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim + mixer.num_kv_heads * mixer.v_head_dim
    out = mixer.num_heads * mixer.v_head_dim
    if mixer.output_gate:
        rows += out
    over_all = mixer.qk_norm_width == "all_heads"
    return AttentionWeights(
        qkv=draw.linear(rows, hidden, mixer.qkv_rank),
        out=draw.linear(hidden, out, mixer.out_rank),
        qkv_bias=draw.bias(mixer.qkv_bias, rows),
        out_bias=draw.bias(mixer.out_bias, hidden),
        q_norm=draw.ones(mixer.head_dim * (mixer.num_heads if over_all else 1)) if mixer.qk_norm else None,
        k_norm=draw.ones(mixer.head_dim * (mixer.num_kv_heads if over_all else 1)) if mixer.qk_norm else None,
        sinks=draw.bias(mixer.sinks, mixer.num_heads),
    )


def _latent(draw: _Draw, hidden: int, mixer: LatentAttention) -> LatentWeights:
    heads, nope, rank = mixer.num_heads, mixer.qk_nope_head_dim, mixer.kv_lora_rank
    thin = mixer.q_lora_rank
    return LatentWeights(
        q_down=None if thin is None else draw.matrix(thin, hidden),
        q_norm=None if thin is None else draw.ones(thin),
        q_up=draw.matrix(heads * (nope + mixer.qk_rope_head_dim), thin or hidden),
        kv_down=draw.matrix(rank + mixer.qk_rope_head_dim, hidden),
        kv_norm=draw.ones(rank),
        keys_NPR=draw.matrix(heads, nope, rank),
        values_NVR=draw.matrix(heads, mixer.v_head_dim, rank),
        out=draw.matrix(hidden, heads * mixer.v_head_dim),
    )


def _linear_attention(draw: _Draw, hidden: int, mixer: LinearAttention) -> LinearAttentionWeights:
    rows = (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim + mixer.num_kv_heads * mixer.v_head_dim
    out = mixer.num_heads * mixer.v_head_dim
    if mixer.kind == "performer":
        projection = draw.features(mixer.num_kv_heads, mixer.size, mixer.head_dim)
    else:
        projection = draw.matrix(mixer.num_kv_heads, mixer.size, mixer.size)
    return LinearAttentionWeights(
        qkv=draw.matrix(rows, hidden),
        out=draw.matrix(hidden, out),
        projection_KRD=projection,
        qkv_bias=draw.bias(mixer.qkv_bias, rows),
        out_bias=draw.bias(mixer.out_bias, hidden),
    )


def _mamba(draw: _Draw, hidden: int, mixer: Mamba) -> MambaWeights:
    inner = mixer.num_heads * mixer.head_dim
    channels = inner + 2 * mixer.num_groups * mixer.state_size
    return MambaWeights(
        input=draw.matrix(inner + channels + mixer.num_heads, hidden),
        input_bias=draw.bias(mixer.proj_bias, inner + channels + mixer.num_heads),
        conv=draw.matrix(channels, mixer.conv_kernel),
        conv_bias=draw.bias(mixer.conv_bias, channels),
        a_log=draw.ones(mixer.num_heads),
        skip=draw.ones(mixer.num_heads),
        dt_bias=draw.ones(mixer.num_heads),
        norm=draw.ones(inner),
        out=draw.matrix(hidden, inner),
        out_bias=draw.bias(mixer.proj_bias, hidden),
    )


def _delta_net(draw: _Draw, hidden: int, mixer: GatedDeltaNet) -> DeltaWeights:
    heads, values = mixer.num_value_heads, mixer.num_value_heads * mixer.value_head_dim
    channels = 2 * mixer.num_key_heads * mixer.key_head_dim + values
    return DeltaWeights(
        input=draw.matrix(channels + values + 2 * heads, hidden),
        conv=draw.matrix(channels, mixer.conv_kernel),
        a_log=draw.ones(heads),
        dt_bias=draw.ones(heads),
        norm=draw.ones(mixer.value_head_dim),
        out=draw.matrix(hidden, values),
    )


_MIXERS: dict[type[Mixer], Callable[[_Draw, int, Any], MixerWeights]] = {
    Attention: _attention,
    GatedDeltaNet: _delta_net,
    LatentAttention: _latent,
    LinearAttention: _linear_attention,
    Mamba: _mamba,
}


def _dense(
    draw: _Draw, hidden: int, width: int, gated: bool, bias: bool, ranks: tuple[int | None, int | None] = (None, None)
) -> FFNWeights:
    rows = 2 * width if gated else width
    return FFNWeights(
        up=draw.linear(rows, hidden, ranks[0]),
        down=draw.linear(hidden, width, ranks[1]),
        up_bias=draw.bias(bias, rows),
        down_bias=draw.bias(bias, hidden),
    )


def _moe(draw: _Draw, hidden: int, ffn: MoEFFN) -> MoEWeights:
    rows = 2 * ffn.intermediate_size if ffn.gated else ffn.intermediate_size
    shared = None
    if ffn.shared_intermediate_size:
        shared = _dense(draw, hidden, ffn.shared_intermediate_size, ffn.gated, False)
    return MoEWeights(
        router=draw.matrix(ffn.num_experts, hidden),
        up=draw.matrix(ffn.num_experts, rows, hidden),
        down=draw.matrix(ffn.num_experts, hidden, ffn.intermediate_size),
        shared=shared,
        shared_gate=draw.matrix(1, hidden) if shared is not None and ffn.shared_gate else None,
        router_bias=draw.bias(ffn.router_bias, ffn.num_experts),
        up_bias=draw.bias(ffn.bias, ffn.num_experts, rows),
        down_bias=draw.bias(ffn.bias, ffn.num_experts, hidden),
    )
