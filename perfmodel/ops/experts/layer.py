"""The operators of one mixture-of-experts block, with the messages of its parallelism.

As vLLM runs it, with n tokens on each of dp ranks of tp devices:
    dp = 1                    every device holds all n tokens; experts cut by width, or shared out whole under expert
                              parallelism; one all-reduce combines either way
    dp > 1, cut by width      all-gather of the tokens of all ranks, then reduce-scatter, then an all-gather within the
                              tensor-parallel group
    dp > 1, expert parallel   the same with vLLM's default all2all backend (allgather_reducescatter), router logits
                              included; with the others an all-to-all to the ranks of the chosen experts and back (each
                              device dispatches n / tp tokens), and the last all-gather

The experts of a device, the all-gather and the reduce-scatter see the tokens of all ranks, however these are shared out
(`BatchShape.group_tokens`). An all-to-all lasts as long as its largest sender needs, which is the rank that sets the
time: it goes by the rank's own tokens.
"""

__all__ = ["moe_nodes"]

from functools import partial
from math import ceil

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from perfmodel.ops.elementwise import gate
from perfmodel.ops.experts.operators import experts, route
from perfmodel.ops.feedforward import mlp_nodes
from perfmodel.ops.linear import gemm
from perfmodel.ops.messages import Exchange, distinct_ranks
from perfmodel.ops.node import LayerContext, OperatorNode, on_group, on_tokens
from perfmodel.ops.work import Work


def moe_nodes(ffn: MoEFFN, context: LayerContext) -> list[OperatorNode]:
    """Router, top-k, shared experts, dispatch, routed experts, combine."""
    hidden, router = context.hidden, context.format("router")
    return [
        on_tokens("router", partial(gemm, "router", n=ffn.num_experts, k=hidden, form=router)),
        on_tokens("topk", lambda n: route(n, ffn.num_experts, ffn.top_k, is_fused=context.is_fused)),
        *_shared_nodes(ffn, context),
        *_latent_nodes(ffn, context, "latent_in_proj"),
        *_dispatch_nodes(ffn, context),
        _expert_node(ffn, context),
        *_latent_nodes(ffn, context, "latent_out_proj"),
        *_combine_nodes(ffn, context),
    ]


def _expert_node(ffn: MoEFFN, context: LayerContext) -> OperatorNode:
    shard, form = context.shard, context.format("experts")
    intermediate = ceil(ffn.intermediate_size / shard.moe_tp)
    width, local = ffn.latent_size or context.hidden, shard.local_experts(ffn.num_experts)
    sizes = {"width": width, "intermediate": intermediate, "local_experts": local}

    def work(everyone: int) -> Work:
        load = context.routing(ffn, everyone, shard.ep)
        return experts(everyone, ffn, load, form, **sizes, is_fused=context.is_fused)

    return on_group("experts", work, shard.dp)


def _shared_nodes(ffn: MoEFFN, context: LayerContext) -> list[OperatorNode]:
    if not ffn.shared_intermediate_size:
        return []
    nodes = mlp_nodes(
        context.shard.columns(ffn.shared_intermediate_size),
        context,
        component="shared_experts",
        is_gated=ffn.gated,
        function=ffn.activation,
        prefix="shared_",
    )
    if ffn.shared_gate:
        hidden = context.hidden
        form, fused = context.format("shared_experts"), context.is_fused
        gated = partial(gate, "shared_gate", size=hidden, element_bytes=context.element_bytes, is_fused=fused)
        nodes.append(on_tokens("shared_expert_gate", partial(gemm, "shared_expert_gate", n=1, k=hidden, form=form)))
        nodes.append(on_tokens("shared_gate", gated))
    return nodes


def _latent_nodes(ffn: MoEFFN, context: LayerContext, name: str) -> list[OperatorNode]:
    """Projections into and out of the latent width of the experts, on every device in full."""
    if ffn.latent_size is None:
        return []
    form = context.format("shared_experts")
    n, k = (ffn.latent_size, context.hidden) if name == "latent_in_proj" else (context.hidden, ffn.latent_size)
    return [on_tokens(name, partial(gemm, name, n=n, k=k, form=form))]


def _dispatch_nodes(ffn: MoEFFN, context: LayerContext) -> list[OperatorNode]:
    shard = context.shard
    if shard.dp == 1:
        return []
    width = ffn.latent_size or context.hidden
    if shard.gathers_tokens:
        # Tokens of a tensor-parallel group are on all its devices; under expert parallelism each hands on its part,
        # with what the router said of them.
        ranks = shard.ep_group if shard.is_expert_parallel else shard.dp_group
        logits = ffn.num_experts if shard.is_expert_parallel else 0
        payload, name = (width + logits) * context.element_bytes, "moe_all_gather"
        return [on_group(name, lambda n: all_gather(n * payload, ranks, name), shard.dp)]
    return [_exchange_node(ffn, context, "dispatch", context.format("experts").input_bytes)]


def _exchange_node(ffn: MoEFFN, context: LayerContext, kernel: str, element_bytes: float) -> OperatorNode:
    """Tokens to the ranks of their experts, or their results back; a device has a tp-th of its rank's tokens."""
    shard, name, width = context.shard, f"moe_{kernel}", ffn.latent_size or context.hidden
    group, route, copy = shard.ep_group, shard.route, width * element_bytes / shard.tp
    sent = distinct_ranks(ffn, shard.ep) * width * element_bytes / shard.tp
    return on_tokens(name, lambda n: all_to_all(n * sent, group, name, kernel, Exchange(ffn, n * copy, route)))


def _combine_nodes(ffn: MoEFFN, context: LayerContext) -> list[OperatorNode]:
    shard, size = context.shard, context.element_bytes
    hidden, width = context.hidden, ffn.latent_size or context.hidden
    if shard.dp == 1:
        if shard.tp == 1:
            return []
        group = shard.tp_group
        return [on_tokens("moe_all_reduce", lambda n: all_reduce(n * hidden * size, group, "moe_all_reduce"))]
    if not shard.gathers_tokens:
        nodes = [_exchange_node(ffn, context, "combine", size)]
    else:
        payload, ranks, name = width * size, shard.ep_group, "moe_reduce_scatter"
        nodes = [on_group(name, lambda n: reduce_scatter(n * payload, ranks, name), shard.dp)]
    if shard.tp > 1:
        gathered, group, gather = hidden * size, shard.tp_group, "moe_tp_all_gather"
        nodes.append(on_tokens(gather, lambda n: all_gather(n * gathered, group, gather)))
    return nodes
