"""Mixers from a file: projections of one product one after the other, rows in the order in which we rotate them."""

__all__ = ["mixer_weights"]

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention, GatedDeltaNet, LatentAttention, Mamba, Mixer
from perfmodel_executors.models.loading.layouts import halved, rotated_rows
from perfmodel_executors.models.loading.reader import Reader
from perfmodel_executors.models.weights import (
    AttentionWeights,
    DeltaWeights,
    LatentWeights,
    MambaWeights,
    MixerWeights,
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
        qkv=_stacked(reader, mixer, index, "weight", hidden),
        out=tensor("out", hidden, mixer.num_heads * mixer.v_head_dim),
        qkv_bias=_stacked(reader, mixer, index, "bias") if mixer.qkv_bias else None,
        out_bias=tensor("out", hidden, kind="bias") if mixer.out_bias else None,
        q_norm=norm("q_norm", mixer.num_heads),
        k_norm=norm("k_norm", mixer.num_kv_heads),
        sinks=tensor("attention", mixer.num_heads, kind="sinks") if mixer.sinks else None,
    )


def _stacked(reader: Reader, mixer: Attention, index: int, kind: str, *columns: int) -> Tensor:
    """Rows of queries, keys, values and gates."""
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    sizes = [heads * mixer.head_dim, kv_heads * mixer.head_dim, kv_heads * mixer.v_head_dim]
    gates: list[Tensor] = []
    if reader.has("qkv", index, kind):
        fused = reader.tensor("qkv", sum(sizes), *columns, layer=index, kind=kind)
        q, k, v = torch.split(fused, sizes)
    else:
        tensor = partial(reader.tensor, layer=index, kind=kind)
        if mixer.output_gate:
            q, gate = halved(tensor("q", 2 * sizes[0], *columns), heads)
            gates.append(gate)
        else:
            q = tensor("q", sizes[0], *columns, num_heads=heads)
        k, v = tensor("k", sizes[1], *columns, num_heads=kv_heads), tensor("v", sizes[2], *columns)
    return torch.cat((rotated_rows(q, heads, mixer.rope), rotated_rows(k, kv_heads, mixer.rope), v, *gates))


def _latent(reader: Reader, mixer: LatentAttention, index: int) -> LatentWeights:
    tensor, hidden, heads = partial(reader.tensor, layer=index), reader.model.hidden_size, mixer.num_heads
    rank, nope, rotary, values = mixer.kv_lora_rank, mixer.qk_nope_head_dim, mixer.qk_rope_head_dim, mixer.v_head_dim
    thin = mixer.q_lora_rank
    q_up = tensor("q_up", heads * (nope + rotary), thin or hidden).view(heads, nope + rotary, -1)
    kv_down = tensor("kv_down", rank + rotary, hidden)
    up = tensor("kv_up", heads * (nope + values), rank).view(heads, nope + values, rank)
    q_rotary = rotated_rows(q_up[:, nope:].flatten(0, 1), heads, mixer.rope).view(heads, rotary, -1)
    return LatentWeights(
        q_down=None if thin is None else tensor("q_down", thin, hidden),
        q_norm=None if thin is None else reader.norm("q_down_norm", index, thin),
        q_up=torch.cat((q_up[:, :nope], q_rotary), dim=1).flatten(0, 1),
        kv_down=torch.cat((kv_down[:rank], rotated_rows(kv_down[rank:], 1, mixer.rope))),
        kv_norm=reader.norm("kv_norm", index, rank),
        keys_NPR=up[:, :nope].contiguous(),
        values_NVR=up[:, nope:].contiguous(),
        out=tensor("out", hidden, heads * values),
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
