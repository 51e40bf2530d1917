"""The operators of recurrent mixers: Mamba (1 and 2) and the gated delta net, sharded by heads."""

__all__ = ["conv_channels", "delta_net_nodes", "mamba_nodes", "state_shape"]

from collections.abc import Sequence
from functools import partial
from math import ceil

from perfmodel.models.architecture import GatedDeltaNet, Mamba
from perfmodel.ops.collectives import all_reduce
from perfmodel.ops.elementwise import gate, rms_norm
from perfmodel.ops.linear import gemm
from perfmodel.ops.node import LayerContext, OperatorNode, on_decodes, on_prefills, on_tokens
from perfmodel.ops.recurrent.scan import (
    StateShape,
    causal_conv,
    chunked_delta_rule,
    chunked_ssd,
    selective_scan,
    state_update,
)
from perfmodel.ops.work import Work


def state_shape(mixer: Mamba | GatedDeltaNet, tp: int, dtype: str, element_bytes: float) -> StateShape:
    """The recurrent state of the mixer on one of `tp` devices.

    dtype: of the products; element_bytes: of an element of inputs and outputs, in bytes
    """
    if isinstance(mixer, GatedDeltaNet):
        heads, key_heads = ceil(mixer.num_value_heads / tp), ceil(mixer.num_key_heads / tp)
        rows, columns = mixer.key_head_dim, mixer.value_head_dim
        inputs = 2 * key_heads * rows + 2 * heads * columns
        return StateShape(heads, rows, columns, key_heads, inputs, dtype, element_bytes)
    heads, groups = ceil(mixer.num_heads / tp), max(1, ceil(mixer.num_groups / tp))
    rows, columns = mixer.state_size, mixer.head_dim
    inputs = 2 * heads * columns + 2 * groups * rows
    return StateShape(heads, rows, columns, groups, inputs, dtype, element_bytes)


def conv_channels(mixer: Mamba | GatedDeltaNet, state: StateShape) -> int:
    """Channels of the causal convolution on the device of `state`: q, k, v; x, B, C; or x alone (Mamba-1)."""
    values = state.num_heads * state.columns
    if isinstance(mixer, Mamba) and mixer.dt_rank is not None:
        return values
    return values + 2 * state.num_groups * state.rows


def delta_net_nodes(mixer: GatedDeltaNet, context: LayerContext) -> list[OperatorNode]:
    """Projections of q, k, v, z and of the gates a, b; convolution; delta rule; gated norm; output projection."""
    state = state_shape(mixer, context.shard.tp, context.dtype, context.element_bytes)
    values = state.num_heads * state.columns
    channels = conv_channels(mixer, state)
    form, hidden, size = context.format("linear_attention"), context.hidden, context.element_bytes
    return [
        on_tokens("in_proj", partial(gemm, "in_proj", n=channels + values, k=hidden, form=form)),
        on_tokens("gates_proj", partial(gemm, "gates_proj", n=2 * state.num_heads, k=hidden, form=form)),
        on_tokens("causal_conv", lambda n: causal_conv(n, channels, mixer.conv_kernel, size)),
        on_prefills("chunked_scan", lambda prefills: chunked_delta_rule(prefills, state)),
        on_decodes("state_update", lambda seqs, _, queries: state_update(seqs, state, queries=queries)),
        *_gated_norm(values, context),
        on_tokens("out_proj", partial(gemm, "out_proj", n=hidden, k=values, form=form)),
    ]


def mamba_nodes(mixer: Mamba, context: LayerContext) -> list[OperatorNode]:
    """Input projection, convolution, scan, gate, output projection; Mamba-1 projects x to dt, B and C in between."""
    state = state_shape(mixer, context.shard.tp, context.dtype, context.element_bytes)
    inner = state.num_heads * state.columns
    channels = conv_channels(mixer, state)
    form, hidden, size = context.format("linear_attention"), context.hidden, context.element_bytes
    bias, dt_rank = mixer.proj_bias, mixer.dt_rank
    width = 2 * inner if dt_rank is not None else inner + channels + state.num_heads

    def scan(prefills: Sequence[tuple[int, int]]) -> Work:
        return chunked_ssd(prefills, state, mixer.chunk_size) if dt_rank is None else selective_scan(prefills, state)

    flops = 5.0 if dt_rank is None else 9.0  # Mamba-2's decay is one number per head
    nodes = [
        on_tokens("in_proj", partial(gemm, "in_proj", n=width, k=hidden, form=form, has_bias=bias)),
        on_tokens("causal_conv", lambda n: causal_conv(n, channels, mixer.conv_kernel, size)),
    ]
    if dt_rank is not None:
        nodes += _step_projections(dt_rank, inner, mixer.state_size, context)
    return [
        *nodes,
        on_prefills("chunked_scan" if dt_rank is None else "selective_scan", scan),
        on_decodes("state_update", lambda seqs, _, queries: state_update(seqs, state, "state_update", flops, queries)),
        *(_gated_norm(inner, context) if dt_rank is None and mixer.inner_norm else []),
        on_tokens("out_proj", partial(gemm, "out_proj", n=hidden, k=inner, form=form, has_bias=bias)),
    ]


def _step_projections(dt_rank: int, inner: int, state_size: int, context: LayerContext) -> list[OperatorNode]:
    """Mamba-1: x to (dt, B, C), summed over devices since the inner width is cut, and dt to every channel."""
    form, size, tp = context.format("linear_attention"), context.element_bytes, context.shard.tp
    columns = dt_rank + 2 * state_size
    nodes = [on_tokens("x_proj", partial(gemm, "x_proj", n=columns, k=inner, form=form))]
    if tp > 1:
        name, group = "x_proj_all_reduce", context.shard.tp_group
        nodes.append(on_tokens(name, lambda n: all_reduce(n * columns * size, group, name)))
    nodes.append(on_tokens("dt_proj", partial(gemm, "dt_proj", n=inner, k=dt_rank, form=form)))
    return nodes


def _gated_norm(width: int, context: LayerContext) -> list[OperatorNode]:
    """Norm of the scan's output times its gate: one kernel of three passes, or a norm's and a gate's when unfused."""
    size = context.element_bytes
    if context.is_fused:
        return [on_tokens("gated_norm", lambda n: gate("gated_norm", n, width, size))]
    return [
        on_tokens("gated_norm", lambda n: rms_norm("gated_norm", n, width, size, is_fused=False)),
        on_tokens("output_gate", lambda n: gate("output_gate", n, width, size, is_fused=False)),
    ]
