"""Mixers and feed-forward blocks from a file. Projections of one product come one after the other, rows in the order in
which we rotate them; gate and up as one product, experts one behind the other."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfmodel.models import architecture
from perfmodel.models.architecture import Attention, FeedForward, LatentAttention, Mamba, Mixer
from perfmodel_executors.kernels.stored_rows import ExpertWeight, join_rows, reordered, stack_experts
from perfmodel_executors.kernels.weight_formats import MatrixWeight, Weight, dequantize, fp4_from_pairs
from perfmodel_executors.models.loading.files import Reader
from perfmodel_executors.models.loading.names import halved, rotated_rows, split_pairs
from perfmodel_executors.models.parts import MIXER_PARTS, Parts, dense_parts, expert_parts, shared_parts
from perfmodel_executors.models.weights import FFNWeights, MixerWeights, MoEWeights


def mixer_weights(reader: Reader, mixer: Mixer, index: int) -> MixerWeights:
    make, parts_of = MIXER_PARTS[type(mixer)]
    parts, own = parts_of(mixer, reader.model.hidden_size), _READERS[type(mixer)](reader, mixer, index)
    return make(**own, **_read(reader, {name: part for name, part in parts.items() if name not in own}, index))


def _read(reader: Reader, parts: Parts, index: int) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for field, (shape, name, kind, is_there, _) in parts.items():
        if kind == "norm":
            tensors[field] = reader.norm(name, index, *shape) if is_there else None
        elif kind == "matrix":
            tensors[field] = reader.matrix(name, *shape, layer=index) if is_there else None
        elif field == "conv":  # [channels, 1, taps] there
            tensors[field] = reader.tensor(name, shape[0], 1, shape[1], layer=index)[:, 0]
        else:
            tensors[field] = reader.tensor(name, *shape, layer=index, kind=kind) if is_there else None
    return tensors


def _attention(reader: Reader, mixer: Attention, index: int) -> dict[str, Any]:
    own: dict[str, Any] = {"qkv": _projections(reader, mixer, index, "weight")}
    if mixer.qkv_bias:
        own["qkv_bias"] = _projections(reader, mixer, index, "bias")
    if mixer.qk_norm:
        over_all = mixer.qk_norm_width == "all_heads"
        for name, heads in (("q_norm", mixer.num_heads), ("k_norm", mixer.num_kv_heads)):
            count = heads if over_all else 1
            own[name] = rotated_rows(reader.norm(name, index, count * mixer.head_dim), count, mixer.rope)
    return own


def _projections(reader: Reader, mixer: Attention, index: int, kind: str) -> Weight:
    """Rows of queries, keys, values and gates: of their weights or biases."""
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    columns = (reader.model.hidden_size,) if kind == "weight" else ()
    sizes = [heads * mixer.head_dim, kv_heads * mixer.head_dim, kv_heads * mixer.v_head_dim]
    tensor = partial(reader.tensor, layer=index, kind=kind)
    read: Callable[..., MatrixWeight] = partial(reader.matrix, layer=index) if kind == "weight" else tensor
    if reader.has("qkv", index, kind):
        parts: Sequence[MatrixWeight] = torch.split(tensor("qkv", sum(sizes), *columns), sizes)
    else:
        q, *gates = (
            halved(tensor("q", 2 * sizes[0], *columns), heads)
            if mixer.output_gate
            else [read("q", sizes[0], *columns, num_heads=heads)]
        )
        parts = [q, read("k", sizes[1], *columns, num_heads=kv_heads), read("v", sizes[2], *columns), *gates]
    turned = zip(parts, (heads, kv_heads), strict=False)
    rows = [reordered(part, partial(rotated_rows, num_heads=count, rope=mixer.rope)) for part, count in turned]
    return join_rows([*rows, *parts[2:]])


def _latent(reader: Reader, mixer: LatentAttention, index: int) -> dict[str, Any]:
    matrix, hidden, heads = partial(reader.matrix, layer=index), reader.model.hidden_size, mixer.num_heads
    rank, nope, rotary, values = mixer.kv_lora_rank, mixer.qk_nope_head_dim, mixer.qk_rope_head_dim, mixer.v_head_dim
    # Keys and values are expanded from latents by a kernel that knows plain weights only, as in engines.
    up = reader.tensor("kv_up", heads * (nope + values), rank, layer=index).view(heads, nope + values, rank)

    def of_heads(rows: Tensor) -> Tensor:
        by_head = rows.view(heads, nope + rotary, -1)
        turned = rotated_rows(by_head[:, nope:].flatten(0, 1), heads, mixer.rope).view(heads, rotary, -1)
        return torch.cat((by_head[:, :nope], turned), dim=1).flatten(0, 1)

    def of_latents(rows: Tensor) -> Tensor:
        return torch.cat((rows[:rank], rotated_rows(rows[rank:], 1, mixer.rope)))

    return {
        "q_up": reordered(matrix("q_up", heads * (nope + rotary), mixer.q_lora_rank or hidden), of_heads),
        "kv_down": reordered(matrix("kv_down", rank + rotary, hidden), of_latents),
        "keys_NPR": up[:, :nope].contiguous(),
        "values_NVR": up[:, nope:].contiguous(),
    }


def _delta_net(reader: Reader, mixer: architecture.GatedDeltaNet, index: int) -> dict[str, Any]:
    tensor, hidden, heads = partial(reader.tensor, layer=index), reader.model.hidden_size, mixer.num_value_heads
    keys, values = mixer.num_key_heads * mixer.key_head_dim, heads * mixer.value_head_dim
    channels = 2 * keys + values
    if reader.has("delta_qkvz", index):
        # Qwen3-Next: for each key head its query, key, values and gates that share it; then betas, decays.
        shared = heads // mixer.num_key_heads
        rows_of = (tensor("delta_qkvz", 2 * keys + 2 * values, hidden), tensor("delta_ba", 2 * heads, hidden))
        sizes = ([mixer.key_head_dim] * 2 + [shared * mixer.value_head_dim] * 2, [shared] * 2)
        groups = zip((part.view(mixer.num_key_heads, -1, hidden) for part in rows_of), sizes, strict=True)
        parts = [part.flatten(0, 1) for group, size in groups for part in torch.split(group, size, dim=1)]
    else:
        rows = {"delta_qkv": channels, "delta_z": values, "delta_b": heads, "delta_a": heads}
        parts = [tensor(name, count, hidden) for name, count in rows.items()]
    return {"input": torch.cat(parts)}


_READERS: Mapping[type[Mixer], Callable[[Reader, Any, int], dict[str, Any]]] = {
    Attention: _attention,
    architecture.GatedDeltaNet: _delta_net,
    LatentAttention: _latent,
    Mamba: lambda *_: {},
}


def feed_forward_weights(reader: Reader, ffn: FeedForward, index: int) -> FFNWeights | MoEWeights:
    hidden = reader.model.hidden_size
    if isinstance(ffn, architecture.DenseFFN):
        parts, names = dense_parts(ffn, hidden), ("gate", "up") if ffn.gated else ("up",)
        width, matrix, own = ffn.intermediate_size, partial(reader.matrix, layer=index), dict[str, Any]()
        if not reader.has("gate_up", index):
            own["up"] = join_rows([matrix(name, width, hidden) for name in names])
        if ffn.bias:
            biases = [reader.tensor(name, width, layer=index, kind="bias") for name in names]
            own["up_bias"] = torch.cat(biases)
        left = {name: part for name, part in parts.items() if name not in own}
        return FFNWeights(**own, **_read(reader, left, index))
    parts = expert_parts(ffn, hidden)
    matrix, width, experts = partial(reader.matrix, layer=index), ffn.intermediate_size, ffn.num_experts
    up: Tensor | ExpertWeight
    if ffn.activation == "swiglu_oai":  # gpt-oss: all experts in one tensor, gates and ups in turn
        up = _matrices(reader, index, "gate_up_proj", (experts, 2 * width, hidden), partial(split_pairs, dim=1))
        down = _matrices(reader, index, "down_proj", (experts, hidden, width), lambda rows: rows)
    else:
        names = ("expert_gate", "expert_up") if ffn.gated else ("expert_up",)
        stacks = ([matrix(name, width, hidden, expert=i) for name in names] for i in range(experts))
        up = stack_experts(list(map(join_rows, stacks)))
        down = stack_experts([matrix("expert_down", hidden, width, expert=i) for i in range(experts)])
    # Files of DeepSeek-V3's kind have a bias whatever the config says.
    has_bias = ffn.router_bias or reader.has("router", index, parts["router_bias"].kind)
    parts["router_bias"] = parts["router_bias"]._replace(is_there=has_bias)
    result = _read(reader, {name: part for name, part in parts.items() if name not in ("up", "down")}, index)
    if ffn.bias:
        result["up_bias"] = split_pairs(result["up_bias"], 1)
    shared = None
    if width := ffn.shared_intermediate_size:
        names = ("shared_gate", "shared_up") if ffn.gated else ("shared_up",)
        shared_up = join_rows([reader.matrix(name, width, hidden, layer=index) for name in names])
        shared_down = {"down": shared_parts(ffn, hidden)["down"]}
        shared = FFNWeights(up=shared_up, **_read(reader, shared_down, index))
    return MoEWeights(up=up, down=down, shared=shared, **result)


def _matrices(
    reader: Reader, index: int, name: str, shape: tuple[int, int, int], ordered: Callable[[Tensor], Tensor]
) -> Tensor | ExpertWeight:
    """[E, N, K] in the file's format (plain: [E, K, N]), MXFP4 unless another is served; ordered: puts rows in order"""
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
