"""Mixers and feed-forward blocks from a file.

Projections of one product come one after the other, rows in the order in which we rotate them; gate and up as one
product, experts one behind the other.
"""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from perfmodel.models.architecture import (
    Attention,
    DenseFFN,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Mamba,
    Mixer,
    MoEFFN,
)
from perfmodel_executors.kernels.weight_formats import (
    ExpertWeight,
    MatrixWeight,
    Weight,
    dequantize,
    fp4_from_pairs,
    join_rows,
    reordered,
    stack_experts,
)
from perfmodel_executors.models.loading.files import Reader
from perfmodel_executors.models.loading.names import halved, rotated_rows, split_pairs
from perfmodel_executors.models.weights import (
    AttentionWeights,
    DeltaWeights,
    FFNWeights,
    LatentWeights,
    MambaWeights,
    MixerWeights,
    MoEWeights,
)


def mixer_weights(reader: Reader, mixer: Mixer, index: int) -> MixerWeights:
    """The weights of layer `index`'s mixer."""
    return _READERS[type(mixer)](reader, mixer, index)


def _attention(reader: Reader, mixer: Attention, index: int) -> AttentionWeights:
    tensor, hidden = partial(reader.tensor, layer=index), reader.model.hidden_size
    over_all = mixer.qk_norm_width == "all_heads"

    def norm(name: str, heads: int) -> Tensor | None:
        if not mixer.qk_norm:
            return None
        count = heads if over_all else 1
        return rotated_rows(reader.norm(name, index, count * mixer.head_dim), count, mixer.rope)

    return AttentionWeights(
        qkv=_products(reader, mixer, index),
        out=reader.matrix("out", hidden, mixer.num_heads * mixer.v_head_dim, layer=index),
        qkv_bias=_biases(reader, mixer, index) if mixer.qkv_bias else None,
        out_bias=tensor("out", hidden, kind="bias") if mixer.out_bias else None,
        q_norm=norm("q_norm", mixer.num_heads),
        k_norm=norm("k_norm", mixer.num_kv_heads),
        sinks=tensor("attention", mixer.num_heads, kind="sinks") if mixer.sinks else None,
    )


def _products(reader: Reader, mixer: Attention, index: int) -> Weight:
    heads, kv_heads, hidden = mixer.num_heads, mixer.num_kv_heads, reader.model.hidden_size
    sizes = _sizes(mixer)
    gates: list[MatrixWeight] = []
    q: MatrixWeight
    if reader.has("qkv", index):
        return _rotated(reader.tensor("qkv", sum(sizes), hidden, layer=index), mixer)
    matrix = partial(reader.matrix, layer=index)
    if mixer.output_gate:
        q, gate = halved(reader.tensor("q", 2 * sizes[0], hidden, layer=index), heads)
        gates.append(gate)
    else:
        q = matrix("q", sizes[0], hidden, num_heads=heads)
    k, v = matrix("k", sizes[1], hidden, num_heads=kv_heads), matrix("v", sizes[2], hidden)
    rows = (
        reordered(part, partial(rotated_rows, num_heads=count, rope=mixer.rope))
        for part, count in ((q, heads), (k, kv_heads))
    )
    return join_rows([*rows, v, *gates])


def _biases(reader: Reader, mixer: Attention, index: int) -> Tensor:
    sizes = _sizes(mixer)
    if reader.has("qkv", index, "bias"):
        return _rotated(reader.tensor("qkv", sum(sizes), layer=index, kind="bias"), mixer)
    tensor = partial(reader.tensor, layer=index, kind="bias")
    if mixer.output_gate:
        q, *gate = halved(tensor("q", 2 * sizes[0]), mixer.num_heads)
    else:
        q, gate = tensor("q", sizes[0], num_heads=mixer.num_heads), []
    k, v = tensor("k", sizes[1], num_heads=mixer.num_kv_heads), tensor("v", sizes[2])
    return torch.cat((_rotated(torch.cat((q, k, v)), mixer), *gate))


def _sizes(mixer: Attention) -> list[int]:
    kv_heads = mixer.num_kv_heads
    return [mixer.num_heads * mixer.head_dim, kv_heads * mixer.head_dim, kv_heads * mixer.v_head_dim]


def _rotated(fused: Tensor, mixer: Attention) -> Tensor:
    q, k, v = torch.split(fused, _sizes(mixer))
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    return torch.cat((rotated_rows(q, heads, mixer.rope), rotated_rows(k, kv_heads, mixer.rope), v))


def _latent(reader: Reader, mixer: LatentAttention, index: int) -> LatentWeights:
    tensor, matrix = partial(reader.tensor, layer=index), partial(reader.matrix, layer=index)
    hidden, heads = reader.model.hidden_size, mixer.num_heads
    rank, nope, rotary, values = mixer.kv_lora_rank, mixer.qk_nope_head_dim, mixer.qk_rope_head_dim, mixer.v_head_dim
    thin = mixer.q_lora_rank
    # Keys and values are expanded from latents by a kernel that knows plain weights only, as in engines.
    up = tensor("kv_up", heads * (nope + values), rank).view(heads, nope + values, rank)

    def of_heads(rows: Tensor) -> Tensor:
        each = rows.view(heads, nope + rotary, -1)
        turned = rotated_rows(each[:, nope:].flatten(0, 1), heads, mixer.rope).view(heads, rotary, -1)
        return torch.cat((each[:, :nope], turned), dim=1).flatten(0, 1)

    def of_latents(rows: Tensor) -> Tensor:
        return torch.cat((rows[:rank], rotated_rows(rows[rank:], 1, mixer.rope)))

    return LatentWeights(
        q_down=None if thin is None else matrix("q_down", thin, hidden),
        q_norm=None if thin is None else reader.norm("q_down_norm", index, thin),
        q_up=reordered(matrix("q_up", heads * (nope + rotary), thin or hidden), of_heads),
        kv_down=reordered(matrix("kv_down", rank + rotary, hidden), of_latents),
        kv_norm=reader.norm("kv_norm", index, rank),
        keys_NPR=up[:, :nope].contiguous(),
        values_NVR=up[:, nope:].contiguous(),
        out=matrix("out", hidden, heads * values),
    )


def _mamba(reader: Reader, mixer: Mamba, index: int) -> MambaWeights:
    tensor, hidden, heads = partial(reader.tensor, layer=index), reader.model.hidden_size, mixer.num_heads
    inner = heads * mixer.head_dim
    channels = inner + 2 * mixer.num_groups * mixer.state_size
    rows = inner + channels + heads
    return MambaWeights(
        input=tensor("scan_input", rows, hidden),
        input_bias=tensor("scan_input", rows, kind="bias") if mixer.proj_bias else None,
        conv=tensor("scan_conv", channels, 1, mixer.conv_kernel)[:, 0],
        conv_bias=tensor("scan_conv", channels, kind="bias") if mixer.conv_bias else None,
        a_log=tensor("scan", heads, kind="A_log"),
        skip=tensor("scan", heads, kind="D"),
        dt_bias=tensor("scan", heads, kind="dt_bias"),
        norm=tensor("scan_norm", inner),
        out=tensor("scan_out", hidden, inner),
        out_bias=tensor("scan_out", hidden, kind="bias") if mixer.proj_bias else None,
    )


def _delta_net(reader: Reader, mixer: GatedDeltaNet, index: int) -> DeltaWeights:
    tensor, hidden, heads = partial(reader.tensor, layer=index), reader.model.hidden_size, mixer.num_value_heads
    keys, values = mixer.num_key_heads * mixer.key_head_dim, heads * mixer.value_head_dim
    channels = 2 * keys + values
    if reader.has("delta_qkvz", index):
        parts = _by_key_head(reader, mixer, index)
    else:
        rows = {"delta_qkv": channels, "delta_z": values, "delta_b": heads, "delta_a": heads}
        parts = [tensor(name, count, hidden) for name, count in rows.items()]
    return DeltaWeights(
        input=torch.cat(parts),
        conv=tensor("scan_conv", channels, 1, mixer.conv_kernel)[:, 0],
        a_log=tensor("scan", heads, kind="A_log"),
        dt_bias=tensor("scan", heads, kind="dt_bias"),
        norm=tensor("scan_norm", mixer.value_head_dim),
        out=tensor("scan_out", hidden, values),
    )


def _by_key_head(reader: Reader, mixer: GatedDeltaNet, index: int) -> list[Tensor]:
    """Qwen3-Next: for each key head its query, its key, the values and gates of the heads that share it; and their
    betas, then their decays."""
    hidden, heads = reader.model.hidden_size, mixer.num_value_heads
    keys, values = mixer.num_key_heads * mixer.key_head_dim, heads * mixer.value_head_dim
    shared = heads // mixer.num_key_heads * mixer.value_head_dim
    qkvz = reader.tensor("delta_qkvz", 2 * keys + 2 * values, hidden, layer=index)
    ba = reader.tensor("delta_ba", 2 * heads, hidden, layer=index)
    groups = (rows.view(mixer.num_key_heads, -1, hidden) for rows in (qkvz, ba))
    sizes = ([mixer.key_head_dim, mixer.key_head_dim, shared, shared], [heads // mixer.num_key_heads] * 2)
    parts = [torch.split(rows, size, dim=1) for rows, size in zip(groups, sizes, strict=True)]
    return [part.flatten(0, 1) for found in parts for part in found]


_READERS: MappingProxyType[type[Mixer], Callable[[Reader, Any, int], MixerWeights]] = MappingProxyType(
    {Attention: _attention, GatedDeltaNet: _delta_net, LatentAttention: _latent, Mamba: _mamba}
)


def feed_forward_weights(reader: Reader, ffn: FeedForward, index: int) -> FFNWeights | MoEWeights:
    """The weights of layer `index`'s block."""
    if isinstance(ffn, DenseFFN):
        return _dense(reader, ffn, index)
    names = ("expert_gate", "expert_up") if ffn.gated else ("expert_up",)
    read: Callable[..., tuple[Tensor | ExpertWeight, Tensor | ExpertWeight]]
    read = _stacked if ffn.activation == "swiglu_oai" else _separate
    up, down = read(reader, ffn, index, names)
    return MoEWeights(
        router=reader.tensor("router", ffn.num_experts, reader.model.hidden_size, layer=index),
        up=up,
        down=down,
        shared=_shared(reader, ffn, index),
        shared_gate=reader.tensor("shared_router", 1, reader.model.hidden_size, layer=index)
        if ffn.shared_gate
        else None,
        router_bias=_router_bias(reader, ffn, index),
        up_bias=_expert_bias(reader, ffn, index, "gate_up_proj_bias"),
        down_bias=_expert_bias(reader, ffn, index, "down_proj_bias"),
    )


def _dense(reader: Reader, ffn: DenseFFN, index: int) -> FFNWeights:
    tensor, matrix = partial(reader.tensor, layer=index), partial(reader.matrix, layer=index)
    width, hidden = ffn.intermediate_size, reader.model.hidden_size
    names = ("gate", "up") if ffn.gated else ("up",)
    up: Weight
    if reader.has("gate_up", index):
        up = matrix("gate_up", 2 * width, hidden)
    else:
        up = join_rows([matrix(name, width, hidden) for name in names])
    return FFNWeights(
        up=up,
        down=matrix("down", hidden, width),
        up_bias=torch.cat([tensor(name, width, kind="bias") for name in names]) if ffn.bias else None,
        down_bias=tensor("down", hidden, kind="bias") if ffn.bias else None,
    )


def _shared(reader: Reader, ffn: MoEFFN, index: int) -> FFNWeights | None:
    width, hidden = ffn.shared_intermediate_size, reader.model.hidden_size
    if not width:
        return None
    names = ("shared_gate", "shared_up") if ffn.gated else ("shared_up",)
    up = join_rows([reader.matrix(name, width, hidden, layer=index) for name in names])
    return FFNWeights(up=up, down=reader.matrix("shared_down", hidden, width, layer=index))


def _separate(
    reader: Reader, ffn: MoEFFN, index: int, names: tuple[str, ...]
) -> tuple[Tensor | ExpertWeight, Tensor | ExpertWeight]:
    width, hidden, experts = ffn.intermediate_size, reader.model.hidden_size, range(ffn.num_experts)
    matrix = partial(reader.matrix, layer=index)
    up = [join_rows([matrix(name, width, hidden, expert=i) for name in names]) for i in experts]
    return stack_experts(up), stack_experts([matrix("expert_down", hidden, width, expert=i) for i in experts])


def _stacked(
    reader: Reader, ffn: MoEFFN, index: int, _: tuple[str, ...]
) -> tuple[Tensor | ExpertWeight, Tensor | ExpertWeight]:
    """gpt-oss: all experts in one tensor, gates and ups in turn; plain ones the other way round, [E, in, out]."""
    width, hidden = ffn.intermediate_size, reader.model.hidden_size
    up = _matrices(reader, index, "gate_up_proj", (ffn.num_experts, 2 * width, hidden), partial(split_pairs, dim=1))
    return up, _matrices(reader, index, "down_proj", (ffn.num_experts, hidden, width), lambda rows: rows)


def _matrices(
    reader: Reader, index: int, name: str, shape: tuple[int, int, int], ordered: Callable[[Tensor], Tensor]
) -> Tensor | ExpertWeight:
    """[E, N, K] in the file's format, MXFP4 unless another one is served; ordered: puts rows into our order"""
    experts, rows, columns = shape
    if not reader.has("experts", index, f"{name}_blocks"):
        plain = reader.tensor("experts", experts, columns, rows, layer=index, kind=name)
        return ordered(plain.transpose(1, 2)).contiguous()
    groups = columns // 32
    blocks = reader.raw("experts", experts, rows, groups, 16, layer=index, kind=f"{name}_blocks")
    scales = reader.raw("experts", experts, rows, groups, layer=index, kind=f"{name}_scales")
    placed = (reader.moved(ordered(tensor)).flatten(0, 1) for tensor in (blocks, scales))
    weight = fp4_from_pairs(*placed)
    if reader.model.quantization.weights == "mxfp4":
        return ExpertWeight(weight, experts)
    return reader.placed(dequantize(weight)).view(shape)


def _router_bias(reader: Reader, ffn: MoEFFN, index: int) -> Tensor | None:
    """Bias of the logits, or for the choice alone; files of DeepSeek-V3's kind have one whatever the config says."""
    kind = "e_score_correction_bias" if ffn.routing.bias_chooses else "bias"
    is_there = ffn.router_bias or reader.has("router", index, kind)
    return reader.tensor("router", ffn.num_experts, layer=index, kind=kind) if is_there else None


def _expert_bias(reader: Reader, ffn: MoEFFN, index: int, kind: str) -> Tensor | None:
    if not ffn.bias:
        return None
    width = 2 * ffn.intermediate_size if kind == "gate_up_proj_bias" else reader.model.hidden_size
    bias = reader.tensor("experts", ffn.num_experts, width, layer=index, kind=kind)
    return split_pairs(bias, 1) if kind == "gate_up_proj_bias" else bias
