"""The operators of one feed-forward block: dense (sharded by columns, then rows) or mixture of experts."""

__all__ = ["dense_ffn_nodes", "mlp_nodes"]

from functools import partial

from perfmodel.ops.activation import activation
from perfmodel.ops.gemm import gemm
from perfmodel.ops.node import LayerContext, OperatorNode, on_tokens
from perfmodel.specs.model.architecture import DenseFFN


def dense_ffn_nodes(ffn: DenseFFN, context: LayerContext) -> list[OperatorNode]:
    """Gate and up projection (one GEMM when fused), activation, down projection."""
    return mlp_nodes(
        context.shard.columns(ffn.intermediate_size),
        context,
        component="dense_ffn",
        is_gated=ffn.gated,
        function=ffn.activation,
        has_bias=ffn.bias,
    )


def mlp_nodes(
    width: int,
    context: LayerContext,
    *,
    component: str,
    is_gated: bool,
    function: str,
    has_bias: bool = False,
    prefix: str = "",
) -> list[OperatorNode]:
    """A dense feed-forward block of `width` intermediate elements on this device."""
    form, hidden, size = context.format(component), context.hidden, context.element_bytes
    if is_gated:
        ups = {"gate_up_proj": 2 * width} if context.is_fused else {"gate_proj": width, "up_proj": width}
    else:
        ups = {"up_proj": width}
    nodes = [
        on_tokens(prefix + name, partial(gemm, prefix + name, n=columns, k=hidden, form=form, has_bias=has_bias))
        for name, columns in ups.items()
    ]
    act = partial(
        activation, size=width, element_bytes=size, function=function, is_gated=is_gated, is_fused=context.is_fused
    )
    down = prefix + "down_proj"
    nodes.append(on_tokens(prefix + "activation", act))
    nodes.append(on_tokens(down, partial(gemm, down, n=hidden, k=width, form=form, has_bias=has_bias)))
    return nodes
