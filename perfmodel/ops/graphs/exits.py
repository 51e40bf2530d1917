"""Layers that decoded tokens may leave out: how often their operators run, and on how many rows.

Of B decodes p_i B reach layer i. It runs if any of them does, and for all P tokens of prompts, which pass all layers:

    runs  Q = sum over layers of q_i,  q_i = 1 with prompts, else 1 - (1 - p_i)^B     (weights are read Q times)
    rows of a run = (L P + B sum p_i) / Q                                             (FLOPs follow the tokens)

What a layer that was left out owes the cache is its keys and values, from the state the token left with: their
projection runs for the other (1 - p_i) B rows. Source: Schuster et al. 2022 (CALM), section 3.1 (state propagation);
q_i: tokens that leave independently of each other. Equal layers are timed at their mean number of rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from perfmodel.models.architecture import Attention, LatentAttention, Mixer
from perfmodel.ops.attention.layer import attention_heads
from perfmodel.ops.linear import gemm, linear_nodes
from perfmodel.ops.node import LayerContext, OperatorNode, on_tokens
from perfmodel.ops.work import BatchShape, Depends, Work


def leaving_node(node: OperatorNode, reach: Sequence[float]) -> OperatorNode:
    """`node`, in each of some layers, for the tokens that come to them: `reach` of the decodes, layer by layer.

    The cache is written for all tokens in any case. A kernel for prompts and decodes alike is left as it is: the graph
    does without, where prompts pass layers that decodes leave out.
    """
    if node.name == "kv_write" or node.depends in (Depends.PREFILL, Depends.MIXED):
        return replace(node, count=node.count * len(reach))
    return _limited(node, reach)


def filling_nodes(mixer: Mixer | None, context: LayerContext, reach: Sequence[float]) -> list[OperatorNode]:
    """Keys and values (or the latent) of the tokens that do not come to the layers of `mixer`."""
    hidden, form = context.hidden, context.format("attention")
    if isinstance(mixer, Attention):
        widths = {"skipped_kv_proj": attention_heads(mixer, context).kv_elements}
        nodes = linear_nodes(widths, hidden, form, rank=mixer.qkv_rank)
    elif isinstance(mixer, LatentAttention):
        nodes = linear_nodes({"skipped_kv_proj": mixer.kv_lora_rank + mixer.qk_rope_head_dim}, hidden, form)
    else:
        return []
    return [_limited(node, [1 - p for p in reach], has_prompts=False) for node in nodes]


def asking_nodes(context: LayerContext, reach: Sequence[float]) -> list[OperatorNode]:
    """The LM head behind each layer but the last, where it decides who leaves."""
    exits = context.model.exits
    if exits is None or not exits.asks_lm_head or not reach:
        return []
    columns = context.shard.columns(context.model.vocab_size)
    work = partial(gemm, "exit_lm_head", n=columns, k=context.hidden, form=context.format("lm_head"))
    return [_limited(on_tokens("exit_lm_head", work), reach, has_prompts=False)]


def _limited(node: OperatorNode, reach: Sequence[float], has_prompts: bool = True) -> OperatorNode:
    is_decode, each = node.depends is Depends.DECODE, node.count
    num_layers, sum_reach = len(reach), sum(reach)

    def prompts(shape: BatchShape) -> int:
        return shape.num_tokens - shape.num_decodes if has_prompts and not is_decode else 0

    def runs(shape: BatchShape) -> float:
        if prompts(shape):
            return float(each * num_layers)
        return each * sum(1.0 - (1.0 - p) ** shape.num_decodes for p in reach)

    def work(shape: BatchShape) -> Work:
        num_runs = runs(shape) / each
        if not num_runs:
            return node.work(BatchShape(0, 0))
        share = sum_reach / num_runs
        rows = num_layers * prompts(shape) / num_runs + shape.num_decodes * share
        # Means over the runs: operators count in real numbers, whatever the shapes of real steps are.
        return node.work(
            shape._replace(
                num_tokens=cast(int, rows),
                num_decodes=cast(int, shape.num_decodes * share),
                decode_context=cast(int, shape.decode_context * share),
                decode_windowed=tuple(cast(int, context * share) for context in shape.decode_windowed),
            )
        )

    depends = node.depends if is_decode else Depends.ROWS
    return replace(node, count=each * num_layers, depends=depends, work=work, runs=runs)
