"""Feed-forward blocks from a file: gate and up as one product, experts one behind the other."""

__all__ = ["feed_forward_weights"]

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from perfmodel.models.architecture import DenseFFN, FeedForward, MoEFFN
from perfmodel_executors.kernels.weight_formats import (
    ExpertWeight,
    Weight,
    dequantize,
    fp4_from_pairs,
    join_rows,
    stack_experts,
)
from perfmodel_executors.models.loading.layouts import split_pairs
from perfmodel_executors.models.loading.reader import Reader
from perfmodel_executors.models.weights import FFNWeights, MoEWeights


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
    """Experts with tensors of their own."""
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
