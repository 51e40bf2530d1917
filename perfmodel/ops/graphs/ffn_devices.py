"""Attention and feed-forward layers on different devices (AFD): the step graphs of both kinds.

With n tokens of a micro-batch on each of A attention ranks, all A n of them pass S servers of T devices. In each layer

    attention_to_ffn   a rank sends its tokens to every server; a device receives a T-th of all of them
    ffn_all_gather     within a server, so that each of its devices has all tokens
    experts, ...       whole on a device under expert parallelism, or cut by columns over all S T devices
    ffn_reduce_scatter within a server
    ffn_to_attention   the way back; a rank adds up what the S servers send

All else is on the attention ranks. Tokens go in the format that experts multiply, and come back in the model's.
Source: StepMesh, Introduction.md (stepfun-ai/StepMesh); Step-3 (arXiv 2507.19427)."""

from collections.abc import Sequence
from dataclasses import replace

from perfmodel.ops.collectives import all_gather, reduce_scatter, send_recv
from perfmodel.ops.messages import RankGroup
from perfmodel.ops.node import LayerContext, OperatorNode, on_tokens
from perfmodel.specs.engine.spec import AfdConfig, EngineSpec

Nodes = tuple[OperatorNode, ...]
FFN_COMPONENTS = ("dense_ffn", "experts", "shared_experts")  # whose weights feed-forward devices hold
_TO_FFN, _TO_ATTENTION = "attention_to_ffn", "ffn_to_attention"
_FFN = ("gate_up_proj", "gate_proj", "up_proj", "up_rank_proj", "activation", "down_proj", "down_proj_rank")
_EXCHANGES = ("moe_", "mlp_all_reduce", "mixer_all_reduce", "embedding_all_reduce")


def engine_of_ffn(engine: EngineSpec, config: AfdConfig) -> EngineSpec:
    """The engine as its feed-forward devices see it: one group that has all tokens and shares out the weights."""
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": config.num_ffn_devices}
    return engine.model_copy(update={"afd_config": None, **sizes})


def apart(nodes: Nodes, of_ffn: Nodes, messages: Sequence[Nodes]) -> tuple[Nodes, Nodes]:
    """The nodes of attention ranks, which are among `nodes`, and of feed-forward devices, among `of_ffn`.

    messages: before and after the latter"""
    before, after = messages
    own = [node for node in nodes if not _is_ffn(node) and not node.name.startswith(_EXCHANGES)]
    return tuple(own), (*before, *(node for node in of_ffn if _is_ffn(node)), *after)


def _is_ffn(node: OperatorNode) -> bool:
    name = node.name.partition("@")[0]
    return name in _FFN or name.startswith(("experts", "shared_", "latent_"))


def message_nodes(context: LayerContext, config: AfdConfig, num_layers: int) -> list[Nodes]:
    """Messages of `num_layers` layers before and after their feed-forward blocks, by the tokens of all ranks."""
    devices, ranks = config.ffn_tensor_parallel_size, context.shard.dp
    sent, returned = (context.hidden * size for size in (context.format("experts").input_bytes, context.element_bytes))
    busiest = max(config.num_ffn_servers / ranks, 1 / devices)  # of all tokens, what one end sends or receives
    # Peers of two kinds: as far apart as there are devices of the more frequent one.
    pair = RankGroup("pipeline", max(ranks, config.num_ffn_devices), 2)
    before = [
        on_tokens(_TO_FFN, lambda n: replace(send_recv(n * sent * busiest, pair), name=_TO_FFN)),
        on_tokens("ffn_all_gather", lambda n: all_gather(n * sent, devices, "ffn_all_gather")),
    ]
    after = [
        on_tokens("ffn_reduce_scatter", lambda n: reduce_scatter(n * returned, devices, "ffn_reduce_scatter")),
        on_tokens(_TO_ATTENTION, lambda n: replace(send_recv(n * returned * busiest, pair), name=_TO_ATTENTION)),
    ]
    return [tuple(replace(node, count=num_layers) for node in nodes) for nodes in (before, after)]
